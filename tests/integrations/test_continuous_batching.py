"""Continuous batching under flash_paged as transformers prepares and runs its batches: its pages are written and read
in place, and where not, this says so. `test_batched_step` has what replaces that on a CPU."""

import collections
import functools
import itertools
from unittest import mock

import pytest
import torch
import transformers
from helpers import TINY_MODELS, needs_transformers, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api, initialization
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

import hf_efficient
from hf_efficient.integrations import transformers_continuous_batching as continuous_batching
from hf_efficient.integrations.transformers_releases import has
from hf_efficient.kernels.attention import api


pytestmark = needs_transformers("5.19", "reading transformers' pages in place")
NEW_TOKENS = 8
PAGES = dict(num_blocks=128, page_size=4)
# Prompts that end within, at and past a page; two of them share their first 9 tokens (two pages).
_SHARED = [5, 17, 40, 99, 12, 77, 31, 64, 8]
PROMPTS = [_SHARED + [21, 50], [33] * 3, list(range(60, 76)), _SHARED + [90, 91, 92, 93]]
# Layers that attend to everything and layers with a sliding window, a ring in transformers' cache; others have 2 and 0.
LAYERS = {"mistral": (0, 2), "gemma2": (1, 1), "gemma3": (0, 2), "gpt_oss": (1, 1)}
# transformers' default for experts, "grouped_mm", cannot be captured in a CUDA graph but in bfloat16: in other dtypes
# torch's own operator copies the sizes of the groups to the host. "batched_mm" can, in every dtype.
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


def generate_batch(model, prompts=PROMPTS, **config):
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**{**PAGES, "max_batch_tokens": 24, **config}),
        progress_bar=False,
    )
    assert not any(output.error for output in outputs.values()), [output.error for output in outputs.values()]
    return [outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: int(name.split("_")[-1]))]


def one_by_one(model, prompts=PROMPTS):
    """Greedy tokens of each prompt alone, under eager attention."""
    model.set_attn_implementation("eager")
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens = [
        model.generate(torch.tensor([prompt], device=model.device), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    model.set_attn_implementation("flash_paged")
    return tokens


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The path that this package replaces on a CPU."""
    monkeypatch.setattr(continuous_api, "ContinuousBatchingIOs", ContinuousBatchingIOs)
    monkeypatch.setattr(continuous_api, "ModelRunner", ModelRunner)


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the attention functions, of those with a block table ("pages"), of transformers' own update
    ("gathered" when it reads) and of derived tables."""
    counts = collections.Counter()

    def spy(owner, name, count):
        original = getattr(owner, name)

        @functools.wraps(original)
        def counted(*args, **kwargs):
            count(*args, **kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def varlen(*args, block_table=None, **kwargs):
        counts["varlen" if block_table is None else "pages"] += 1

    def update(self, key_states, value_states, layer_idx, kwargs):
        allocator = self.layer_to_allocator[layer_idx]
        read = kwargs.get("block_table") is None and kwargs["read_index"][allocator.index].numel()
        counts[f"gathered {allocator.layer_type}" if read else "new"] += 1

    spy(api, "flash_attn_with_kvcache", lambda *args, **kwargs: counts.update(["decode"]))
    spy(api, "flash_attn_varlen_func", varlen)
    spy(PagedAttentionCache, "update", update)
    spy(continuous_batching, "block_table_of", lambda *args: counts.update(["tables"]))
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)  # it holds the functions themselves
    yield counts
    flash_utils._loaded_implementation = None


@pytest.fixture
def decode_path(monkeypatch):
    """Opens transformers' block-table decode path, which it has on CUDA only: its own gate is asked as if CUDA was
    there."""
    original = initialization.ensure_decode_fast_path_is_available

    def as_if_cuda(*args):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            original(*args)

    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", as_if_cuda)


@pytest.fixture
def padded(monkeypatch):
    """Batches padded with empty rows, as for CUDA graphs."""
    original = ModelRunner.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", __init__)


# without this package's forwards OPT asks the pages for `get_seq_length`, which they lack in 5.24, under "sdpa" too
NAMES = [name for name in TINY_MODELS if name != "opt" or not has("5.24")]


@pytest.mark.parametrize("name", NAMES)
def test_mixed_batches_read_pages(name, calls):
    """Prompts in chunks beside rows that decode. Rings of sliding windows cannot be read as pages: there, and only
    there, transformers gathers."""
    model, (full, sliding) = tiny_model(name), LAYERS.get(name, (2, 0))
    expected = one_by_one(model)
    assert generate_batch(model) == expected
    forwards = NEW_TOKENS  # that read: the first does not, and the prompts take two
    assert calls["pages"] >= full * forwards and calls["gathered full_attention"] == 0
    assert calls["gathered sliding_attention"] >= sliding * forwards
    assert calls["pages"] == full * calls["tables"]  # one table a forward, whatever the layers
    assert calls["decode"] == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LAYERS])
