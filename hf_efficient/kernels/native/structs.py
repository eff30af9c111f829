"""The C++ structures that Python fills, and the check that both sides lay them out alike.

Each library exports `hf_layouts` (`common/layout.h`): the size of every structure, the offset and size of every field.
A mirror is a `ctypes.Structure` of the same name; leading underscores do not count.
"""

import ctypes
import functools


class Product(ctypes.Structure):
    """`Product` of native/common/products.h: y = x @ weight^T + bias.

    weight: the address of the library's structure of a weight; bias [out_features] or null; y [rows, out_features].
    """

    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("y", ctypes.c_void_p)]


MOST_PRODUCTS = 4  # of one call; native/common/products.h has the same number


@functools.lru_cache(131072)  # an op describes its weight anew in each call
def filled(structure: type[ctypes.Structure], *fields) -> tuple[ctypes.Structure, int]:
    """(structure(*fields), its address); the same ones again for the same fields."""
    made = structure(*fields)
    return made, ctypes.addressof(made)


class LayoutMismatch(TypeError):
    """Python and C++ disagree about a structure: every call would read wrong memory."""


class _LayoutRow(ctypes.Structure):
    """`LayoutRow` of native/common/layout.h."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64)]


def check(library: ctypes.CDLL, structures: tuple[type[ctypes.Structure], ...]) -> None:
    """Compares the mirrors with what the library says of its structures.

    Raises:
        LayoutMismatch: a size or an offset differs, or one side has a structure or a field that the other has not.
    """
    library.hf_layouts.restype = ctypes.POINTER(_LayoutRow)
    rows, native = library.hf_layouts(), {}
    while rows[len(native)].name:
        row = rows[len(native)]
        native[row.name.decode()] = row.offset, row.size
    mirrored = {}
    for structure in structures:
        name = structure.__name__.lstrip("_")
        mirrored[name] = 0, ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            mirrored[f"{name}.{field}"] = getattr(structure, field).offset, getattr(structure, field).size
    for name in {**mirrored, **native}:
        if mirrored.get(name) != native.get(name):
            python, cpp = (_described(side.get(name)) for side in (mirrored, native))
            raise LayoutMismatch(f"{library._name}: {name} is {python} in Python (ctypes), {cpp} in C++")


def _described(row: tuple[int, int] | None) -> str:
    return "absent" if row is None else f"{row[1]} bytes at offset {row[0]}"
