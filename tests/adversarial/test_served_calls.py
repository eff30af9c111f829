"""Which calls the native loop takes: what keeps it equal to transformers must not quietly end it."""

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch
from native_loop import NATIVE_LOOP, noted_answers, served_model
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer


pytestmark = NATIVE_LOOP


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


class Same(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


ROW, BATCH = left_padded_batch((6,)), left_padded_batch((5, 9, 8))
SERVED = {
    "greedy": ROW,
    "without a mask": {"input_ids": ROW["input_ids"]},
    "batch padded at the left": BATCH,
    "sampled": dict(**BATCH, do_sample=True, top_k=5),
    "ends": dict(**BATCH, eos_token_id=[2, 5, 6]),
    "processors": dict(**BATCH, repetition_penalty=1.3, no_repeat_ngram_size=2),
    "a processor of the user's": dict(**BATCH, logits_processor=[Same()]),
    "streamed": dict(**ROW, streamer=Silent()),
    "dictionary": dict(**ROW, return_dict_in_generate=True, output_scores=True),
    "dictionary of a batch": dict(**BATCH, return_dict_in_generate=True, eos_token_id=[2, 5, 6]),
    "several answers": dict(**ROW, do_sample=True, num_return_sequences=2),
    "at least": dict(**ROW, min_new_tokens=2),
    "the usual positions": dict(**ROW, position_ids=torch.arange(6)[None]),
    "prompt in parts": dict(**ROW, prefill_chunk_size=3),
    "32 bits": dict(input_ids=ROW["input_ids"].int()),
}
LEFT = {
    "padding at the right": {name: x.flip(1) for name, x in BATCH.items()},
    "other positions": dict(**ROW, position_ids=torch.arange(3, 9)[None]),
    "beams": dict(**ROW, num_beams=2),
    "hidden states": dict(**ROW, return_dict_in_generate=True, output_hidden_states=True),
}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_served_calls(name, monkeypatch):
    model, answers = served_model(name), noted_answers(monkeypatch)
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    again = {call: SERVED[call] for call in ("greedy", "batch padded at the left", "dictionary of a batch")}
    for calls, expected in ((SERVED, True), (LEFT, False), (again, True)):
        for call, inputs in calls.items():
            answers.clear()
            model.generate(**{**options, **inputs})
            assert any(answers) == expected, call
