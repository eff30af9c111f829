"""LLMLingua-2: token classifiers in the layout of the published checkpoints."""

import itertools

import pytest
import torch
from prompt_models import SENTENCES, classifier, roberta_tokenizer

from hf_efficient import PromptCompressor
from hf_efficient.prompts import small_model
from hf_efficient.prompts.classifier import probabilities


def save(folder, name: str = "XLMRoberta") -> None:
    classifier(name).save_pretrained(folder)
    roberta_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("name", ["XLMRoberta", "Bert"])
def test_a_saved_checkpoint_keeps_the_words_of_the_largest_mean_probability(tmp_path, name):
    save(tmp_path, name)
    compressor = PromptCompressor(tmp_path)
    assert type(compressor.model).__name__ == f"{name}ForTokenClassification" and compressor.is_classifier
    tokenizer, text = compressor.tokenizer, "river mill bridge sea tower keeper market"
    found = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    offsets = found.pop("offset_mapping")[0, 1:-1].tolist()
    with torch.no_grad():
        kept = compressor.model(**found).logits[0, 1:-1].softmax(-1)[:, 1]
    scores, lengths = {}, {}
    for word in text.split():
        start = max(text.index(word) - 1, 0)  # the space before a word is the word's
        inside = [i for i, (a, b) in enumerate(offsets) if a < text.index(word) + len(word) and b > start]
        scores[word], lengths[word] = kept[inside].mean().item(), len(inside)
    budget, expected = round(0.5 * len(offsets)), set()
    for word in sorted(scores, key=lambda word: -scores[word]):
        if lengths[word] <= budget:
            expected.add(word)
            budget -= lengths[word]
    assert compressor.compress(text, keep=0.5).text.split() == [word for word in text.split() if word in expected]
    assert 0 < len(expected) < 7


def test_positions_of_roberta_begin_after_the_padding_token():
    assert small_model.positions(classifier(positions=514), roberta_tokenizer()) == 512
    assert small_model.positions(classifier("Bert", positions=512), roberta_tokenizer()) == 512


@torch.no_grad()
def test_windows_end_with_sentences_and_one_window_is_one_forward():
    model, tokenizer = classifier(), roberta_tokenizer()
    ids = tokenizer.encode(SENTENCES, add_special_tokens=False)
    ends, special = [index % 10 == 9 for index in range(len(ids))], ([0], [2])

    def forward(part: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([[0, *part, 2]])).logits[0, 1:-1].softmax(-1)[:, 1]

    torch.testing.assert_close(probabilities(model, ids, ends, special, 512), forward(ids))
    found = probabilities(model, ids, ends, special, 17)  # 15 tokens at most: windows of 10
    starts = [*range(0, len(ids) - 15, 10), len(ids)]
    starts[-1:-1] = [starts[-2] + 10]
    torch.testing.assert_close(found, torch.cat([forward(ids[a:b]) for a, b in itertools.pairwise(starts)]))
    found = probabilities(model, ids, [False] * len(ids), special, 17)
    torch.testing.assert_close(found, torch.cat([forward(ids[at : at + 15]) for at in range(0, len(ids), 15)]))


def test_prompts_longer_than_the_positions():
    compressor = PromptCompressor(classifier(positions=34), roberta_tokenizer())
    result = compressor.compress(SENTENCES * 3, keep=0.5)
    assert 0.4 * result.prompt_tokens < len(result.positions) <= 0.5 * result.prompt_tokens + 1
