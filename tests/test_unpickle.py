"""Pickles of arrays: what Python 2 and 3 wrote of them is read, and nothing that a file names is run."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdeq.data import UnsafePickleError
from cdeq.data.graphs import csr_from_arrays
from cdeq.data.unpickle import CsrArrays, read_pickle
from graph_files import Attack, array, csr, name, neighbours, pickled, string


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """read(content): what `read_pickle` makes of a file with these bytes."""
    path = tmp_path_factory.mktemp("pickles") / "evil"

    def read_bytes(content):
        path.write_bytes(content)
        return read_pickle(path)

    return read_bytes


@pytest.mark.parametrize("numpy_module", ["numpy.core.multiarray", "numpy._core.multiarray"])
@pytest.mark.parametrize("scipy_module", ["scipy.sparse.csr", "scipy.sparse._csr"])
def test_arrays_and_matrices_of_old_and_new_names(read, numpy_module, scipy_module):
    dense = np.array([[0, 1.5, 0], [2, 0, -3]], dtype="<f4")
    found = read(pickled(csr(dense, scipy_module, numpy_module)))
    assert isinstance(found, CsrArrays)
    again = csr_from_arrays(found.indptr, found.indices, found.data, found.shape)
    assert again.to_dense().numpy().tolist() == dense.tolist()
    wide = np.arange(6, dtype=">i8").reshape(2, 3)
    native = read(pickled(array(wide, numpy_module)))
    assert native.dtype == np.int64
    assert native.tolist() == wide.tolist()
    assert read(pickled(neighbours({3: [1, 2], 4: []}))) == {3: [1, 2], 4: []}


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_python_3_writes_is_read(read, protocol):
    for values in (np.arange(4), np.arange(6.0).reshape(2, 3).T):
        assert np.array_equal(read(pickle.dumps(values, protocol)), values)
    for plain in ({"a": (0.5, -(2**40))}, ["ü", b"\xff"], defaultdict(list, {0: [1], 1: [0]})):
        assert read(pickle.dumps(plain, protocol)) == plain
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.random(6, 5, 0.4, format="csr", random_state=0)
    found = read(pickle.dumps(matrix, protocol))
    assert np.array_equal(found.data, matrix.data)
    assert found.shape == (6, 5)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "named"),
    [(os.system, "system"), (eval, "eval"), (exec, "exec"), (getattr, "getattr")],
)
def test_attacks_by_reduce_run_nothing(read, function, named, protocol, tmp_path):
    marker = tmp_path / "ran"
    code = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w')"
    with pytest.raises(UnsafePickleError, match=rf"evil: refused to import '\w+\.{named}'"):
        read(pickle.dumps({"x": [Attack(function, code)]}, protocol))
    assert not marker.exists()


def test_a_chain_of_attributes_to_a_shell_runs_nothing(read, tmp_path):
    """getattr(getattr(list, ...), ...) and a dotted name both want a name that is not on the list."""
    marker = tmp_path / "ran"
    shell = string(f"touch {marker}".encode()) + b"\x85R"
    chain = name("builtins", "getattr") + name("collections", "defaultdict")
    with pytest.raises(UnsafePickleError, match=r"builtins\.getattr"):
        read(pickled(chain + string(b"__subclasses__") + b"\x86R)R" + shell))
    for module, dotted in (("numpy", "ndarray.tofile"), ("_codecs", "encode.__self__.open")):
        body = string(module.encode()) + string(dotted.encode()) + b"\x93"  # STACK_GLOBAL
        with pytest.raises(UnsafePickleError, match=rf"'{module}\.{dotted}'"):
            read(b"\x80\x04" + body + shell + b".")
    assert not marker.exists()


SIMPLE = array(np.arange(3, dtype="<i4"))
MATRIX = name("scipy.sparse.csr", "csr_matrix")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (name("__builtin__", "eval") + string(b"1") + b"\x85R", "__builtin__.eval"),
        (name("posix", "system") + string(b"true") + b"\x85R", "posix.system"),
        (name("numpy", "load") + string(b"f") + b"\x85R", "numpy.load"),
        (name("collections", "OrderedDict") + b")R", "OrderedDict"),
        (b"(" + string(b"true") + b"ios\nsystem\n", "os.system"),  # INST
        (array(np.arange(3, dtype="<i8"), code="O8"), "O8"),  # pointers as bytes
    ],
)
def test_what_arrays_do_not_need_is_refused_by_name(read, body, message):
    with pytest.raises(UnsafePickleError, match=message):
        read(pickled(body))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"plain text",
        b"\x80\x02",
        pickled(b""),
        pickled(b"h\x07"),
        pickled(b"\x85"),
        pickled(b"Ne"),
        pickled(b"}(Nu"),
        pickled(b"\x82\x01"),  # EXT1, of which no number is known
        pickled(b"Pfile\n"),  # PERSID
        # State set on a number and on the classes that stand in for others: nothing is set.
        pickled(b"K\x01}b"),
        pickled(MATRIX + b"N}" + string(b"shape") + b"Ns\x86b"),
        pickled(name("numpy", "dtype") + b"N}" + string(b"code") + b"Ns\x86b"),
        pickled(name("collections", "defaultdict") + b"N}" + string(b"copy") + b"Ns\x86b"),
        # Calls of an array and of a number; an array cut short; matrices without their parts.
        pickled(SIMPLE + b")R"),
        pickled(b"K\x01)R"),
        pickled(SIMPLE.replace(string(np.arange(3, dtype="<i4").tobytes()), string(b"12345"))),
        pickled(MATRIX + b")\x81]b"),
        pickled(MATRIX + b")\x81}b"),
    ],
)
def test_malformed_pickles_are_said_to_be_so(read, content):
    with pytest.raises(ValueError, match="evil is not a complete pickle"):
        read(content)
    assert CsrArrays.shape == (0, 0)


def test_a_pickle_cut_anywhere_is_refused(read):
    whole = pickled(csr(np.eye(3, dtype="<f4")))
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="pickle"):
            read(whole[:end])


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_damage_gives_a_value_or_a_value_error(read, data):
    content = bytearray(pickled(csr(np.eye(3, dtype="<f4"))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        read(bytes(content))
