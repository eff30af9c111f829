"""Sampled text has the distribution of the target with each drafter that no other file tests: 6,000 texts of
three tokens, of 8 there are.

Elsewhere: assistants and their trees (test_speculative_distribution.py), published heads (test_published_heads.py), MTP
(test_mtp.py), encoder-decoders (test_encoder_decoder_speculation.py), models of images (test_multimodal.py) and
recurrent layers (test_recurrent.py).
"""

import functools

import pytest
import torch
from draft_models import CHARACTERS, character_tokenizer, drafting, fixed, perturbed
from helpers import tiny_model
from test_speculative_distribution import RIGHT, p_value

from hf_efficient import BestOf, PromptLookup, SelfSpeculation, TokenRecycling, TranslatedDrafter, enable_speculation
from hf_efficient.generation.drafters.eagle import EagleHead
from hf_efficient.generation.drafters.medusa import MedusaHeads


ROWS, NEVER = 6_000, 9  # sequences of a call; an end of sequence that is no token
SIZES = dict(vocab_size=8, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
PROMPT = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])


@functools.cache
def target():
    model = enable_speculation(tiny_model("llama", **SIZES, eos_token_id=NEVER, pad_token_id=None))
    model.generation_config.pad_token_id = NEVER
    return model


@functools.cache
def probabilities() -> torch.Tensor:
    """Of all texts of three tokens after the prompt, [512]."""
    tokens = torch.cartesian_prod(*[torch.arange(8)] * 3)
    with torch.no_grad():
        logits = target()(torch.cat([PROMPT.expand(512, -1), tokens[:, :2]], 1)).logits[:, -3:].log_softmax(-1)
    return logits.gather(2, tokens[..., None])[..., 0].sum(1).exp()


def translated():
    """A draft whose tokens have other numbers."""
    draft = drafting(perturbed(target(), 0.3), 2)
    order = torch.tensor([0, 1, 2, 7, 3, 6, 4, 5])
    with torch.no_grad():
        for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            layer.weight.copy_(layer.weight[order])
    ours = CHARACTERS[:5]
    theirs = [ours[token - 3] for token in order.tolist()[3:]]
    return TranslatedDrafter(draft, character_tokenizer(ours), character_tokenizer(theirs))


def heads(kind):
    torch.manual_seed(1)
    made = kind.for_model(target(), draft_tokens=8)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    made.nodes = 6
    return made


DRAFTERS = {
    "prompt lookup": lambda: PromptLookup(2, 1),
    "token recycling": TokenRecycling,
    "best of two": lambda: BestOf(PromptLookup(2, 1), TokenRecycling()),
    "few bits": lambda: SelfSpeculation(bits=4, num_tokens=2),
    "layers left out": lambda: SelfSpeculation(exit_layer=1, num_tokens=2),
    "few bits, as a tree": lambda: SelfSpeculation(bits=3, num_tokens=2, tree=6),
    "another tokenizer": translated,
    "EAGLE head": lambda: heads(EagleHead),
    "Medusa heads": lambda: heads(MedusaHeads),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_text_has_the_distribution_of_the_target(name):
    drafter = fixed(DRAFTERS[name]())
    options = dict(do_sample=True, top_k=0, max_new_tokens=3, return_dict_in_generate=True)
    torch.manual_seed(0)
    output = target().generate(PROMPT.expand(ROWS, -1), assistant_model=drafter, **options)
    assert 0 < output.accepted_tokens.sum() < output.drafted_tokens.sum(), "some accepted, some rejected"
    codes = output.sequences[:, -3:] @ torch.tensor([64, 8, 1])
    assert p_value(torch.bincount(codes, minlength=512), probabilities()) > RIGHT
