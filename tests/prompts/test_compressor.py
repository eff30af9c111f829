"""What `PromptCompressor` keeps: a subset in its order, within the budget, with what must stay."""

import itertools
import re
import unicodedata

import pytest
from helpers import tiny_model
from prompt_models import CHAT_TEMPLATE, SENTENCES, byte_tokenizer, classifier, roberta_tokenizer

from hf_efficient import PromptCompressor
from hf_efficient.prompts.tokens import tokenize


QUESTION = "Who reads in the tower?"
PROMPTS = {
    "text": SENTENCES,
    "long": SENTENCES * 4,
    "segments": {
        "instruction": "Answer in one short sentence, please.",
        "documents": SENTENCES.split(". ")[:4],
        "question": QUESTION,
    },
    "demonstrations": {"instruction": "Say yes.", "demonstrations": ["Who? No.", "Is the sea here? Yes it is.", "Go."]},
    "chat": [
        {"role": "system", "content": "You are kind to everybody."},
        {"role": "user", "content": SENTENCES + QUESTION},
        {"role": "assistant", "content": "The keeper of the light reads there."},
    ],
    "characters": "Ärger über 木曜日に雨が降った。🤖 über alles 漢字 naïve café.",
}


@pytest.fixture(scope="module")
def language_model():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return PromptCompressor(tiny_model("llama", vocab_size=300, max_position_embeddings=2048), tokenizer)


@pytest.fixture(scope="module")
def token_classifier():
    return PromptCompressor(classifier(), roberta_tokenizer())


@pytest.fixture(params=["language_model", "token_classifier"])
def compressor(request):
    return request.getfixturevalue(request.param)


def whole(compressor, prompt) -> str:
    return compressor.compress(prompt, keep=1.0).text


def is_subsequence(part, of) -> bool:
    rest = iter(of)
    return all(item in rest for item in part)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", PROMPTS)
def test_the_kept_tokens_are_a_subset_in_order_and_spell_the_text(compressor, name, keep):
    result = compressor.compress(PROMPTS[name], keep=keep)
    assert result.positions == sorted(set(result.positions))
    assert len(result.token_ids) == len(result.positions) <= result.prompt_tokens
    text = whole(compressor, PROMPTS[name])
    ids = compressor.tokenizer.encode(text, add_special_tokens=False)
    assert result.prompt_tokens == len(ids)
    assert [ids[position] for position in result.positions] == result.token_ids
    assert is_subsequence(result.text, text)
    if not compressor.is_classifier:  # byte-level tokens spell every character
        assert compressor.tokenizer.decode(result.token_ids, clean_up_tokenization_spaces=False) == result.text
    if keep == 1.0:
        assert len(result.positions) == len(ids)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.75])
def test_the_budget_is_met_but_for_a_word(compressor, keep):
    result = compressor.compress(SENTENCES * 4, keep=keep)
    budget = round(keep * result.prompt_tokens)
    assert budget - 12 <= len(result.positions) <= budget, "what no word fits into is left"


@pytest.mark.parametrize("tokens", [20, 90])
@pytest.mark.parametrize("name", ["text", "segments", "chat"])
def test_tokens_bound_the_whole_result(language_model, name, tokens):
    fewest = len(language_model.compress(PROMPTS[name], keep=1e-9, question=QUESTION).positions)
    result = language_model.compress(PROMPTS[name], tokens=fewest + tokens, question=QUESTION)
    assert fewest + tokens - 12 <= len(result.positions) <= fewest + tokens


def test_words_are_kept_or_dropped_whole(compressor):
    words = set(SENTENCES.replace(".", " ").replace(",", " ").replace(":", " ").split())
    text = compressor.compress(SENTENCES, keep=0.4).text
    for sign in ".,:":
        text = text.replace(sign, " ")
    assert len(text.split()) > 5 and set(text.split()) <= words


