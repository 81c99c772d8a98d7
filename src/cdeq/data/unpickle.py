"""Pickles of arrays from strangers, read without running them.

Python's own `pickle` calls whatever a file names. Here the opcodes are interpreted one by one: a name in the file is
only a name, looked up in a short table, and nothing but numbers, strings, lists, dicts, tuples, arrays and CSR
matrices can come out. Enough for what Python 2 wrote of numpy arrays, scipy's csr_matrix and dicts of lists.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_SCIPY = ("scipy.sparse.csr", "scipy.sparse._csr")
_BUILTINS = ("__builtin__", "builtins")

# What the file calls a thing -> what it means here. Any other name is refused.
_MEANINGS = {
    **{f"{module} _reconstruct": "array" for module in _NUMPY},
    **{f"{module} scalar": "scalar" for module in _NUMPY},
    **{f"{module} csr_matrix": "csr" for module in _SCIPY},
    **{f"{module} list": "list" for module in _BUILTINS},
    **{f"{module} int": "int" for module in _BUILTINS},
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "collections defaultdict": "defaultdict",
    "_codecs encode": "encode",  # how Python 3 writes bytes in protocol 2
}
_NUMBER_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}
# What operands of a wrong kind raise.
_MALFORMED = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
_BYTE_ORDERS = {"<", ">", "=", "|"}


class UnsafePickleError(ValueError):
    """The file names something that reading arrays does not need, and that could run code."""


class CsrArrays(NamedTuple):
    """The three arrays of a CSR matrix as scipy saves them; the columns of a row may be unsorted."""

    shape: tuple[int, int]
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


def read_pickle(path: str | Path) -> Any:
    """The numbers, strings, lists, dicts, tuples, arrays and `CsrArrays` in a pickle.

    Strings of Python 2 come back as str, latin-1. `UnsafePickleError` on anything else in the file, ValueError on
    one that is malformed or cut short; no code of the file runs in either case.
    """
    return parse_pickle(Path(path).read_bytes(), source=str(path))


def parse_pickle(content: bytes, *, source: str = "pickle") -> Any:
    """`read_pickle` on bytes; `source` names them in errors."""
    machine = _Machine()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings, which are refused anyway
            for opcode, argument, _ in pickletools.genops(content):
                machine.run(opcode.name, argument)
        return machine.result()
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{source}: {error}") from None
    except _MALFORMED as error:
        raise ValueError(f"{source} is not a complete pickle of arrays: {error}") from None


@dataclass(frozen=True)
class _Name:
    """Something the file names; never the thing itself."""

    meaning: str


class _Box:
    """An object the file is still filling: an array, a dtype or a CSR matrix."""

    def __init__(self, meaning: str, start: Any = None):
        self.meaning, self.start, self.value = meaning, start, None

    def fill(self, state: Any) -> None:
        self.value = _FILL[self.meaning](self.start, state)


def _opened(value: Any) -> Any:
    """What is in a box; other values as they are."""
    if not isinstance(value, _Box):
        return value
    if value.value is None:
        raise ValueError(f"a {value.meaning} without content")
    return value.value


def _bytes_of(value: Any) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else bytes(memoryview(value))


def _dtype_of(code: str, state: tuple) -> np.dtype:
    order, details = state[1], state[2:5]  # details: of records, which numbers have none of
    if not isinstance(order, str) or details != (None, None, None):
        raise UnsafePickleError(f"refused arrays of type {code!r}: only plain numbers are read")
    if code not in _NUMBER_TYPES or order not in _BYTE_ORDERS:
        raise UnsafePickleError(f"refused arrays of type {order + code!r}: only numbers are read")
    return np.dtype(order + code)


def _numbers(content: Any, dtype: Any) -> np.ndarray:
    if not isinstance(dtype, np.dtype):
        raise ValueError("an array without a type")
    return np.frombuffer(_bytes_of(content), dtype)


def _array_of(_: Any, state: tuple) -> np.ndarray:
    _version, shape, dtype, fortran, content = state
    array = _numbers(content, dtype).reshape(shape, order="F" if fortran else "C")
    return array.astype(array.dtype.newbyteorder("="))  # a copy, so that it can be written to


def _csr_of(_: Any, state: dict) -> CsrArrays:
    shape = state.get("_shape", state.get("shape"))
    if not isinstance(shape, tuple):
        raise ValueError("a csr_matrix without a shape")
    rows, columns = (int(size) for size in shape)
    arrays = [state[name] for name in ("indptr", "indices", "data")]
    if not all(isinstance(array, np.ndarray) for array in arrays):
        raise ValueError("a csr_matrix whose parts are no arrays")
    return CsrArrays((rows, columns), *arrays)


_FILL: dict[str, Callable[[Any, Any], Any]] = {
    "dtype": _dtype_of,
    "array": _array_of,
    "csr": _csr_of,
}


def _called(name: Any, arguments: tuple) -> Any:
    """What `name(*arguments)` stands for, of the few calls that arrays need."""
    meaning = name.meaning if isinstance(name, _Name) else None
    if meaning == "array" and arguments[0] == _Name("ndarray"):
        return _Box("array")
    if meaning == "dtype" and isinstance(arguments[0], str):
        return _Box("dtype", arguments[0])
    if meaning == "scalar":
        dtype, content = arguments
        return _numbers(content, _opened(dtype)).item()
    if meaning == "defaultdict" and arguments in ((), (_Name("list"),), (_Name("int"),)):
        return {}
    if meaning == "list" and arguments == ():
        return []
    if meaning == "encode" and arguments[1:] == ("latin1",):
        return _bytes_of(arguments[0])
    if meaning == "csr" and arguments == ():
        return _Box("csr")
    raise UnsafePickleError(f"a call of {meaning or type(name).__name__} with unknown arguments")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_PUT = {"BINPUT", "LONG_BINPUT"}
_GET = {"BINGET", "LONG_BINGET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The pickle machine without its dangerous half: a stack, marks and a memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, opcode: str, argument: Any) -> None:
        """One opcode with its argument."""
        if opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            self.stack.append(_EMPTY[opcode]())
        elif opcode in _PUT:
            self.memo[argument] = self.stack[-1]
        elif opcode in _GET:
            self.stack.append(self.memo[argument])
        elif opcode in _TUPLES:
            self.stack.append(_tuple(self.popped(_TUPLES[opcode])))
        elif opcode in _STEPS:
            _STEPS[opcode](self, argument)
        else:
            named = "" if argument is None else f" of {argument!r}"
            raise UnsafePickleError(f"refused the opcode {opcode}{named}, which arrays do not need")

    def popped(self, count: int) -> list[Any]:
        """The last `count` items of the stack, taken off it."""
        if len(self.stack) < count:
            raise ValueError("an opcode without its operands")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def marked(self) -> list[Any]:
        """What was pushed since the last mark, taken off the stack with it."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise ValueError(f"{len(self.stack)} values are left where one is expected")
        return _opened(self.stack[0])


