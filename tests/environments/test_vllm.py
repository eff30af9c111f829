"""vLLM, beside this package in one environment, runs what this package compressed and exported there."""

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from saved_models import load

import hf_efficient


vllm = pytest.importorskip("vllm")
PROMPT = list(range(5, 25))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_vllm_generates_the_tokens_of_the_exported_model(format, tmp_path):
    """Greedy tokens of the exported folder: those of transformers, from the same weights."""
    sizes = dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=2, eos_token_id=None
    )
    tiny_model("llama", torch.bfloat16, **sizes).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", torch.bfloat16, bits=4, group_size=64, symmetric=True)
    hf_efficient.export(model, tmp_path / "exported", format=format, tokenizer=tiny_tokenizer())
    expected = model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
    llm = vllm.LLM(str(tmp_path / "exported"), dtype="bfloat16", enforce_eager=True, max_model_len=64)
    (output,) = llm.generate(
        {"prompt_token_ids": PROMPT}, vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=5), use_tqdm=False
    )
    (first,) = output.outputs[0].logprobs
    assert len(first) >= 5
    for token, found in first.items():
        assert abs(found.logprob - expected[token].item()) < 0.05, f"token {token}: bfloat16 rounds at 2 ** -8"
