"""What is computed does not depend on `torch.set_default_dtype`."""

import ast
from pathlib import Path

import pytest
import torch
from helpers import assert_same_tensors, tiny_model
from saved_models import folder, load, logits
from table import METHODS
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from hf_efficient.kernels.attention import api
from hf_efficient.kernels.linear import native_hadamard


ROOT = Path(__file__).resolve().parents[2]
TOKENS = torch.randint(3, 128, (6, 24), generator=torch.Generator().manual_seed(1))
# one for each thing that is computed on the way: grids, tables, statistics, gradients, ranges, masks
NAMES = ("mse_3", "gptq_rotated_4", "nf4", "kmeans_4", "trellis_2.5", "yaqa_4", "w8a8_static", "alps_refined_int4")


@pytest.fixture
def under():
    """under(dtype): makes it the default for the rest of the test."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def quantized(name: str):
    arguments = dict(METHODS[name])
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING[arguments.pop("quant_method")]
    calibration = {} if name == "bitnet" else {"calibration": {"tokens": TOKENS, "batch_size": 3}}
    config = kind(**arguments, **calibration)
    return AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32, quantization_config=config)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compressed_models_are_the_same(name, under):
    model = quantized(name)
    expected, tensors = logits(model), model.state_dict()
    under(torch.bfloat16)
    again = quantized(name)
    assert_same_tensors(again.state_dict(), tensors)
    assert torch.equal(logits(again), expected)


def test_rotations_are_the_same(under):
    x, signs = torch.randn(3, 64), torch.ones(64)
    expected = native_hadamard.rotate(x, signs)
    native_hadamard._constants.cache_clear()
    under(torch.bfloat16)
    assert torch.equal(native_hadamard.rotate(x, signs), expected)


@pytest.mark.parametrize("length", [1, 40])
def test_attention_over_pages_is_the_same(length, under):
    """The kernels write float32 into what is allocated for the log-sum-exp."""
    q, pages = torch.randn(2, length, 4, 32), torch.randn(2, 8, 16, 2, 32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    call = dict(cache_seqlens=torch.tensor([50, 64]), block_table=table, causal=True, return_softmax_lse=True)
    expected = api.flash_attn_with_kvcache(q, *pages, **call)
    under(torch.bfloat16)
    for actual, wanted in zip(api.flash_attn_with_kvcache(q, *pages, **call), expected):
        assert actual.dtype is wanted.dtype and torch.equal(actual, wanted)


def test_generated_tokens_are_the_same(under, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    ids = TOKENS[:2, :9]

    def generated():
        model = load(tmp_path, options={"attn_implementation": "flash_paged"})
        return model.generate(ids, max_new_tokens=8, do_sample=False)

    expected = generated()
    under(torch.bfloat16)
    assert torch.equal(generated(), expected)


def test_tensors_of_floats_are_made_in_a_named_dtype():
    """But for Parameters of modules, numbers that are cast at once, and shapes without numbers."""
    makers = {f"torch.{name}" for name in ("zeros", "ones", "empty", "rand", "randn", "eye", "linspace", "logspace")}
    wrong = []
    for path in [*ROOT.glob("hf_efficient/**/*.py"), *ROOT.glob("integrations/**/*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        cast = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Parameter"):
                cast |= {id(inner) for inner in ast.walk(node)}
        wrong += [
            f"{path.name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in makers and id(node) not in cast
            if not {keyword.arg for keyword in node.keywords} & {"dtype", "out", None}
            if "device='meta'" not in ast.unparse(node)
        ]
    assert wrong == []
