"""The C++ kernels of packed weights, compiled here, against float64; and what happens where they cannot be compiled."""

import os
import shutil
import subprocess
from pathlib import Path

import emulated
import fresh_processes
import pytest
import torch
import torch.fx.experimental.proxy_tensor
from helpers import assert_close, openmp_threads_before_and_after

from hf_efficient import WeightOnlyConfig
from hf_efficient.kernels.linear import native_cpu
from hf_efficient.kernels.linear.codes import pack_codes
from hf_efficient.kernels.linear.weight_only import dequantize_weight, device_layout
from hf_efficient.kernels.native import build, compiler, tiers
from hf_efficient.kernels.native.openmp import openmp_runtime, release_threads
from hf_efficient.kernels.replay.recorder import Capture, _interpret


pytestmark = pytest.mark.usefixtures("two_threads")


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [  # N, K, group size
    (192, 576, 64),
    (100, 1000, 32),  # rows and columns that fill neither block nor line, a short last group
    (33, 80, 8),  # narrower groups than lines of 2 and 3 bits: those codes are stored wider
    (17, 1111, None),
    (70, 1200, -1),  # more columns than are summed at once
    (16, 4, -1),
    (1, 96, 48),
]
ROWS = (1, 2, 3, 9, 70)
ROUNDED_ROWS = (*ROWS, 13, 15)  # all remainders of tiles of four rows
MOST_ROWS = 9 if emulated.ASKED else 70  # that are multiplied


@pytest.fixture
def kernels(tier):
    return {bits: native_cpu.kernel(bits) for bits in (2, 3, 4, 8)}


