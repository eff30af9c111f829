"""Triton's interpreter without what takes most of its time: for processes that do nothing but interpret."""

import functools


def speed_up():
    _patch_the_language_once()
    _leave_out_what_nobody_reads()


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
