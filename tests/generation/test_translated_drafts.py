"""Drafts from a model with another tokenizer: what is translated, and that the output stays the target's."""

import copy
import random

import pytest
import torch
from draft_models import GREEDY, NEW, character_tokenizer, drafting, fixed, wrapped_tokenizer
from helpers import left_padded_batch, tiny_model
from test_drafters import advance, append, sequences_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from hf_efficient import TranslatedDrafter, enable_speculation
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.drafters.translation import Translation


SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = [chr(code) for code in range(256, 381)]  # 125 printable ones that no tokenizer treats in its own way
TEXT = "".join(
    f"the {a} of {b} is {a}ly {b}; in\nno {a}{b} way, " for a in ("cat", "dogma", "tree") for b in ("rain", "x-ray")
)


def trained_tokenizer(size: int, marks_words: bool) -> PreTrainedTokenizerFast:
    """BPE as in Llama 2 (a mark before each word) or as in GPT-2 (bytes)."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    part = pre_tokenizers.Metaspace() if marks_words else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = part, decoders.Metaspace() if marks_words else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "".join(map(chr, range(32, 127)))], trainer)
    return wrapped_tokenizer(tokenizer)


def permuted(seed: int = 0) -> tuple[list[str], torch.Tensor]:
    """Another order of the characters, and for each target id the draft id of the same character."""
    order = torch.randperm(125, generator=torch.Generator().manual_seed(seed))
    draft_of = torch.cat([torch.arange(3), 3 + order.argsort()])
    return [CHARACTERS[index] for index in order], draft_of


def relabelled(model, draft_of: torch.Tensor):
    """`model` with the tokens numbered as in `draft_of`: says the same in another vocabulary."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in {module.weight for module in (draft.get_input_embeddings(), draft.get_output_embeddings())}:
            weight[draft_of] = weight.clone()
    return drafting(draft)


TARGET = character_tokenizer(CHARACTERS)


@pytest.mark.parametrize(
    "architecture, attention, method",
    [
        ("llama", "eager", "tokens"),
        ("gemma3", "sdpa", "text"),
        ("mistral", "flash_paged", "tokens"),
        ("mistral", "flash_paged", "text"),
    ],
)
def test_the_same_model_in_another_vocabulary_is_always_right(architecture, attention, method):
    target = enable_speculation(tiny_model(architecture))
    target.set_attn_implementation(attention)
    characters, draft_of = permuted()
    draft = relabelled(target, draft_of)
    drafter = fixed(TranslatedDrafter(draft, TARGET, character_tokenizer(characters), method))
    batch = left_padded_batch()
    for inputs in (batch, {key: value[1:2] for key, value in batch.items()}):
        inputs = dict(**inputs, max_new_tokens=NEW, eos_token_id=None)
        plain = target.generate(**inputs, do_sample=False)
        options = dict(**inputs, assistant_model=drafter, return_dict_in_generate=True)
        output = target.generate(**options, do_sample=False)
        assert torch.equal(output.sequences, plain)
        assert torch.equal(output.accepted_tokens, output.drafted_tokens)
        # a text ends at an end token that is said in passing
        assert output.num_steps <= (3 if method == "tokens" else 4)
        output = target.generate(**options, do_sample=True)
        if method == "tokens":  # p and q differ by rounding alone: a rejection is not seen in this few draws
            assert torch.equal(output.accepted_tokens, output.drafted_tokens)
    assert drafter.draft.runner is None, "the draft's cache is gone when the rows have ended"


def test_generate_finds_it_by_the_tokenizers():
    target = enable_speculation(tiny_model("llama"))
    draft = drafting(tiny_model("llama", vocab_size=100, seed=3))
    batch = left_padded_batch()
    options = dict(**batch, max_new_tokens=NEW, tokenizer=TARGET)
    plain = target.generate(**options, do_sample=False)
    for characters in (CHARACTERS[20:117], CHARACTERS[:97]):  # other numbers; the same numbers and fewer tokens
        options["assistant_tokenizer"] = character_tokenizer(characters)
        output = target.generate(**options, assistant_model=draft, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain) and output.drafted_tokens.sum() > 0
        target.generate(**options, assistant_model=draft, do_sample=True, repetition_penalty=1.2)


