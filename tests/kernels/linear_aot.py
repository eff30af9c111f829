"""What the ahead-of-time tests of efficient_linear share."""

from aot import compile_kernel

from hf_efficient.kernels.efficient_linear import w8a8_configs


QUADS = ("sm_80", "sm_86", "sm_89", "sm_120")  # as `weight_only.quads` says
MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}


def compile_launch(kernel, types, constexprs, target, warps, stages, aligned=("N", "K", "stride_x")):
    """Compiles with `types` for tensors and scalars that are named, i32 for all others that are no constants."""
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    return compile_kernel(kernel, signature, constexprs, target, warps, stages, aligned)


def stages_on(target, tile) -> int:
    return min(tile.num_stages, w8a8_configs.STAGES_ON_ROCM) if target == "gfx942" else tile.num_stages


def wide_loads(compiled, target) -> int:
    """How many loads of 16 bytes a lane there are."""
    amd = ("global_load_dwordx4", "buffer_load_dwordx4")
    return sum(map(compiled.count, amd if target == "gfx942" else ("LDGSTS.E.BYPASS.128", "LDG.E.128")))
