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
from test_mtp import published
from test_speculative_distribution import RIGHT, p_value, texts_p_value
from transformers.generation import logits_process as of

from hf_efficient import (
    BestOf,
    MultiTokenPrediction,
    PromptLookup,
    SelfSpeculation,
    TokenRecycling,
    TranslatedDrafter,
    enable_speculation,
)
from hf_efficient.generation.drafters.assistant import AssistantDrafter
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


class NotTwice(of.LogitsProcessor):
    """A user's: halves the probability of the token before the last one."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids[:, -2:-1], torch.full((len(scores), 1), -0.7))


END, PADDING, LENGTH = 2, 0, PROMPT.shape[1]
# options of generate(), and the processors they stand for, in its order
PROCESSORS = {
    "of one row of scores": (
        dict(suppress_tokens=[6], temperature=1.4, top_k=6, top_p=0.95, min_p=0.02, typical_p=0.98),
        lambda: [
            of.SuppressTokensLogitsProcessor([6]),
            of.TemperatureLogitsWarper(1.4),
            of.TopKLogitsWarper(6),
            of.TopPLogitsWarper(0.95),
            of.MinPLogitsWarper(0.02),
            of.TypicalLogitsWarper(0.98),
        ],
    ),
    "of the text": (
        dict(
            sequence_bias={(7,): 0.5, (4, 3): -0.8},
            repetition_penalty=1.3,
            exponential_decay_length_penalty=(1, 1.4),
            bad_words_ids=[[5, 1]],
            min_new_tokens=2,
            temperature=1.6,
            top_k=7,
            logits_processor=[NotTwice()],
        ),
        lambda: [
            of.SequenceBiasLogitsProcessor({(7,): 0.5, (4, 3): -0.8}),
            of.RepetitionPenaltyLogitsProcessor(1.3),
            of.ExponentialDecayLengthPenalty((1, 1.4), END, LENGTH),
            of.NoBadWordsLogitsProcessor([[5, 1]], END),
            of.MinNewTokensLengthLogitsProcessor(LENGTH, 2, END),
            NotTwice(),
            of.TemperatureLogitsWarper(1.6),
            of.TopKLogitsWarper(7),
        ],
    ),
}


@torch.no_grad()
def exact_texts(model, processors) -> dict[tuple, float]:
    """Text -> probability, of the prompt and three tokens more, or fewer and padding from `END` on."""
    texts = {tuple(PROMPT[0].tolist()): 1.0}
    for _ in range(3):
        going = [text for text in texts if END not in text[LENGTH:]]
        grown = {(*text, PADDING): chance for text, chance in texts.items() if END in text[LENGTH:]}
        ids = torch.tensor(going)
        chances = of.LogitsProcessorList(processors)(ids, model(ids).logits[:, -1]).double().softmax(-1)
        for text, row in zip(going, chances.tolist()):
            grown |= {(*text, token): texts[text] * chance for token, chance in enumerate(row) if chance > 0}
        texts = grown
    return texts


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", [*DRAFTERS, "assistant", "assistant, as a tree", "MTP"])
def test_sampled_text_under_logits_processors(name, processors, tmp_path):
    """20,000 texts of at most three tokens, some of which end sooner."""
    model = published(tmp_path, "GLM-4.5", vocab_size=8) if name == "MTP" else target()
    more = {
        "assistant": lambda: drafting(perturbed(target(), 0.3), 2),
        "assistant, as a tree": lambda: AssistantDrafter(drafting(perturbed(target(), 0.3), 2), tree=6),
        "MTP": lambda: MultiTokenPrediction(model),
    }
    options, made = PROCESSORS[processors]
    options = dict(options, do_sample=True, max_new_tokens=3, eos_token_id=END, pad_token_id=PADDING)
    options |= dict(assistant_model=fixed({**DRAFTERS, **more}[name]()), return_dict_in_generate=True)
    torch.manual_seed(0)
    outputs = [model.generate(PROMPT.expand(5_000, -1), **options) for _ in range(4)]
    accepted, drafted = (sum(x[f"{kind}_tokens"].sum() for x in outputs) for kind in ("accepted", "drafted"))
    assert 0 < accepted < drafted, "some accepted, some rejected"
    found = torch.cat([x.sequences for x in outputs])
    assert texts_p_value(found, exact_texts(model, made())) > RIGHT
