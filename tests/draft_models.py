"""Targets, drafts of them, and the plain greedy output, for the tests of speculation."""

import copy
import functools

import torch
from helpers import left_padded_batch, tiny_model
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from hf_efficient import Drafter, Speculation, enable_speculation


NEW = 14
GREEDY = dict(max_new_tokens=NEW, do_sample=False)
CHARACTERS = [chr(code) for code in range(32, 157)]  # tokens 3 to 127


def perturbed(model, amount: float, seed: int = 1):
    """A draft that agrees with `model` now and then."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(noise * parameter.std() * amount)
    return drafting(draft)


def drafting(model, tokens: int = 4):
    model.generation_config.num_assistant_tokens = tokens
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens_schedule = "constant"  # tests count forwards
    return model


@functools.cache
def models(name: str):
    """Target and drafts of one architecture, with the plain greedy outputs of a batch of 3 and of its middle row."""
    target = tiny_model(name)
    drafts = {"good": perturbed(target, 0.1), "bad": drafting(tiny_model(name, seed=7))}
    batch = left_padded_batch()
    single = {key: value[1:2] for key, value in batch.items()}
    plain = [target.generate(**inputs, max_new_tokens=NEW, do_sample=False) for inputs in (batch, single)]
    drafting(enable_speculation(target))
    return target, {**drafts, "itself": target}, (batch, single), plain


def llama():
    """Body of a fixture: target, good draft, batch of 3 and its plain greedy output; the generation config is fresh."""
    target, drafts, (batch, _), (plain, _) = models("llama")
    saved = copy.deepcopy(target.generation_config)
    yield target, drafts["good"], batch, plain
    target.generation_config = saved


def counting(model, monkeypatch) -> list[tuple[int, int]]:
    """(rows, columns) of each forward of `model` from now on."""
    shapes, forward = [], model.forward

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", wrapper)
    return shapes


class Recorder(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def end_token(plain: torch.Tensor, row: int, step: int) -> int:
    """A token that row `row` says for the first time at `step`."""
    generated = plain[row, -NEW:].tolist()
    assert generated[step] not in generated[:step]
    return generated[step]


class Observer(Drafter):
    """A drafter whose guesses depend on nothing that it is told; `propose` is the test's."""

    def begin(self, sequences, hidden=None):
        self.sequences = sequences

    def accept(self, tokens, hidden=None):
        pass

    def select(self, rows):
        pass


def fixed(draft) -> Speculation:
    """Drafts in every step, whether it pays or not."""
    return Speculation(draft, adaptive=False)


def character_tokenizer(characters=CHARACTERS) -> PreTrainedTokenizerFast:
    """Token 3 + i is the i-th of `characters`."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split(Regex("."), "isolated"), Fuse()
    return wrapped_tokenizer(tokenizer)


def wrapped_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
