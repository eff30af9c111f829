"""Prompt compression on SmolLM2-135M-Instruct: what a question asks for stays, and the answer with it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import PromptCompressor
from hf_efficient.evaluation import samples


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEEDLES = {"river": "48213", "violin": "90657"}  # key -> value


@pytest.fixture(scope="module")
def compressor(sample_model):
    model = AutoModelForCausalLM.from_pretrained(sample_model, dtype=torch.float32)
    return PromptCompressor(model, AutoTokenizer.from_pretrained(sample_model))


@pytest.fixture(scope="module")
def text():
    sentences = samples.sample_text()[:900].split(". ")
    for place, (key, value) in zip((3, len(sentences) - 3), NEEDLES.items()):
        sentences.insert(place, f"The code of {key} is {value}")
    return ". ".join(sentences)


@torch.no_grad()
def answer_loss(compressor, text: str, question: str, answer: str) -> float:
    """Mean -log p of the answer's tokens, in nats."""
    prompt, tokens = (compressor.tokenizer.encode(part) for part in (f"{text}\n\n{question}", answer))
    logits = compressor.model(torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens)).item()


@pytest.mark.parametrize("key", NEEDLES)
def test_the_answer_to_a_question_survives(compressor, text, key):
    question, value = f"The code of {key} is", NEEDLES[key]
    result = compressor.compress(text, keep=0.5, question=question)
    assert len(result.positions) <= 0.5 * result.prompt_tokens + 1
    assert f"{question} {value}" in result.text
    whole, short, without = (
        answer_loss(compressor, part, question, f" {value}") for part in (text, result.text, text.replace(value, "it"))
    )
    assert short < whole + 0.3 < without - 1  # nats: it measures 0.0, and without the number several


def test_what_can_be_guessed_goes_first(compressor):
    prompt = "One two three four five six seven eight nine ten. Zanzibar exports cloves, said Maria. " * 2
    result = compressor.compress(prompt, tokens=len(compressor.tokenizer.encode(prompt)) // 4)
    assert "Zanzibar" in result.text and "eight" not in result.text
