"""transformers' server on our attention, in this process: each request is answered as it asks, with the text that
`generate()` gives, and a client that leaves frees its pages. With drafts and without."""

import asyncio
import importlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from helpers import byte_level_tokenizer, needs_transformers, tiny_model
from test_serving import ask, free_port, needs_serving
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig

from hf_efficient import WeightOnlyConfig
from hf_efficient.generation.replay.captured_step import CapturedStep
from hf_efficient.integrations import transformers_paged_formats
from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = [
    needs_serving,
    needs_transformers("5.19", "options of requests in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]
PROMPTS = ["The river runs", "the quick", "a b a b a b", "What is\n\n"]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of int4 weights."""
    folder = tmp_path_factory.mktemp("requests")
    tiny_model("llama", eos_token_id=None, max_position_embeddings=1024).save_pretrained(folder / "tiny")
    config = WeightOnlyConfig(bits=4, group_size=32)
    AutoModelForCausalLM.from_pretrained(folder / "tiny", quantization_config=config).save_pretrained(folder / "small")
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "small")
    return folder / "small"


@pytest.fixture(scope="module")
def answers(folder):
    """What `generate()` writes after each prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found[prompt] = tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :], skip_special_tokens=True)
    return found


class Asked:
    """A server in this process, and OpenAI's client of it."""

    def __init__(self, folder):
        import openai
        from transformers.cli.serve import Serve

        port = free_port()
        self.model = str(folder)
        self.server = Serve(
            self.model, continuous_batching=True, attn_implementation="hf-efficient/flash_paged_2", device="cpu",
            cb_num_blocks=64, host="127.0.0.1", port=port, non_blocking=True,
        )  # fmt: skip
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        for _ in range(200):
            try:
                ask(port, "/health")
                break
            except OSError:
                time.sleep(0.05)

    @property
    def manager(self):
        return self.server._generation_state._cb_manager._cb

    def blocks(self) -> int:
        """In use."""
        allocators = self.manager.batch_processor.cache.cache_allocators.values()
        return sum(len(table) for allocator in allocators for table in allocator.block_table.values())

    def chat(self, prompt, client=None, **options):
        messages = [{"role": "user", "content": prompt}]
        options = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "model": self.model} | options
        return (client or self.client).chat.completions.create(messages=messages, **options)

    def text(self, prompt, **options):
        """(text, why it ended), from a stream where the options say so."""
        answer = self.chat(prompt, **options)
        if not options.get("stream"):
            return answer.choices[0].message.content, answer.choices[0].finish_reason
        parts = [part.choices[0] for part in answer]
        return "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason


