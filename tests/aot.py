"""Two ways to test a Triton kernel without a GPU.

Ahead of time (`compile_kernel`): the kernel is compiled for GPUs that are not here, and its machine code is asked for
registers, spills, shared memory and matrix instructions. Such tests are ordinary pytest tests.

Interpreted: `@triton.jit` makes either compilable functions or, when TRITON_INTERPRET=1 is set before triton is
imported, functions that run on CPU tensors: never both in one process. So numeric tests of kernels stand in files named
`tests/kernels/test_*_numeric.py`, take the `kernel_device` fixture ("cuda" or "cpu") and are collected by
tests/kernels/conftest.py like this:
  on a machine with CUDA: as they are, the kernels run natively;
  without CUDA: as ONE item a file, which runs the file in a pytest subprocess with TRITON_INTERPRET=1;
  `TRITON_INTERPRET=1 pytest tests/kernels/test_x_numeric.py -k ...`: as they are, interpreted (to debug one case).
`tl.dot` on bfloat16 is silently wrong in the interpreter: mark bf16 cases `@pytest.mark.gpu`.
"""

import functools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import fresh_processes


TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass
class Compiled:
    """One kernel compiled for one GPU."""

    target: str
    asm: dict = field(repr=False)
    registers: int | None
    local_bytes: int  # stack and spills, bytes a thread; on gfx942 the private segment plus 4 bytes a spilled register
    shared: int  # bytes a block

    @functools.cached_property
    def machine_code(self) -> str:
        """SASS, which takes half a second to print, or amdgcn."""
        return self.asm["amdgcn"] if "amdgcn" in self.asm else _dump(self.asm["cubin"], "--dump-sass")

    def count(self, instruction: str) -> int:
        """How often a mnemonic starting with `instruction` stands in the machine code: SASS for NVIDIA (HMMA, HGMMA,
        LDGSTS, STL ...), amdgcn for AMD (v_mfma ...). tcgen05 is counted in the PTX, where it can be recognised."""
        text = self.asm.get("ptx", "") if instruction.startswith("tcgen05") else self.machine_code
        return len(re.findall(rf"(?<![\w.]){re.escape(instruction)}", text))


def compile_kernel(
    jit_function,
    signature: dict[str, str],
    constexprs: dict,
    target: str,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
    registers: int | None = None,
    fp_fusion: bool = True,
) -> Compiled:
    """Compiles `jit_function` (which must stand in a file) for `target`, one of `TARGETS`.

    signature: type of every run-time argument by name: "*bf16", "*i32", "i32", "fp32" ...
    constexprs: value of every `tl.constexpr` argument by name; also of run-time arguments that are None or 1, which a
        launch specialises.
    aligned: names of integer arguments (strides, sizes) that are divisible by 16, so that loads are vectorised as in a
        real launch; every pointer is taken to be, as torch allocates them.
    registers: the most a thread may have (NVIDIA).
    fp_fusion: whether a product and a sum may become one operation, as unless a launch says enable_fp_fusion=False.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not hasattr(jit_function, "arg_names") or os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("ahead-of-time compilation needs a process without TRITON_INTERPRET=1")
    names = list(jit_function.arg_names)
    unknown = (set(signature) | set(constexprs) | set(aligned)) - set(names)
    missing = set(names) - set(signature) - set(constexprs)
    if unknown or missing:
        raise ValueError(f"arguments of {jit_function.__name__}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    types = {name: "constexpr" if name in constexprs else signature[name] for name in names}
    divisible = [name for name in names if types[name].startswith("*") or (name in aligned and name not in constexprs)]
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    kernel = triton.compile(
        ASTSource(
            fn=jit_function,
            signature=types,
            constexprs=constexprs,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
        ),
        target=gpu,
        options={"num_warps": num_warps, "num_stages": num_stages}
        | ({"maxnreg": registers} if registers else {})
        | ({} if fp_fusion else {"enable_fp_fusion": False}),
    )
    registers, local_bytes = _read_nvidia(kernel.asm) if gpu.backend == "cuda" else _read_amd(kernel.asm)
    return Compiled(target, dict(kernel.asm), registers, local_bytes, kernel.metadata.shared)


def _read_nvidia(asm) -> tuple[int, int]:
    usage = _dump(asm["cubin"], "--dump-resource-usage")
    registers, stack, local = (int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _dump(cubin: bytes, what: str) -> str:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([cuobjdump, what, file.name], capture_output=True, text=True, check=True).stdout


def _read_amd(asm) -> tuple[int, int]:
    text = asm["amdgcn"]
    keys = (".vgpr_count", ".vgpr_spill_count", ".sgpr_spill_count", ".private_segment_fixed_size")
    registers, *spills, private = (int(re.search(rf"{re.escape(key)}:\s*(\d+)", text)[1]) for key in keys)
    return registers, 4 * sum(spills) + private


def run_interpreted(path: Path, timeout: float) -> subprocess.CompletedProcess:
    """Runs the tests of the file `path` in a pytest process of its own under the Triton interpreter."""
    return fresh_processes.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", path],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=timeout,
    )