def tensors(n, k, bits, group_size, symmetric, dtype):
    """(qweight, scale, zero point or None) of random codes."""
    groups = 1 if group_size in (None, -1) else -(-k // group_size)
    shape = (1, 1) if group_size is None else (n, groups)
    zero_point = None if symmetric else torch.randint(2**bits, shape, dtype=torch.uint8)
    codes = torch.randint(2**bits, (n, k), dtype=torch.uint8)
    return pack_codes(codes, bits), (torch.rand(shape) + 0.1).to(dtype), zero_point


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_products_and_inverses(kernels, bits, symmetric):
    for n, k, group_size in SHAPES:
        for dtype in DTYPES:
            canonical = tensors(n, k, bits, group_size, symmetric, dtype)
            layout = native_cpu.NativeCodesLayout.pack(*canonical, bits, group_size, k, dtype)
            assert torch.equal(layout.canonical(), canonical[0]), "the inverse must be exact"
            arguments = dict(bits=bits, group_size=group_size, in_features=k)
            assert torch.equal(layout.dequantize(), dequantize_weight(*canonical, **arguments, dtype=dtype))
            canonical = canonical[0], canonical[1].double(), canonical[2]
            dense, bias = dequantize_weight(*canonical, **arguments, dtype=torch.float64), torch.randn(n, dtype=dtype)
            for rows in ROWS:
                x = torch.randn(rows, k, dtype=dtype)[:MOST_ROWS]
                expected = x.double() @ dense.t() + bias.double()
                eps, size = torch.finfo(dtype).eps, expected.abs().max().item()
                reason = (
                    "float32 sums of exact products (many rows: of weights rounded to bfloat16), rounded to the dtype"
                )
                rms = 8 * eps if dtype is torch.float32 else eps / 2
                assert_close(layout.matmul(x, bias), expected, rms, 16 * eps * size, reason)
                again = [layout.matmul(x, bias) for _ in range(2)]
                assert torch.equal(*again), "the same sums in the same order"


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_few_rows_of_whole_tiles(kernels, bits, symmetric):
    """Of 32 columns, as AMX takes them: one and two tiles of x, a last block alone, and rows of several segments."""
    for n, k, group_size in ((40, 192, 32), (70, 1216, -1)):
        canonical = tensors(n, k, bits, group_size, symmetric, torch.bfloat16)
        layout = native_cpu.NativeCodesLayout.pack(*canonical, bits, group_size, k, torch.bfloat16)
        arguments = dict(bits=bits, group_size=group_size, in_features=k, dtype=torch.float64)
        dense = dequantize_weight(canonical[0], canonical[1].double(), canonical[2], **arguments)
        bias = torch.randn(n).bfloat16()
        for rows in (2, 4, 7) if emulated.ASKED else (2, 4, 15, 17, 32):
            x = torch.randn(rows, k).bfloat16()
            expected = x.double() @ dense.t() + bias.double()
            reason = "float32 sums of exact products (or of weights rounded to bfloat16), rounded to bfloat16"
            assert_close(layout.matmul(x, bias), expected, 2**-8, 2**-4 * expected.abs().max().item(), reason)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rows(kernels, bits, symmetric):
    for place, (n, k, group_size) in enumerate(SHAPES):
        dtype = DTYPES[(place + bits + symmetric) % 3]
        canonical = tensors(n, k, bits, group_size, symmetric, dtype)
        layout = native_cpu.NativeCodesLayout.pack(*canonical, bits, group_size, k, dtype)
        scheme = dict(bits=bits, group_size=group_size, in_features=k, dtype=dtype)
        dense = dequantize_weight(*canonical, **scheme)
        for shape in [(), (1,), (2, 3), (70,), (0, 3)]:  # one thread, and several
            ids = torch.randint(n, shape)
            assert torch.equal(layout.rows(ids), dense[ids])
            assert torch.equal(layout.canonical_rows(ids.flatten()), canonical[0][ids.flatten()])
        for wrong in (n, -1, 2**40):
            with pytest.raises(IndexError, match="index out of range in self"):
                layout.rows(torch.tensor([0, wrong]))


def test_captured_rows(kernels):
    canonical = tensors(100, 64, 8, -1, True, torch.bfloat16)
    layout = native_cpu.NativeCodesLayout.pack(*canonical, 8, -1, 64, torch.bfloat16)
    ids = torch.randint(100, (2, 3))
    capture = Capture(lambda: layout.rows(ids))
    assert [step.func for step in capture._steps] == [_interpret], "an instruction, not a call of Python"
    for _ in range(2):
        ids.copy_(torch.randint(100, (2, 3)))
        assert torch.equal(capture.replay(), layout.dequantize()[ids])
    ids[1, 2] = 100
    with pytest.raises(IndexError, match="index out of range in self"):
        capture.replay()


def rounded(x, group, span=64):
    """x to int8 and back, a scale for at most `span` columns of a group. One that is more than twice as large as the
    others of such a part stays."""
    parts = [part for columns in x.float().split(group, 1) for part in columns.split(span, 1)]
    result = []
    for part in parts:
        most, second = part.abs().topk(2).values.split(1, 1)
        is_outlier = (part.abs() == most) & (most > 2 * second) & (second > most / 1e6)
        most = torch.where(is_outlier.any(1, keepdim=True), second, most)
        result.append(torch.where(is_outlier, part, (part * (127 / most)).round() * (most / 127)))
    return torch.cat(result, 1).double()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_inputs_rounded_to_int8(kernels, bits):
    for place, (n, k, group_size) in enumerate(SHAPES):
        symmetric = (place + bits // 3) % 2 == 0  # each shape both ways
        canonical = tensors(n, k, bits, group_size, symmetric, torch.bfloat16)
        arguments = bits, group_size, k, torch.bfloat16
        layout = native_cpu.NativeCodesLayout.pack(*canonical, *arguments, rounds_inputs=True)
        scheme = dict(bits=bits, group_size=group_size, in_features=k, dtype=torch.float64)
        weight = dequantize_weight(canonical[0], canonical[1].double(), canonical[2], **scheme)
        bias = torch.randn(n).bfloat16()
        group = k if group_size in (None, -1) else group_size
        for rows in ROUNDED_ROWS:
            x = torch.randn(rows, k).bfloat16()[:MOST_ROWS]
            x[::2, k // 2] *= 50  # outliers of several rows in one column, and in a column of each row
            x[torch.arange(len(x)), torch.arange(len(x)) * 7 % k] *= 30
            is_rounded = rows <= 32 or tiers.tier().name != "amx"
            expected = (rounded(x, group) if is_rounded else x.double()) @ weight.t() + bias.double()
            reason = "float32 sums of exact products, rounded to bfloat16"
            y = layout.matmul(x, bias)
            assert_close(y, expected, 2**-8, 2**-4 * expected.abs().max().item(), reason)
            alone = torch.cat([layout.matmul(row[None], bias) for row in x])
            assert torch.equal(y, alone) or not is_rounded, "a row has the same bits alone and among others"
        assert not layout.matmul(x.index_fill(1, torch.tensor([k - 1]), float("nan"))).isfinite().any()


@pytest.mark.parametrize(
    "arguments, rounds_inputs",
    [({}, native_cpu.WIDE), ({"int8_on_cpu": True}, native_cpu.ALWAYS), ({"int8_on_cpu": False}, native_cpu.NEVER)],
)
def test_a_config_says_which_inputs_are_rounded(kernels, arguments, rounds_inputs):
    config = WeightOnlyConfig(bits=8, group_size=32, **arguments)
    config = WeightOnlyConfig(**{key: value for key, value in config.to_dict().items() if key != "quant_method"})
    parts = dict(zip(("qweight", "scale", "zero_point"), tensors(48, 96, 8, 32, False, torch.bfloat16)))
    assert config.format().layout(parts, 96, torch.bfloat16).rounds_inputs == rounds_inputs
    with pytest.raises(ValueError, match="int8_on_cpu=True is not supported: it must be False for codebook='nf4'"):
        WeightOnlyConfig(bits=4, codebook="nf4", int8_on_cpu=True)
    with pytest.raises(ValueError, match="int8_on_cpu=1 is not supported: it must be one of"):
        WeightOnlyConfig(bits=4, int8_on_cpu=1)
    assert WeightOnlyConfig(bits=4, codebook="nf4").int8_on_cpu is False


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_largest_sums_of_products(kernels, bits):
    """All codes and rounded inputs are the largest: where products are summed in 16 bits, no more fit."""
    codes = torch.full((32, 192), 2**bits - 1, dtype=torch.uint8)
    qweight, scale = pack_codes(codes, bits), torch.ones(32, 3).bfloat16()
    zero = torch.zeros(32, 3, dtype=torch.uint8)
    layout = native_cpu.NativeCodesLayout.pack(qweight, scale, zero, bits, 64, 192, torch.bfloat16, native_cpu.ALWAYS)
    x = torch.ones(9, 192).bfloat16() * torch.tensor([1, -1] * 4 + [1]).view(-1, 1)
    assert torch.equal(layout.matmul(x), x[:, :32] * (2**bits - 1) * 192)
    tiny = 2.0**-122  # 127 / tiny is no float
    torch.testing.assert_close(layout.matmul(x * tiny), layout.matmul(x) * tiny, rtol=0.01, atol=0)


def test_only_wide_forwards_are_rounded_by_default(kernels):
    least = {"bf16": 32, "amx": None, "neon": None, "neon_bf16": None}.get(tiers.tier().name, 8)
    has_dots = tiers.tier().name in ("avx_vnni", "vnni", "bf16")  # of bytes
    for bits, group_size, dtype in (
        (4, 64, torch.bfloat16), (8, 64, torch.bfloat16), (4, 16, torch.bfloat16), (4, 64, torch.float32),
    ):  # fmt: skip
        canonical = tensors(48, 192, bits, group_size, False, torch.bfloat16)
        never, always, wide = (
            native_cpu.NativeCodesLayout.pack(*canonical, bits, group_size, 192, dtype, rounds_inputs)
            for rounds_inputs in (native_cpu.NEVER, native_cpu.ALWAYS, native_cpu.WIDE)
        )
        may_round = (group_size, dtype) == (64, torch.bfloat16) and (bits < 8 or has_dots)
        for rows in (7, 8, 31, 32, 70):
            x = torch.randn(rows, 192).to(dtype)
            rounds = least is not None and rows >= least and may_round
            assert torch.equal(wide.matmul(x), (always if rounds else never).matmul(x))
            never_rounds = dtype is torch.float32 or tiers.tier().name == "amx" and rows > 32
            assert torch.equal(never.matmul(x), always.matmul(x)) == never_rounds


@pytest.mark.parametrize("rounds_inputs", [native_cpu.NEVER, native_cpu.ALWAYS])
def test_results_do_not_depend_on_the_number_of_threads(rounds_inputs, kernels):
    """Rows with outliers, and a last list of fewer than four groups: what belongs to one row stays there."""
    canonical = tensors(336, 640, 8, 64, False, torch.bfloat16)
    layout = native_cpu.NativeCodesLayout.pack(*canonical, 8, 64, 640, torch.bfloat16, rounds_inputs)
    x = torch.randn(301, 640).bfloat16()
    x[:, ::37] *= 30
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            some = (1, 5, 40) if emulated.ASKED else (1, 5, 15, 40, 301)
            results.append([layout.matmul(x[:rows]) for rows in some])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_inputs(kernels):
    """Strides, leading dimensions, no rows, biases of other dtypes, wrong dtypes and widths."""
    layout = native_cpu.NativeCodesLayout.pack(
        *tensors(48, 96, 8, 32, False, torch.bfloat16), 8, 32, 96, torch.bfloat16
    )
    x = torch.randn(2, 5, 192).bfloat16()[..., ::2]
    bias = torch.randn(48)
    y = layout.matmul(x)
    assert y.shape == (2, 5, 48) and torch.equal(y, layout.matmul(x.contiguous().view(10, 96)).view(2, 5, 48))
    assert torch.equal(layout.matmul(x, bias), y + bias.bfloat16()) or torch.allclose(
        layout.matmul(x, bias), (y + bias).bfloat16()
    )
    assert layout.matmul(x[:, :0]).shape == (2, 0, 48) and layout.matmul(x[0, 0]).shape == (48,)
    with pytest.raises(ValueError, match="float32"):
        layout.matmul(x.float())
    with pytest.raises(ValueError, match="96"):
        layout.matmul(x[..., :64])


def test_op(kernels):
    for dtype in (torch.float32, torch.bfloat16):
        canonical = tensors(40, 96, 8, 32, False, dtype)
        layout = native_cpu.NativeCodesLayout.pack(*canonical, 8, 32, 96, dtype)
        x, bias = torch.randn(5, 96, dtype=dtype, requires_grad=True), torch.randn(40, dtype=dtype, requires_grad=True)
        arguments = (x, layout.packed, layout.scale, layout.zero_point, bias, *layout.scheme, False)
        torch.library.opcheck(torch.ops.hf_efficient.cpu_linear.default, arguments)
        layout.matmul(x, bias).square().sum().backward()
        reference = [t.detach().clone().requires_grad_() for t in (x, bias)]
        torch.nn.functional.linear(reference[0], layout.dequantize(), reference[1]).square().sum().backward()
        eps = torch.finfo(dtype).eps
        for ours, theirs in zip((x, bias), reference):
            maximum = 8 * eps * theirs.grad.abs().max().item()
            assert_close(ours.grad, theirs.grad, 4 * eps, maximum, "the same products, rounded to the dtype")
        compiled = torch.compile(lambda x, layout=layout: layout.matmul(x) + 1, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x.detach()), layout.matmul(x.detach()) + 1)


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """A process that keeps its libraries in `folder`/hf_efficient/cpu."""
    code = f"from hf_efficient.kernels.native import build\nbuild.HF_HOME = {str(folder)!r}\n{code}"
    return fresh_processes.run(["-c", code], env={**os.environ, **environment}, check=True)


LAYER = """
import torch
from hf_efficient.kernels.linear.weight_only import device_layout
for n in (32, 64):
    codes, scale = torch.full((n, 32), 0x79, dtype=torch.uint8), torch.ones(n, 1)
    layout = device_layout(codes, scale, None, bits=4, group_size=64, in_features=64, dtype=torch.float32)
    assert (layout.matmul(torch.ones(1, 64)) == 0).all()
print(type(layout).__name__)
"""
ROTATION = """
import torch
from hf_efficient.kernels.linear import native_hadamard
assert native_hadamard.rotate(torch.ones(1, 64), torch.ones(64)).count_nonzero() == 1
print(native_hadamard.function() is not None)
"""  # its library is compiled soonest


@pytest.mark.parametrize("compiler", ["/nonexistent", "/bin/false"])
def test_without_a_compiler_the_operators_of_torch_serve(compiler, tmp_path):
    result = python(LAYER, tmp_path, CXX=compiler)
    assert result.stdout.strip() == "Int4CpuLayout"
    expected = 1 if tiers.tier() is not tiers.TORCH else 0
    assert result.stderr.count("torch's slower operators") == expected, "said once, where something is lost"


@pytest.mark.slow
@pytest.mark.skipif(compiler.compiler() is None or tiers.tier() is tiers.TORCH, reason="nothing is compiled here")
def test_compiled_once_for_all_processes(tmp_path):
    assert python(ROTATION, tmp_path).stdout.strip() == "True"
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "hf_efficient" / "cpu").iterdir()}
    assert {path.name.split("-")[0] for path in written} == {"hadamard"}
    assert python(ROTATION, tmp_path).stdout.strip() == "True"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "hf_efficient" / "cpu").iterdir()} == written


