"""Triton's interpreter without what takes most of its time: for processes that do nothing but interpret."""

import functools
import os


def speed_up():
    """Once a process. Where kernels are compiled too, a number that is kept would belong to a compilation that has
    ended: the next one crashes."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "for processes that do nothing but interpret"
    _patch_the_language_once()
    _leave_out_what_nobody_reads()
    _make_types_once()


def _patch_the_language_once():
    """Keeps the interpreter's first patch of triton.language. It patches at every call of a jitted function, also from
    another one, which is most of its time; a process that only interprets needs one patch."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(function):
        scope = interpreter._LangPatchScope()  # restores nothing
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return scope

    interpreter._patch_lang = once


def _leave_out_what_nobody_reads():
    """The interpreter computes whether whole numbers overflow, ten operations each, and drops the answer (its `debug`
    is off), which is half of its time; and it builds its table of NumPy's dtypes for each value."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, operation: None
    tl.pointer_type.__hash__ = lambda self: hash(self.name)
    looked_up = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: looked_up(getattr(dtype, "scalar", dtype))


def _make_types_once():
    """Every value has a type of its own, whose shape is a tuple of objects, and these have types, whose names are
    written out; numbers become values anew at each use. Two thirds of what is left of its time."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    unwrapped = core._unwrap_if_constexpr
    core._unwrap_if_constexpr = lambda value: value if type(value) is int else unwrapped(value)
    TritonSemantic.scalar_constant = functools.lru_cache(maxsize=None, typed=True)(TritonSemantic.scalar_constant)

    blocks, make_block = {}, core.block_type.__init__

    def block(self, element_ty, shape):
        key = element_ty.name, tuple(size.value if type(size) is core.constexpr else size for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    core.block_type.__init__ = block

    shapes = {}

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            make(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.shape, self.numel = shapes[shape]

    make, core.tensor.__init__ = core.tensor.__init__, tensor

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_values(self, lhs, rhs):
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_values
