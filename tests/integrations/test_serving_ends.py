"""How answers of transformers' server end on our attention: their streams, and the reason that they give."""

import json
import time

import pytest
from test_serving_requests import NEW_TOKENS, PROMPTS, answers, asked, folder, pytestmark  # noqa: F401
from transformers import AutoTokenizer


def test_a_stream_that_ends_before_anybody_reads_it(asked, answers, monkeypatch):  # noqa: F811
    """transformers registers who reads the answer after it has added the request: the stream never ended."""
    from transformers.cli.serving import utils

    asked.text(PROMPTS[0])  # the manager runs
    init = utils.CBStreamer.__init__

    def late(self, *args, **kwargs):
        time.sleep(0.3)
        init(self, *args, **kwargs)

    monkeypatch.setattr(utils.CBStreamer, "__init__", late)
    text, why = asked.text(PROMPTS[0], stream=True, max_tokens=1, timeout=20)
    assert why == "length" and text and answers[PROMPTS[0]].startswith(text)
    time.sleep(0.1)
    assert asked.manager.output_router.result_handlers == {} and asked.manager.output_router.output_queue.empty()


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_token_that_is_allowed_may_be_the_end(asked, stream):  # noqa: F811
    """A text that the model ends is not cut off, though no more tokens were allowed."""
    asked.text(PROMPTS[0])
    ids = AutoTokenizer.from_pretrained(asked.model).encode(PROMPTS[0])
    asked.manager.add_request(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens = asked.manager.get_result(timeout=60).generated_tokens
    end = next(index for index in range(2, NEW_TOKENS) if tokens[index] not in tokens[:index])
    for more, expected in ((-1, "length"), (0, "stop"), (1, "stop")):
        config = json.dumps({"do_sample": False, "eos_token_id": tokens[end]})
        extra = dict(extra_body={"generation_config": config}, max_tokens=end + 1 + more)
        assert asked.text(PROMPTS[0], stream=stream, **extra)[1] == expected, more


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tokenizer_that_raises_ends_its_request_alone(asked, streaming):  # noqa: F811
    """It ended the loop, and with it all requests."""

    class Raising:
        def decode(self, tokens, **options):
            raise KeyError("no such token")

    asked.text(PROMPTS[0])
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, streaming=streaming)
    bad = asked.manager.add_request([5, 6, 7], stop_strings="a", tokenizer=Raising(), **options)
    good = asked.manager.add_request([5, 6, 7], **options)
    found = {}
    while len(found) < 2:
        output = asked.manager.get_result(timeout=60)
        if output.is_finished():
            found[output.request_id] = output
    assert found[bad].error == "stop_strings: the tokenizer raised KeyError('no such token')"
    assert found[good].error is None and len(found[good].generated_tokens) == NEW_TOKENS
    assert asked.blocks() == 0