def _proto(machine: _Machine, version: int) -> None:
    if version > 4:
        raise ValueError(f"protocol {version} is not read; save again with protocol 2")


def _mark(machine: _Machine, _: Any) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _global(machine: _Machine, name: str) -> None:
    if name not in _MEANINGS:
        raise UnsafePickleError(f"refused to import {name.replace(' ', '.')!r}")
    machine.stack.append(_Name(_MEANINGS[name]))


def _stack_global(machine: _Machine, _: Any) -> None:
    module, name = machine.popped(2)
    _global(machine, f"{module} {name}")


def _call(machine: _Machine, _: Any) -> None:
    name, arguments = machine.popped(2)
    if not isinstance(arguments, tuple):
        raise ValueError("a call whose arguments are no tuple")
    machine.stack.append(_called(name, arguments))


def _build(machine: _Machine, _: Any) -> None:
    (state,) = machine.popped(1)
    if not isinstance(machine.stack[-1], _Box):
        raise UnsafePickleError(f"refused to set the state of a {type(machine.stack[-1]).__name__}")
    machine.stack[-1].fill(state)


def _tuple(items: list[Any]) -> tuple:
    return tuple(_opened(item) for item in items)


def _marked_tuple(machine: _Machine, _: Any) -> None:
    items = machine.marked()
    machine.stack.append(_tuple(items))


def _append(machine: _Machine, _: Any) -> None:
    _extend(machine, machine.popped(1))


def _appends(machine: _Machine, _: Any) -> None:
    _extend(machine, machine.marked())


def _extend(machine: _Machine, items: list[Any]) -> None:
    if type(machine.stack[-1]) is not list:
        raise ValueError("items for something that is no list")
    machine.stack[-1].extend(_opened(item) for item in items)


def _set_item(machine: _Machine, _: Any) -> None:
    _update(machine, machine.popped(2))


def _set_items(machine: _Machine, _: Any) -> None:
    _update(machine, machine.marked())


def _update(machine: _Machine, items: list[Any]) -> None:
    keys, values = items[::2], items[1::2]
    if type(machine.stack[-1]) is not dict or len(keys) != len(values):
        raise ValueError("entries for something that is no dict")
    # Hashing a tuple of tuples of tuples... would overflow the stack of the interpreter.
    if not all(isinstance(key, (int, str)) for key in keys):
        raise ValueError("a dict whose keys are neither whole numbers nor strings")
    machine.stack[-1].update(zip(keys, map(_opened, values), strict=True))


def _nothing(machine: _Machine, _: Any) -> None:
    pass


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _proto,
    "FRAME": _nothing,
    "STOP": _nothing,
    "MARK": _mark,
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "BUILD": _build,
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "TUPLE": _marked_tuple,
}
