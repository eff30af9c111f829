"""C++ and Python lay structures out alike, and a difference is said where the library is loaded."""

import ctypes

import pytest

from hf_efficient.kernels.attention import native_cpu as pages
from hf_efficient.kernels.linear import contextual_mlp, native_cpu, native_sparse
from hf_efficient.kernels.native import build, structs
from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = pytest.mark.skipif(interpreter() is None, reason="no C++ kernels: no compiler, or another CPU")


def test_every_library_is_checked_when_it_is_loaded(monkeypatch):
    checked = []
    monkeypatch.setattr(structs, "check", lambda library, mirrors: checked.append({m.__name__ for m in mirrors}))
    build.load.cache_clear()
    loaders = native_cpu.kernel, native_sparse.function, contextual_mlp.kernel, pages.kernel, interpreter
    for loader, arguments in zip(loaders, ((4,), (), (), (next(iter(pages._TYPES)),), ())):
        loader.__wrapped__(*arguments)
    weights, page_calls = (
        ({"Product", "_Weight", "_Rows"}, {"Product", "_SparseWeight"}),
        {"_Pages", "_AttentionCall", "_RaggedCall"},
    )
    expected = [*weights, {"_ContextualCall"}, page_calls, {"Operand", "Instruction"}]
    build.load.cache_clear()
    assert checked == expected


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        (
            "weight y bias",
            "Product",
            r"Product\.y is 8 bytes at offset 8 in Python \(ctypes\), 8 bytes at offset 16 in C\+\+",
        ),
        (
            "weight bias",
            "Product",
            r"Product is 16 bytes at offset 0 in Python \(ctypes\), 24 bytes at offset 0 in C\+\+",
        ),
        ("weight bias z", "Product", r"Product\.z is 8 bytes at offset 16 in Python \(ctypes\), absent in C\+\+"),
        ("weight bias y", "Other", r"Other is 24 bytes at offset 0 in Python \(ctypes\), absent in C\+\+"),
    ],
)
def test_another_order_size_or_name_is_refused(fields, name, message):
    mirror = type(name, (ctypes.Structure,), {"_fields_": [(field, ctypes.c_void_p) for field in fields.split()]})
    with pytest.raises(structs.LayoutMismatch, match=message):
        build.load("sparse", (mirror, native_sparse._SparseWeight))