@pytest.mark.parametrize(
    "text",
    [
        "\u0e1b\u0e23\u0e30\u0e40\u0e17\u0e28"
        "\u0e44\u0e17\u0e22\u0e21\u0e35\u0e40\u0e21\u0e37\u0e2d\u0e07\u0e2b\u0e25\u0e27\u0e07",
        "\u0e9b\u0eb0\u0ec0\u0e97\u0e94\u0ea5\u0eb2\u0ea7"
        "\u0ea1\u0eb5\u0ec1\u0ea1\u0ec8\u0e99\u0ec9\u0eb3\u0e82\u0ead\u0e87",
        "\u1797\u17b6\u179f\u17b6\u1781\u17d2\u1798\u17c2\u179a\u1798\u17b6\u1793\u17a2\u1780\u17d2\u179f\u179a",
        "\u1019\u103c\u1014\u103a\u1019\u102c\u1018\u102c\u101e\u102c\u1005\u1000\u102c\u1038",
        "\u0f56\u0f7c\u0f51\u0f0b\u0f66\u0f90\u0f51\u0f0b\u0f61\u0f72\u0f42\u0f0b",
    ],
    ids=["Thai", "Lao", "Khmer", "Burmese", "Tibetan"],
)
def test_scripts_without_spaces_are_cut_between_letters(language_model, text):
    _, words = tokenize(language_model.tokenizer, text, [])
    coeng = "\u17d2"  # the next letter stands below
    letters = [i for i, each in enumerate(text) if unicodedata.category(each)[0] != "M" and text[i - 1] != coeng]
    assert [word.start for word in words] == letters
    assert 0 < len(language_model.compress(text, keep=0.5).text) < len(text)


def test_the_shortest_word_stays_at_least(language_model):
    prompt = "unbelievably incomprehensible \n words"
    assert language_model.compress(prompt, keep=1e-9).text.strip() == "words"


@pytest.mark.parametrize("keep", [0.05, 0.5])
def test_keep_words_stay_wherever_they_stand(compressor, keep):
    result = compressor.compress(SENTENCES * 2, keep=keep, keep_words=["the", "keeper", ","])
    for word in (r"\bthe\b", r"\bkeeper\b", ","):
        assert len(re.findall(word, result.text)) == len(re.findall(word, SENTENCES * 2)) > 1


def test_keep_words_are_not_parts_of_words(compressor):
    prompt = "there then lathe other " * 8 + "the end"
    assert "there" in prompt and compressor.compress(prompt, keep=1e-9, keep_words=["the"]).text.split() == ["the"]


@pytest.mark.parametrize("name", ["segments", "chat", "text"])
def test_the_question_stays_where_it_stands_and_comes_nowhere_else(language_model, name):
    for keep in (1e-9, 0.5):
        result = language_model.compress(PROMPTS[name], keep=keep, question=QUESTION)
        assert result.text.count(QUESTION) == (name != "text")


def test_a_question_in_the_middle_of_a_passage_stays_in_it(language_model):
    prompt = SENTENCES + f"The keeper asks: {QUESTION} and sleeps. " + SENTENCES
    assert QUESTION in language_model.compress(prompt, keep=1e-9, question=QUESTION).text
    assert QUESTION not in language_model.compress(prompt, keep=1e-9).text


def test_the_question_steers(language_model):
    found = {language_model.compress(SENTENCES * 4, keep=0.5, question=q).text for q in (None, "Who?", QUESTION)}
    assert len(found) == 3


def test_template_tokens_and_system_messages_stay(language_model):
    chat = PROMPTS["chat"]
    result = language_model.compress(chat, keep=0.4)
    contents = [message["content"] for message in result.messages]
    assert contents[0] == chat[0]["content"]
    assert all(len(short) < len(message["content"]) for short, message in zip(contents[1:], chat[1:]))
    assert [message["role"] for message in result.messages] == [message["role"] for message in chat]
    rendered = language_model.tokenizer.apply_chat_template(result.messages, tokenize=False)
    assert rendered == result.text
    for token in ("<s>", "</s>"):
        assert result.text.count(token) == 3


def test_special_tokens_in_a_text_stay(language_model):
    result = language_model.compress("<s>" + SENTENCES + "</s>", keep=0.01)
    assert result.text.startswith("<s>") and result.text.endswith("</s>") and len(result.positions) < 6


def test_unknown_characters_may_go(token_classifier):
    """They share a token, which is special, and stay only where a text spells it."""
    text = "The river ∀∃ runs ∀∃ past ∀∃ the ∀∃ mill ∀∃ and ∀∃ into the sea ∀∃."
    result = token_classifier.compress(text, tokens=4)
    assert 0 < len(result.token_ids) <= 4
    assert "<unk>" in token_classifier.compress(SENTENCES + "<unk>", keep=0.01).text


def test_a_chat_without_a_template_is_its_contents(token_classifier):
    result = token_classifier.compress(PROMPTS["chat"], keep=0.5)
    assert result.messages[0] == PROMPTS["chat"][0]
    assert result.text == "\n\n".join(message["content"] for message in result.messages)


