"""Bad arguments end with what was given and what is allowed, before work starts."""

import pytest
import torch
from helpers import tiny_model
from prompt_models import CHAT_TEMPLATE, SENTENCES, byte_tokenizer, classifier, roberta_tokenizer

from hf_efficient import PromptCompressor


@pytest.fixture(scope="module")
def compressor():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return PromptCompressor(tiny_model("llama", vocab_size=300), tokenizer)


HALF = dict(keep=0.5)
CASES = {
    "neither": (SENTENCES, {}, ValueError, "keep=None and tokens=None: give one"),
    "both": (SENTENCES, dict(keep=0.5, tokens=9), ValueError, "keep=0.5 and tokens=9: give one"),
    "none kept": (SENTENCES, dict(keep=0), ValueError, "keep=0 is not above 0 and at most 1"),
    "more than all": (SENTENCES, dict(keep=1.01), ValueError, "keep=1.01 is not above 0"),
    "not a number": (SENTENCES, dict(keep=float("nan")), ValueError, "keep=nan is not above 0"),
    "text as share": (SENTENCES, dict(keep="0.5"), TypeError, "keep='0.5' is no number"),
    "true as share": (SENTENCES, dict(keep=True), TypeError, "keep=True is no number"),
    "no tokens": (SENTENCES, dict(tokens=0), ValueError, "tokens=0 is not at least 1"),
    "half tokens": (SENTENCES, dict(tokens=2.5), TypeError, "tokens=2.5 is no whole number"),
    "more tokens": ("the river", dict(tokens=500), ValueError, "tokens=500, but the prompt has"),
    "less than a word": ("Supercalifragilistic", dict(tokens=2), ValueError, "tokens=2, but the shortest word"),
    "less than must": (
        dict(documents=["the sea"], question="Who reads?"), dict(tokens=2), ValueError, "always stay: the question",
    ),
    "empty question": (SENTENCES, dict(question="  ", **HALF), ValueError, "question='  ' holds no text"),
    "question of a number": (SENTENCES, dict(question=3, **HALF), TypeError, "question=3 is no text"),
    "empty prompt": ("", HALF, ValueError, "prompt='' holds no text"),
    "blank prompt": (" \n", HALF, ValueError, "holds no text"),
    "empty segments": ({}, HALF, ValueError, "holds no text"),
    "half a character": ("the \ud83d sea", HALF, ValueError, "prompt has '\\ud83d', half of a character"),
    "half a character asked": (SENTENCES, dict(question="Who\udc00?", **HALF), ValueError, "question has '\\udc00'"),
    "no prompts": ([], HALF, ValueError, "prompt is an empty list"),
    "tokens as prompt": ([[1, 2, 3]], HALF, TypeError, "prompt is list: give a text"),
    "prompt of a number": (7, HALF, TypeError, "prompt is int: give a text"),
    "one word": (SENTENCES, dict(keep_words="the", **HALF), TypeError, "keep_words='the' is str: give a list"),
    "words of numbers": (SENTENCES, dict(keep_words=[4], **HALF), TypeError, "keep_words has 4: each is a text"),
    "empty word": (SENTENCES, dict(keep_words=[""], **HALF), ValueError, "keep_words has an empty text"),
    "unknown segment": (dict(context="a"), HALF, ValueError, "prompt has the segments ['context']"),
    "document alone": (dict(documents="a"), HALF, TypeError, "prompt['documents'] is 'a': give a list of texts"),
    "two questions": (dict(question="a?"), dict(question="b?", **HALF), ValueError, "are two questions"),
    "questions for prompts": (["a", "b"], dict(question=["c?"], **HALF), ValueError, "question has 1 texts for 2"),
    "order of a text": (SENTENCES, dict(reorder=True, question="Who?", **HALF), ValueError, "reorder=True needs"),
    "parts as content": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}], HALF, TypeError, "message 0 is",
    ),
    "long question": (SENTENCES, dict(question=SENTENCES * 9, **HALF), ValueError, "256 positions"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(compressor, case, monkeypatch):
    prompt, arguments, error, message = CASES[case]
    monkeypatch.setattr(type(compressor.model), "forward", lambda *args, **kwargs: pytest.fail("work had started"))
    with pytest.raises(error) as raised:
        compressor.compress(prompt, **arguments)
    assert message in str(raised.value)


def test_a_template_that_changes_contents(compressor, monkeypatch):
    template = CHAT_TEMPLATE.replace("['content']", "['content'] | upper")
    monkeypatch.setattr(compressor.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="changes what messages say"):
        compressor.compress([{"role": "user", "content": "the river"}], keep=0.5)
    monkeypatch.setattr(compressor.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with pytest.raises(ValueError, match="leaves messages out"):
        compressor.compress([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], keep=0.5)


def test_small_models_that_cannot_judge(tmp_path):
    from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel, T5Config, T5ForConditionalGeneration

    small = dict(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2))
    t5.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for model in (t5, str(tmp_path)):
        with pytest.raises(ValueError, match="is an encoder-decoder"):
            PromptCompressor(model, byte_tokenizer())
    with pytest.raises(ValueError, match="BertForMaskedLM is neither"):
        PromptCompressor(BertForMaskedLM(BertConfig(**small)), byte_tokenizer())
    with pytest.raises(ValueError, match="BertLMHeadModel has no cache"):
        PromptCompressor(BertLMHeadModel(BertConfig(**small)), byte_tokenizer()).compress(SENTENCES, keep=0.5)
    with pytest.raises(ValueError, match="XLMRobertaForTokenClassification has 3 labels"):
        PromptCompressor(classifier(labels=3), roberta_tokenizer())
    with pytest.raises(TypeError, match="model is Linear"):
        PromptCompressor(torch.nn.Linear(2, 2), byte_tokenizer())
    with pytest.raises(ValueError, match="tokenizer is missing"):
        PromptCompressor(classifier())


def test_a_question_that_a_classifier_cannot_read():
    compressor = PromptCompressor(classifier(), roberta_tokenizer())
    with pytest.raises(ValueError, match="does not stand in the prompt"):
        compressor.compress(SENTENCES, keep=0.5, question="Who reads?")
    result = compressor.compress(SENTENCES + "Who reads?", keep=0.1, question="Who reads?")
    assert result.text.endswith("Who reads?")