@pytest.mark.skipif(compiler.compiler() is None or tiers.tier() is tiers.TORCH, reason="nothing is compiled here")
def test_compiled_once_for_all_installs(tmp_path, monkeypatch):
    library = build.build("hadamard", compiler.compiler())
    shutil.copytree(compiler.SOURCES, tmp_path / "native")
    monkeypatch.setattr(compiler, "SOURCES", tmp_path / "native")
    assert build.build("hadamard", compiler.compiler()) == library


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_passed_by(tmp_path):
    (tmp_path / "hf_efficient").write_text("a file where the folder would be")
    assert python(ROTATION, tmp_path).stdout.strip() == str(
        tiers.tier() is not tiers.TORCH and compiler.compiler() is not None
    )


def test_one_pool_of_threads(kernels):
    """The library takes the OpenMP runtime that torch has loaded and brings none of its own."""
    layout = device_layout(
        *tensors(64, 64, 8, 32, True, torch.float32), bits=8, group_size=32, in_features=64, dtype=torch.float32
    )
    layout.matmul(torch.ones(1, 64))
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert runtimes == {openmp_runtime()}


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads the threads of Linux")
def test_threads_that_wait_are_given_back():
    assert openmp_threads_before_and_after(release_threads, times=2) == [(2, 0), (2, 0)]