@pytest.mark.parametrize("stripped", [False, True])
def test_templates_that_strip_contents(language_model, monkeypatch, stripped):
    template = CHAT_TEMPLATE.replace("['content']", "['content'] | trim") if stripped else CHAT_TEMPLATE
    monkeypatch.setattr(language_model.tokenizer, "chat_template", template)
    chat = [{"role": "user", "content": "  the river  runs past the mill  \n"}]
    content = chat[0]["content"].strip() if stripped else chat[0]["content"]
    assert language_model.compress(chat, keep=1.0).messages[0]["content"] == content


def test_a_batch_is_each_prompt_alone(compressor):
    prompts = [PROMPTS["text"], PROMPTS["long"], PROMPTS["demonstrations"], PROMPTS["chat"]]
    assert compressor.compress(prompts, keep=0.5) == [compressor.compress(prompt, keep=0.5) for prompt in prompts]
    chats = [PROMPTS["chat"], PROMPTS["chat"][1:]]
    assert compressor.compress(chats, keep=0.5) == [compressor.compress(prompt, keep=0.5) for prompt in chats]


def test_a_batch_has_a_question_for_each(language_model):
    found = language_model.compress([SENTENCES] * 2, keep=0.5, question=[QUESTION, None])
    assert found == [language_model.compress(SENTENCES, keep=0.5, question=q) for q in (QUESTION, None)]


def test_twice_the_same_and_the_model_as_it_was(compressor):
    compressor.model.train()
    compressor.model.base_model.eval()  # a part of it
    modes = [module.training for module in compressor.model.modules()]
    compressor.model.config.attention_dropout = 0.5
    try:
        found = [compressor.compress(SENTENCES, keep=0.5) for _ in range(3)]
        assert [module.training for module in compressor.model.modules()] == modes
    finally:
        compressor.model.eval()
    assert all(one == other for one, other in itertools.pairwise(found))


def test_reordered_documents_come_by_their_worth(language_model):
    prompt = PROMPTS["segments"]
    given = language_model.compress(prompt, keep=1.0)
    moved = language_model.compress(prompt, keep=1.0, reorder=True)
    assert sorted(moved.positions) == given.positions != moved.positions
    first, *documents, last = moved.text.split("\n\n")
    assert (first, last) == (prompt["instruction"], QUESTION)
    assert sorted(documents) == sorted(prompt["documents"])


def test_documents_that_the_question_follows_from_keep_more(language_model):
    documents = PROMPTS["segments"]["documents"]
    order = language_model.compress(PROMPTS["segments"], keep=1.0, reorder=True).text.split("\n\n")[1:-1]
    for reorder in (False, True):
        result = language_model.compress({"documents": documents, "question": QUESTION}, keep=0.5, reorder=reorder)
        *short, question = result.text.split("\n\n")
        shares = {document: len(kept) / len(document) for document, kept in zip(order if reorder else documents, short)}
        assert question == QUESTION and shares[order[0]] == 1 and shares[order[-1]] < 0.3


def test_a_prompt_that_is_its_question_stays(compressor):
    for prompt in (QUESTION, {"question": QUESTION}):
        assert compressor.compress(prompt, keep=0.1, question=QUESTION).text == QUESTION


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "qwen3_moe"])
def test_other_architectures(name):
    compressor = PromptCompressor(tiny_model(name, vocab_size=300), byte_tokenizer())
    result = compressor.compress(SENTENCES, keep=0.5, question=QUESTION)
    assert 0 < len(result.positions) <= round(0.5 * result.prompt_tokens)


def test_a_tokenizer_without_offsets():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    compressor = PromptCompressor(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    result = compressor.compress(SENTENCES, keep=0.5, keep_words=["keeper"])
    assert tokenizer.decode(result.token_ids) == result.text and "keeper" in result.text
    assert compressor.compress(SENTENCES, keep=1.0).text == SENTENCES


def test_a_pipeline_takes_what_is_left(language_model):
    from transformers import pipeline

    generate = pipeline("text-generation", model=language_model.model, tokenizer=language_model.tokenizer)
    short = language_model.compress(SENTENCES, keep=0.5)
    assert generate(short.text, max_new_tokens=2)[0]["generated_text"].startswith(short.text)
    chat = language_model.compress(PROMPTS["chat"][:2], keep=0.5)
    answer = generate(chat.messages, max_new_tokens=2)[0]["generated_text"]
    assert answer[:-1] == chat.messages and answer[-1]["role"] == "assistant"