def test_decode_path(name, calls, decode_path, padded):
    """By block table, with the empty rows of batches padded for CUDA graphs (length -1, table entries -1)."""
    model = tiny_model(name)
    expected = one_by_one(model)
    assert generate_batch(model, max_blocks_per_request=8, max_requests_per_batch=4) == expected
    assert calls["decode"] > 0 and calls["pages"] > 0 and calls["gathered full_attention"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_padded_batches_with_windows(name, calls, padded):
    """Empty rows and trash slots in batches that mix prompts and decoding, as for CUDA graphs."""
    model, (full, sliding) = tiny_model(name), LAYERS[name]
    expected = one_by_one(model)
    assert generate_batch(model, max_requests_per_batch=8) == expected
    assert (calls["pages"] > 0) == (full > 0) and calls["gathered full_attention"] == 0
    assert (calls["gathered sliding_attention"] > 0) == (sliding > 0)


@pytest.mark.parametrize("config", [dict(bits=8, group_size=-1, symmetric=True), dict(bits=4, group_size=32)])
def test_quantized_models(config, calls, decode_path, tmp_path):
    """Prompts through pages, then decoding by block table, with compressed weights."""
    tiny_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=hf_efficient.WeightOnlyConfig(**config), attn_implementation="flash_paged"
    )
    expected = one_by_one(model)
    assert generate_batch(model, max_blocks_per_request=8) == expected
    assert calls["decode"] > 0 and calls["pages"] > 0 and calls["gathered full_attention"] == 0


def test_manager_streams_and_shares_prefixes(calls, llama):
    """The second request finds the pages of the first, of whose tokens it computes none."""
    expected = one_by_one(llama)
    manager = llama.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**PAGES, max_batch_tokens=24),
    )
    manager.start()
    try:
        for prompt, tokens in ((PROMPTS[0], expected[0]), (PROMPTS[3], expected[3])):
            request = manager.add_request(prompt, max_new_tokens=NEW_TOKENS, streaming=True)
            for output in manager.request_id_iter(request):
                last = output
            assert last.generated_tokens == tokens
    finally:
        manager.stop(block=True)
    # the second prompt reads pages from its first forward
    assert calls["pages"] == 2 * (NEW_TOKENS - 1) + 2 * NEW_TOKENS


def test_latent_attention_does_not_fit():
    """transformers' pages hold heads of one dim; multi-head latent attention has another for values."""
    config = transformers.DeepseekV3Config(
        vocab_size=128, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_paged").eval()
    with pytest.raises(
        AssertionError, match=r"stores 2 heads of dim 8, and layer 0 has keys .* dim 16: use generate\(\)"
    ):
        generate_batch(model, PROMPTS[1:2])


PAGE = 4


@pytest.mark.parametrize("lengths", [(1,), (4, 8), (5, 0, 3, 9), (0, 0)])
def test_block_table_of(lengths):
    """Lengths that end within a page and at its end, and the empty rows and trash slots of padded batches."""
    pages = iter(torch.randperm(20).tolist())
    tables = [[next(pages) for _ in range(-(-length // PAGE))] for length in lengths]
    reads = [table[token // PAGE] * PAGE + token % PAGE for table, n in zip(tables, lengths) for token in range(n)]
    longest = max(lengths) + 5  # an upper bound, as in captured graphs
    columns = -(-longest // PAGE)
    expected = torch.tensor([table + [-1] * (columns - len(table)) for table in tables], dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    for trash in (1, 7):
        actual = continuous_batching.block_table_of(torch.tensor(reads + [0] * trash), starts, longest, PAGE)
        assert torch.equal(actual, expected) and actual.dtype == torch.int32


def test_block_tables_wait_for_no_device():
    """A fake tensor has no values: reading one on the host raises."""
    with FakeTensorMode():
        reads, starts = torch.zeros(9, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
        table = continuous_batching.block_table_of(reads, starts, 9, PAGE)
        with pytest.raises(DataDependentOutputException):
            reads[0].item()
    assert table.shape == (2, 3)


def test_the_first_layer_derives_anew():
    """A CUDA graph is captured with the tensors of a batch that has run before."""
    starts, made = torch.zeros(3), iter("abc")
    shared = [continuous_batching._shared(starts, is_first, lambda: next(made)) for is_first in (True, False) * 2]
    assert shared == ["a", "a", "b", "b"]


@pytest.mark.parametrize("name", [*api.ATTENTION_NAMES, "sdpa"])
def test_the_gate_of_the_decode_path(name, decode_path, llama):
    """Trap A2. Fails when transformers changes its gate: then `_count_our_names` must change, or can go."""
    llama.set_attn_implementation(name)
    config = ContinuousBatchingConfig(max_blocks_per_request=8)
    initialization.ensure_decode_fast_path_is_available(llama.config, config, True)
    ours = name in api.ATTENTION_NAMES
    assert config.max_blocks_per_request == (8 if ours else 0)
    original = initialization.is_flash_attention_requested.__wrapped__
    assert original(llama.config, version=[2, 3]) == (name == "hf-efficient/flash_paged_2")


def test_other_names_are_handed_on():
    asked = []
    wrapped = continuous_batching._count_our_names(lambda *args, **kwargs: asked.append((args, kwargs)))
    config = mock.Mock(_attn_implementation="flash_attention_2")
    wrapped(config, version=[2, 3])
    wrapped(requested_attention_implementation="flash_paged")
    assert asked == [
        ((config,), {"version": [2, 3]}), ((None,), {"requested_attention_implementation": "flash_paged"})
    ]  # fmt: skip
    before = initialization.is_flash_attention_requested
    continuous_batching.register()
    assert initialization.is_flash_attention_requested is before


@pytest.mark.gpu
@pytest.mark.parametrize("name", TINY_MODELS)
def test_on_the_accelerator(name, calls):
    """With transformers' defaults for CUDA: graphs for both paths, the next batch prepared while one runs."""
    model, (full, sliding) = tiny_model(name).cuda(), LAYERS.get(name, (2, 0))
    if name in EXPERTS:
        model.set_experts_implementation("batched_mm")
    expected = one_by_one(model)
    assert generate_batch(model, page_size=16, max_requests_per_batch=4) == expected
    assert (calls["decode"] > 0) == (sliding == 0) and (calls["pages"] > 0) == (full > 0)
    assert calls["gathered full_attention"] == 0