def int8_layout(n=70, k=192):
    canonical = tensors(n, k, 8, 64, False, torch.float32)
    return canonical, native_cpu.NativeCodesLayout.pack(*canonical, 8, 64, k, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(kernels, dtype):
    canonical, layout = int8_layout()
    expected = dequantize_weight(*canonical, bits=8, group_size=64, in_features=192, dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(layout.dequantize(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_traces_and_transforms_see_the_product(kernels):
    _, layout = int8_layout()
    x, other = torch.randn(2, 3, 192)
    with torch.no_grad():
        traced = torch.jit.trace(lambda rows: layout.matmul(rows), (x,), check_trace=False)
        assert torch.equal(traced(other), layout.matmul(other))
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda rows: layout.matmul(rows))(x)
        assert torch.equal(graph(other), layout.matmul(other))


def test_biases_of_other_shapes_and_inputs_of_one_dimension(kernels):
    _, layout = int8_layout()
    x, bias = torch.randn(192), torch.randn(70, requires_grad=True)
    layout.matmul(x, bias).sum().backward()
    assert torch.equal(bias.grad, torch.ones(70))
    with torch.no_grad():
        assert torch.equal(layout.matmul(x, torch.ones(1)), layout.matmul(x) + 1)


def test_tensors_that_do_not_belong_together_are_refused(kernels):
    """Before the kernels read beyond one of them, or numbers of another dtype."""
    (qweight, scale, zero), form = tensors(40, 96, 4, 32, False, torch.float32), (4, 32, 96, torch.float32)
    for name, *parts in (
        *(("qweight", qweight[:, :-1], scale, zero), ("scale", qweight, scale[:, :2], zero)),
        *(("zero_point", qweight, scale, zero[:, :2]), ("zero_point", qweight, scale, zero.to(torch.int8))),
    ):
        with pytest.raises(ValueError, match=f"{name} is .*allowed is"):
            native_cpu.NativeCodesLayout.pack(*parts, *form)
    layout, x = native_cpu.NativeCodesLayout.pack(qweight, scale, zero, *form), torch.randn(2, 96)
    parts, ops = (layout.packed, layout.scale, layout.zero_point), torch.ops.hf_efficient
    for bits, group, n, k in ((4, 16, 40, 96), (4, 32, 64, 96), (8, 32, 40, 96), (4, 32, 40, 128)):
        with pytest.raises(ValueError, match="allowed is|the layout is for"):
            ops.cpu_linear(x, *parts, None, bits, group, n, k, native_cpu.NEVER)
    with pytest.raises(ValueError, match="x is torch.float64: allowed is one of"):
        layout.matmul(x.double().requires_grad_())
    ids = torch.tensor([39, 0, 7], dtype=torch.int32)
    assert torch.equal(layout.rows(ids), layout.dequantize()[ids])
    with pytest.raises(ValueError, match="ids are torch.float32"):
        layout.rows(ids.float())
