"""vLLM, beside this package in one environment, runs what this package compressed and exported there."""

import os

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient import W8A8Config, WeightOnlyConfig


os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
vllm = pytest.importorskip("vllm")
PROMPT = list(range(5, 25))
SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=2, eos_token_id=None)
INT4 = dict(bits=4, group_size=64, method="rtn")
CASES = {  # name -> (format of the export, how the model is compressed)
    "int4": ("compressed-tensors", lambda: WeightOnlyConfig(**INT4, symmetric=True)),
    "int4 with zero points": ("compressed-tensors", lambda: WeightOnlyConfig(**INT4)),
    "int8 activations": ("compressed-tensors", W8A8Config),
    "gptq": ("gptq", lambda: WeightOnlyConfig(**INT4, symmetric=True)),
    "awq": ("awq", lambda: WeightOnlyConfig(**INT4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_vllm_generates_the_tokens_of_the_exported_model(name, tmp_path):
    """The likeliest tokens and their log-probabilities: those of transformers, from the same weights."""
    format, config = CASES[name]
    tiny_model("llama", torch.bfloat16, **SIZES).save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.bfloat16, quantization_config=config()
    ).eval()
    report = hf_efficient.export(model, tmp_path / "exported", format=format, tokenizer=tiny_tokenizer())
    assert "vLLM" in report.engines
    expected = model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
    llm = vllm.LLM(str(tmp_path / "exported"), dtype="bfloat16", enforce_eager=True, max_model_len=64)
    (output,) = llm.generate(
        {"prompt_token_ids": PROMPT}, vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=5), use_tqdm=False
    )
    (first,) = output.outputs[0].logprobs
    assert len(first) >= 5 and max(first, key=lambda token: first[token].logprob) == int(expected.argmax())
    for token, found in first.items():  # bfloat16 rounds a logit of 8 by 1/32, and what it is computed from
        assert abs(found.logprob - expected[token].item()) < 0.15, token
