"""Drafts are verified with inputs in int8 where the target's own are."""

import pytest
import torch
from draft_models import fixed
from helpers import left_padded_batch, tiny_model
from native_loop import NATIVE_LOOP, transformers_loop
from oracle import Oracle

from hf_efficient import WeightOnlyConfig, enable_speculation
from hf_efficient.kernels.linear import native_cpu


pytestmark = NATIVE_LOOP
OPTIONS = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """The same codes with inputs rounded to int8, and as they are. One token follows each other one by a wide margin,
    as bfloat16 adds several queries in another order than one."""
    folder = tmp_path_factory.mktemp("target")
    plain = tiny_model("llama", eos_token_id=None, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
        plain.lm_head.weight.copy_(plain.get_input_embeddings().weight.roll(17, 0) / 2)
    plain.bfloat16().save_pretrained(folder)
    scheme = dict(bits=4, group_size=32, method="rtn", quantize_lm_head=True)
    # eager attention: torch's own kernel for prompts rounds on some CPUs as much as int8 does
    options = dict(dtype=torch.bfloat16, attn_implementation="eager")
    return [
        enable_speculation(
            type(plain).from_pretrained(
                folder, quantization_config=WeightOnlyConfig(**scheme, int8_on_cpu=rounds), **options
            )
        )
        for rounds in (True, False)
    ]


@pytest.mark.parametrize("rows", [1, 3, 4])  # of up to 7 tokens each: AMX does not round forwards of more than 32
def test_all_products_of_a_verification_round_their_inputs(rows, targets, monkeypatch):
    target, unrounded = targets
    batch = left_padded_batch([11, 5, 8, 3, 9, 7, 4, 6][:rows])
    with transformers_loop():
        plain, other = (model.generate(**batch, **OPTIONS) for model in (target, unrounded))
    expected = torch.stack(plain.logits)
    rounding = (expected - torch.stack(other.logits)).abs().mean()
    read, matmul = set(), native_cpu.NativeCodesLayout.matmul

    def noting(layout, x, *arguments):
        read.add((layout.rounds_inputs, x[..., 0].numel()))
        return matmul(layout, x, *arguments)

    monkeypatch.setattr(native_cpu.NativeCodesLayout, "matmul", noting)
    for siblings in (1, 2):
        oracle = fixed(Oracle(plain.sequences, 0.7, 3, 128, siblings))
        found = target.generate(**batch, **OPTIONS, assistant_model=oracle)
        assert torch.equal(found.sequences, plain.sequences)
        assert 0 < found.accepted_tokens.sum() < found.drafted_tokens.sum()
        assert (torch.stack(found.logits) - expected).abs().mean() < 0.7 * rounding
    widths = {tokens for rounds, tokens in read if rounds == native_cpu.ALWAYS}
    assert len(read) == len(widths) and max(widths) >= 4 * rows, "all products round, those of several tokens, too"