@pytest.fixture(scope="module", params=[{}, {"prompt_lookup_num_tokens": 4}], ids=["plain", "drafts"])
def asked(folder, request):
    importlib.import_module("transformers.cli.serving.server")  # ours comes with it
    from hf_efficient.integrations import transformers_serving

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_paged_formats, "served_with", request.param)
        patch.setattr(transformers_serving, "FORGOTTEN_AFTER", 0.5)
        asked = Asked(folder)
        yield asked
        asked.server.kill_server()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_after_others_is_answered_as_it_asks(asked, answers, stream):
    """Greedy before, beside and after requests that sample, each in its own way."""
    prompt = PROMPTS[0]
    assert asked.text(prompt, stream=stream) == (answers[prompt], "length")
    with ThreadPoolExecutor(8) as clients:
        options = [dict(temperature=2.0), dict(temperature=0.0)] * 4
        mixed = list(clients.map(lambda own: asked.text(prompt, stream=stream, **own)[0], options))
    assert mixed[1::2] == [answers[prompt]] * 4 and len(set(mixed[::2])) > 1
    assert len({asked.text(prompt, stream=stream, temperature=2.0)[0] for _ in range(4)}) > 1
    few = {asked.text(prompt, stream=stream, temperature=2.0, top_p=1e-6)[0] for _ in range(4)}
    assert few == {answers[prompt]}  # the best token alone is left
    config = json.dumps({"do_sample": True, "top_k": 1, "max_new_tokens": NEW_TOKENS})
    extra = {"generation_config": config}
    assert asked.text(prompt, stream=stream, temperature=3.0, extra_body=extra)[0] == answers[prompt]
    assert asked.text(prompt, stream=stream)[0] == answers[prompt]
    assert asked.manager.continuous_batching_config.prompt_lookup_num_tokens in (None, 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_answer_is_cut_at_its_stop_string(asked, answers, prompt, stream):
    """Where it begins, wherever tokens begin. What only looks like its beginning stays."""
    whole = answers[prompt]
    for at in range(1, len(whole) - 3, 3):
        stop = whole[at : at + 3]
        expected = whole[: whole.index(stop)], "stop"
        assert asked.text(prompt, stream=stream, stop=[stop, "never"]) == expected
        tokens = {"max_tokens": NEW_TOKENS, "extra_body": {"generation_config": json.dumps({"stop_strings": [stop]})}}
        assert asked.text(prompt, stream=stream, **tokens) == expected
    end = whole[-2:]
    cut = whole[: whole.index(end)]
    assert asked.text(prompt, stream=stream, stop=end) == (cut, "stop")
    assert asked.text(prompt, stream=stream, stop=end + "never") == (whole, "length")
    assert asked.blocks() == 0


def test_usage_counts_the_tokens_of_the_text(asked, answers):
    """Streamed or not."""
    whole = answers[PROMPTS[0]]
    for at in range(1, len(whole) - 3, 3):
        options = {"stop": [whole[at : at + 3]]}
        usage = asked.chat(PROMPTS[0], **options).usage
        assert [*asked.chat(PROMPTS[0], stream=True, **options)][-1].usage == usage
        assert usage.completion_tokens < NEW_TOKENS
    assert [*asked.chat(PROMPTS[0], stream=True)][-1].usage.completion_tokens == NEW_TOKENS


def test_a_prompt_holds_no_stop_string(asked, answers):
    """Only what is written counts, as OpenAI has it."""
    prompt = PROMPTS[3]
    assert asked.text(prompt, stop=["\n" + answers[prompt][0]]) == (answers[prompt], "length")
    answer = asked.client.completions.create(model=asked.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0.0)
    assert answer.choices[0].text == answers[prompt]
    stop = answers[prompt][2:5]
    options = dict(model=asked.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0.0, stop=stop)
    answer = asked.client.completions.create(**options)
    expected = answers[prompt][: answers[prompt].index(stop)]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    parts = [part.choices[0] for part in asked.client.completions.create(**options, stream=True)]
    assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (expected, "stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(frequency_penalty=-1.0), "frequency_penalty=-1.0 is not supported"),
        (dict(logit_bias={"5": 2}), "logit_bias={'5': 2} is not supported"),
        (dict(extra_body={"generation_config": '{"repetition_penalty": 0}'}), "repetition_penalty is not supported"),
        (dict(functions=[{"name": "f", "parameters": {}}]), "functions=[{'name': 'f', 'parameters': {}}] is not"),
        (dict(extra_body={"generation_config": '{"min_p": 0.5}'}), "min_p is not supported"),
        (dict(n=2), "n=2 is not supported in continuous batching: allowed is 1"),
        (dict(presence_penalty=1.0), "presence_penalty=1.0 is not supported"),
        (dict(logprobs=True, top_logprobs=2), "logprobs=True is not supported"),
        (dict(tool_choice="required"), "tool_choice='required' is not supported"),
        (dict(temperature=0.0, top_p=2.0), "top_p=2.0: must be"),
        (dict(temperature=-1.0), "temperature=-1.0: must be a number greater than 0"),
        (dict(temperature=1.0, top_p=2.0), "top_p=2.0: must be"),
        (dict(stop=["a", ""]), "none of them empty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_asked_for_in_vain_is_refused_by_name(asked, answers, options, message, stream):
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        asked.chat(PROMPTS[0], stream=stream, **options)
    assert message in str(refused.value.body)
    assert asked.text(PROMPTS[0], frequency_penalty=0.0, logit_bias={})[0] == answers[PROMPTS[0]]
    assert asked.blocks() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1' is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "text={'format': {'type': 'json_object'}} is not supported"),
        ({"background": True}, "background=True is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "holds input_image, and",
        ),
    ],
)
def test_responses_refuse_what_would_be_ignored(asked, answers, options, message):
    import openai

    body = dict(model=asked.model, input=PROMPTS[0], max_output_tokens=NEW_TOKENS, temperature=0.0, stream=False)
    with pytest.raises(openai.BadRequestError) as refused:
        asked.client.responses.create(**body | options)
    assert message in str(refused.value.body)
    plain = {"text": {"format": {"type": "text"}}, "previous_response_id": None, "tool_choice": "auto"}
    assert asked.client.responses.create(**body, **plain).output_text == answers[PROMPTS[0]]
    no_arguments = {"extra_body": {"chat_template_kwargs": None}, "tool_choice": "none"}
    assert asked.text(PROMPTS[0], **no_arguments)[0] == answers[PROMPTS[0]]


def test_what_fails_after_the_answer_is_no_fault_of_the_body():
    serving = importlib.import_module("hf_efficient.integrations.transformers_serving")

    async def fails(handler, body, request_id):
        serving._ANSWERED.set(body["is_answered"])
        raise KeyError("name")

    for is_answered, expected in ((False, ValueError), (True, KeyError)):
        with pytest.raises(expected, match="name"):
            asyncio.run(serving._refusing_nonsense(fails)(None, {"is_answered": is_answered}, "id"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages=[]: must be a list of at least one message"),
        ({"messages": None}, "messages=None"),
        ({"messages": ["hello"]}, "messages holds 'hello': a message is an object with a role"),
        ({"messages": [{"content": "a"}]}, "an object with a role"),
        ({"temperature": "hot"}, "could not convert string to float: 'hot'"),
        ({"max_tokens": "x"}, "'x'"),
        ({"max_tokens": float("inf")}, "a wrong type: OverflowError"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "image_url, and",
        ),
        ({"generation_config": {}}, "an option has a value of a wrong type"),
        ({"generation_config": "no JSON"}, "Expecting value"),
        ({"messages": [{"role": "user", "content": [5]}]}, "the body holds a value of a wrong type: TypeError"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a wrong type: KeyError('text')"),
        ({"logit_bias": [1]}, "a wrong type: AttributeError"),
        ({"generation_config": '{"eos_token_id": "a"}'}, "a wrong type: TypeError"),
        ({"chat_template_kwargs": 5}, "a wrong type: TypeError"),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'} is not supported"),
        (
            {"messages": [{"role": "user", "content": "a" * 2**15}]},
            "32768 tokens does not fit: all pages together hold",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_makes_no_sense_is_refused(asked, body, message, stream):
    body = {"model": asked.model, "messages": [{"role": "user", "content": "a"}], "stream": stream} | body
    text, kind = json.dumps(body), {"Content-Type": "application/json"}  # requests itself refuses infinity
    answer = requests.post(f"{asked.client.base_url}chat/completions", data=text, headers=kind, timeout=30)
    assert (answer.status_code, message in answer.json()["detail"]) == (400, True), answer.text
    assert asked.blocks() == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "message"), [({"suffix": 5}, "suffix=5: must be a string"), ({"logit_bias": {"5": 2}}, "logit_bias={")]
)
def test_completions_refuse_what_fails_after_the_answer_or_is_ignored(asked, options, message, stream):
    body = dict(model=asked.model, prompt=PROMPTS[0], max_tokens=NEW_TOKENS, stream=stream) | options
    answer = requests.post(f"{asked.client.base_url}completions", json=body, timeout=30)
    assert (answer.status_code, message in answer.json()["detail"]) == (400, True), answer.text
    assert asked.blocks() == 0


def test_a_conversation_may_hold_an_answer_as_clients_dump_it(asked):
    """With null for what it does not have, such as tool calls."""
    first = {"role": "user", "content": PROMPTS[0]}
    answer = asked.chat(PROMPTS[0]).choices[0].message.model_dump()
    assert answer["tool_calls"] is None
    options = dict(model=asked.model, max_tokens=NEW_TOKENS, temperature=0.0)
    again = asked.client.chat.completions.create(messages=[first, answer, first], **options)
    assert again.choices[0].message.content


def test_the_model_that_is_served_is_listed(asked):
    """Without a cache of the Hub, too."""
    assert [model.id for model in asked.client.models.list()] == [asked.model]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_where_the_pages_do_is_cut_off(asked, answers, stream, monkeypatch):
    asked.text(PROMPTS[0])
    prompt = len(AutoTokenizer.from_pretrained(asked.model).encode(PROMPTS[0]))
    monkeypatch.setattr(asked.manager.batch_processor.cache, "_hf_efficient_longest", (prompt + 4, "few"))
    text, why = asked.text(PROMPTS[0], stream=stream)
    assert why == "length" and text and answers[PROMPTS[0]].startswith(text) and text != answers[PROMPTS[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_may_choose_the_same_id(asked, answers, stream):
    """Each gets its own answer, under the id that it chose."""
    with ThreadPoolExecutor(4) as clients:
        same = dict(extra_headers={"x-request-id": "same"}, stream=stream)
        found = list(clients.map(lambda prompt: asked.text(prompt, **same)[0], PROMPTS))
    assert found == [answers[prompt] for prompt in PROMPTS]
    assert asked.chat(PROMPTS[0], extra_headers={"x-request-id": "same"}).id == "same"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(asked, stream, monkeypatch):
    """At once: its answer would take half a minute. Nor is its handler kept."""
    import openai

    asked.text(PROMPTS[0])
    original = CapturedStep.__call__
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, *args: time.sleep(0.05) or original(self, *args))
    options = dict(max_tokens=600, temperature=1.0)
    if stream:
        answer = asked.chat(PROMPTS[1], stream=True, **options)
        next(part for part in answer if part.choices[0].delta.content)
        assert asked.blocks() > 0
        answer.close()
    else:
        hasty = asked.client.with_options(timeout=1.0)
        with pytest.raises(openai.APITimeoutError):
            asked.chat(PROMPTS[1], client=hasty, **options)
    start = time.monotonic()
    while asked.blocks() or asked.manager.batch_processor.has_pending_requests():
        time.sleep(0.02)
        assert time.monotonic() - start < 5
    time.sleep(1.0)
    assert asked.manager.output_router.result_handlers == {} and asked.manager.output_router.output_queue.empty()


ENDS = """
import sys
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig
from transformers.cli.serving import server, utils
import hf_efficient
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="flash_paged")
served = utils.CBGenerateManager(ContinuousBatchingConfig(num_blocks=8))
served.init_cb(model, model.generation_config)
served._cb.add_request([5, 6], max_new_tokens=2)
assert len(served._cb.get_result(timeout=60).generated_tokens) == 2
if sys.argv[2] == "stopped":
    served._cb.stop(block=True)
print("ends", flush=True)
"""


@pytest.mark.parametrize("manager", ["running", "stopped"])
def test_a_process_does_not_wait_for_its_manager(folder, manager):
    """After a second Ctrl-C nobody stops the manager. Its thread, which is no daemon, kept the process for ever."""
    command = [sys.executable, "-c", ENDS, folder, manager]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout == "ends\n" and done.returncode == 0, done.stderr
    assert "not started" not in done.stderr


def test_models_with_other_attention_stay_transformers(folder):
    """Nobody asked for this package: what reaches their manager is what transformers' server hands on."""
    from transformers.cli.serving import utils

    model, seen = tiny_model("llama", eos_token_id=2), []
    # by default transformers' pages take most of the memory that is free
    manager = utils.CBGenerateManager(ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64))
    manager.init_cb(model, model.generation_config)
    try:
        assert not manager._cb.continuous_batching_config.per_request_processors
        manager._cb.add_request = lambda *args, **kwargs: seen.append(kwargs) or "name"
        import asyncio

        async def ask():
            config = model.generation_config
            config.temperature, config.stop_strings = 0.5, ["a"]
            manager.generate_streaming(model, byte_level_tokenizer(), {"input_ids": [5, 6]}, config, "name")

        asyncio.run(ask())
    finally:
        manager.stop()
    assert set(seen[0]) == {"request_id", "streaming", "max_new_tokens", "eos_token_id"}