@torch.no_grad()
def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from():
    """Over the tokens that both have, also when they are fewer than the draft's and the target's."""
    batch = left_padded_batch((6, 4))
    draft = drafting(tiny_model("llama", vocab_size=110, seed=3), 3)
    characters = CHARACTERS[20:117] + [chr(code) for code in range(1000, 1010)]
    drafter = TranslatedDrafter(draft, TARGET, character_tokenizer(characters))
    drafter.check(tiny_model("llama"))
    assert drafter.by_tokens
    drafter.begin(sequences_of(**batch, first=torch.tensor([29, 30]), do_sample=True))
    proposal = drafter.propose([9, 9], 63)
    common = torch.cat([torch.arange(3), torch.arange(23, 120)])
    for row, (prompt, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"])):
        tokens = [*prompt[mask.bool()].tolist(), 29 + row, *proposal.tokens[row].tolist()]
        ids = [token if token < 3 else token - 20 if 23 <= token < 120 else 0 for token in tokens]  # 0: unknown
        logits = draft(torch.tensor([ids]), use_cache=False).logits[0, -4:-1, : len(common)]
        expected = torch.zeros(3, 128).index_copy_(1, common, logits.softmax(-1))
        # float32 attention in another order of summation
        torch.testing.assert_close(proposal.probabilities[row], expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("method", ["tokens", "text"])
@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_drafts_the_greedy_continuation_whatever_was_accepted(attention, method):
    """Rows at their own pace, with long stretches that were not drafted; the draft has layers with a window."""
    target = tiny_model("gemma3")
    target.set_attn_implementation(attention)
    characters, draft_of = permuted()
    draft = drafting(relabelled(target, draft_of), 3)
    drafter = TranslatedDrafter(draft, TARGET, character_tokenizer(characters), method)
    drafter.check(target)
    batch, generator = left_padded_batch((5, 9, 7)), random.Random(0)
    sequences = sequences_of(**batch, first=torch.tensor([11, 12, 13]), max_length=400)
    drafter.begin(sequences)
    for kept in ([0, 1, 2], [0, 1, 2], [0, 2], [1], [0]):
        for _ in range(generator.choice([1, 45])):  # steps without a draft
            new = append(sequences, torch.randint(3, 128, (len(sequences.live), 1)))
            drafter.accept(new)
        proposal = drafter.propose([9] * len(sequences.live), 63)
        assert proposal.counts.tolist() == [3] * len(sequences.live)
        for ids, tokens in zip(sequences.token_lists(), proposal.tokens.tolist()):
            for token in tokens:
                assert token == int(target(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
                ids.append(token)
        advance(drafter, sequences, proposal, [generator.randint(0, 3) for _ in sequences.live])
        if len(kept) < len(sequences.live):
            sequences.select(kept)
            drafter.select(kept)


class OnlyThese(LogitsProcessor):
    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, ids, scores):
        return torch.full_like(scores, float("-inf")).index_copy(1, self.tokens, scores[:, self.tokens])


@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_that_the_draft_does_not_have_may_be_all_that_is_allowed(do_sample):
    target = enable_speculation(tiny_model("llama"))
    drafter = fixed(TranslatedDrafter(drafting(tiny_model("llama")), TARGET, character_tokenizer(CHARACTERS[:90])))
    processors = LogitsProcessorList([OnlyThese(torch.arange(100, 128))])
    options = dict(**left_padded_batch(), max_new_tokens=6, do_sample=do_sample, logits_processor=processors)
    output = target.generate(**options, assistant_model=drafter, return_dict_in_generate=True)
    assert output.sequences[:, -6:].min() >= 100 and output.drafted_tokens.sum() == 0
    if not do_sample:
        assert torch.equal(output.sequences, target.generate(**options))


@torch.no_grad()
@pytest.mark.parametrize("method", ["tokens", "text"])
def test_the_end_of_a_sequence_is_translated(method):
    """The draft says nothing but the end, which has another name and number for the target."""
    draft, renamed = drafting(tiny_model("llama")), copy.deepcopy(TARGET)
    draft.lm_head.register_forward_hook(lambda *args: torch.zeros_like(args[2]).index_fill_(-1, torch.tensor(2), 50.0))
    renamed.add_special_tokens({"eos_token": CHARACTERS[60]})
    drafter = TranslatedDrafter(draft, renamed, character_tokenizer(CHARACTERS), method)
    drafter.check(tiny_model("llama"))
    drafter.begin(sequences_of(**left_padded_batch(), first=torch.tensor([9, 10, 11])))
    assert drafter.propose([9, 9, 9], 63).tokens[:, 0].tolist() == [63] * 3


@pytest.mark.parametrize("marked", [True, False])
def test_sequences_are_translated_as_they_grow(marked):
    target, draft = trained_tokenizer(160, marked), trained_tokenizer(220, not marked)
    translation = Translation(target, draft, 160, 220)
    assert 0.5 < translation.overlap < 1
    text, generator = TEXT[:200] + "zigzag, Rain!\n" + TEXT[300:500], random.Random(0)
    ids = target(text)["input_ids"]
    for by_tokens in (False, True):
        row, done = translation.prompt(ids[:3]), 3
        while done < len(ids):
            number = generator.randint(1, 4)
            longer = translation.extend(row, ids[:done], ids[done : done + number], by_tokens)
            same = next((i for i, (a, b) in enumerate(zip(row, longer)) if a != b), min(len(row), len(longer)))
            assert len(row) - same <= 16  # what layers with a window still know
            row, done = longer, done + number
        assert draft.decode(row) == draft.decode(translation.prompt(ids))
        if not by_tokens:
            assert row == translation.prompt(ids), "joined as in running text"
    begin = draft(text[:30])["input_ids"]
    more = draft(text[:60])["input_ids"][len(begin) :]
    back = target.decode(target(text[:30])["input_ids"] + translation.back(begin, more, False))
    assert back == target.decode(target(text[:60])["input_ids"])


def test_special_tokens_of_a_prompt():
    target, draft = copy.deepcopy(TARGET), character_tokenizer(CHARACTERS)
    target.add_special_tokens({"additional_special_tokens": ["<user>", "<both>"]})
    draft.add_special_tokens({"additional_special_tokens": ["<both>"]})
    translation = Translation(target, draft, 130, 130)
    user, both = target.convert_tokens_to_ids(["<user>", "<both>"])
    assert translation.prompt([user, 5, 6, both, 7]) == [5, 6, draft.convert_tokens_to_ids("<both>"), 7]
    assert translation.prompt([user]) == [1], "never empty: the begin of a sequence"


def test_bad_input_is_refused():
    target, draft = enable_speculation(tiny_model("llama")), drafting(tiny_model("llama", seed=1))
    other = character_tokenizer([CHARACTERS[0], *reversed(CHARACTERS[1:])])
    message = f"token 4 is '{CHARACTERS[1]}' for the target .128 tokens. and '{CHARACTERS[-1]}' for the assistant"
    with pytest.raises(ValueError, match=message):
        AssistantDrafter(draft, (TARGET, other)).check(target)
    with pytest.raises(ValueError, match="token 127 is .* and no token for the assistant .127."):
        AssistantDrafter(draft, (TARGET, character_tokenizer(CHARACTERS[:-1]))).check(target)
    for tokenizers, name in (((None, TARGET), "tokenizer"), ((TARGET, None), "assistant_tokenizer")):
        with pytest.raises(ValueError, match=f"^{name}=None: drafting with another vocabulary"):
            TranslatedDrafter(draft, *tokenizers)
    with pytest.raises(ValueError, match="method='words': must be 'tokens', 'text' or None"):
        TranslatedDrafter(draft, TARGET, other, method="words")
    with pytest.raises(TypeError, match="model=str: expected a transformers model"):
        TranslatedDrafter("gpt2", TARGET, other)
    foreign = character_tokenizer([chr(code) for code in range(1000, 1125)])
    batch = left_padded_batch()
    with pytest.raises(ValueError, match="have no token in common"):
        target.generate(**batch, max_new_tokens=2, assistant_model=TranslatedDrafter(draft, TARGET, foreign))
    by_text = fixed(TranslatedDrafter(draft, TARGET, foreign, method="text"))
    plain = target.generate(**batch, **GREEDY)
    assert torch.equal(target.generate(**batch, **GREEDY, assistant_model=by_text), plain)
