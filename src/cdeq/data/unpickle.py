"""Pickles of arrays by unknown authors, as Python 2 wrote them, read without running what they name.

`pickle` calls whatever a file names. Here a name is looked up in a short table of stand-ins that keep numbers and do
nothing else; any other name is refused. A hostile file can still end the process by
exhausting memory or the stack, but it cannot run code.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

_NUMBERS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}


class UnsafePickleError(ValueError):
    """The file names something that reading arrays does not need, and that could run code."""


# Each stand-in class has a __setstate__, so that a file cannot set attributes of the class itself.


class CsrArrays:
    """The arrays of a CSR matrix as scipy saves them; the columns of a row may be unsorted."""

    shape: tuple[int, int] = (0, 0)
    indptr: np.ndarray = np.empty(0)
    indices: np.ndarray = np.empty(0)
    data: np.ndarray = np.empty(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows, columns = state["_shape"] if "_shape" in state else state["shape"]
        self.shape = int(rows), int(columns)
        self.indptr, self.indices, self.data = (
            state[name].values for name in ("indptr", "indices", "data")
        )


class _Dtype:
    def __init__(self, code: str, *_: Any):
        self.code = code

    def __setstate__(self, state: tuple) -> None:
        _version, order, *details = state
        if self.code not in _NUMBERS or details[:3] != [None, None, None]:
            raise UnsafePickleError(f"refused arrays of type {self.code!r}: only numbers are read")
        self.dtype = np.dtype(order + self.code)


class _Array:
    values: np.ndarray = np.empty(0)

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: tuple) -> None:
        _version, shape, kind, fortran, content = state
        content = content.encode("latin1") if isinstance(content, str) else content
        array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")
        self.values = array.astype(array.dtype.newbyteorder("="))  # a copy, which can be written to


class _Reader(pickle.Unpickler):
    stand_ins: ClassVar[dict[str, Any]] = {
        "numpy.core.multiarray._reconstruct": _Array,
        "numpy._core.multiarray._reconstruct": _Array,
        "numpy.ndarray": _Array,
        "numpy.dtype": _Dtype,
        "scipy.sparse.csr.csr_matrix": CsrArrays,
        "scipy.sparse._csr.csr_matrix": CsrArrays,
        "collections.defaultdict": defaultdict,
        "__builtin__.list": list,
        "builtins.list": list,
        "_codecs.encode": str.encode,  # how Python 3 writes bytes in protocol 2
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.stand_ins:
            raise UnsafePickleError(f"refused to import '{module}.{name}'")
        return self.stand_ins[f"{module}.{name}"]


def read_pickle(path: str | Path) -> Any:
    """The array, the `CsrArrays` or the numbers, strings, lists and dicts in a pickle.

    Strings of Python 2 come back as str, latin-1. `UnsafePickleError` if the file names anything else, ValueError if
    it is malformed or cut short; no code of the file runs in either case.
    """
    try:
        with open(path, "rb") as file:
            value = _Reader(file, encoding="latin1").load()
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{path}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} is not a complete pickle of arrays: {error}") from None
    return value.values if isinstance(value, _Array) else value
