"""`hf-efficient serve` on loopback with a model that was compressed here, asked by hand and by OpenAI's client."""

import contextlib
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import fresh_processes
import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.import_utils import is_serve_available

from hf_efficient import WeightOnlyConfig
from hf_efficient.cli import serve
from hf_efficient.integrations import transformers_releases


PROMPT = "The river runs"
needs_serving = pytest.mark.skipif(
    not is_serve_available() or not transformers_releases.has("5.17"),
    reason="needs fastapi, uvicorn and what else `transformers serve` does"
    if transformers_releases.has("5.17")
    else "serve needs transformers 5.17",
)


def test_the_oldest_release_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(transformers_releases, "version", lambda: "5.16.1")
    monkeypatch.setattr(transformers_releases, "has", lambda release: False)
    with pytest.raises(ValueError, match="serve needs transformers 5.17 or later; installed is 5.16.1"):
        serve._check_installed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    tiny_model("llama", eos_token_id=None).save_pretrained(folder / "tiny")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "tiny", quantization_config=WeightOnlyConfig(bits=4, group_size=32)
    )
    model.save_pretrained(folder / "small")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "small")
    return folder / "small"


def ask(port: int, path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"} if data else {}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


SERVER = """
import os, sys
if server := os.fork():
    print(server, flush=True)
    os._exit(0)
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(log, 1), os.dup2(log, 2)
del sys.argv[1]
from hf_efficient.cli import main
sys.exit(main())
"""


def is_answered(port: int) -> bool:
    try:
        return bool(ask(port, "/health"))
    except (urllib.error.URLError, ConnectionError):
        return False


def wait_for(what) -> bool:
    """Whether it came true within two minutes."""
    return any(what() or time.sleep(0.1) for _ in range(1200))


@contextlib.contextmanager
def serving(folder, port: int, log):
    """`hf-efficient serve` of `folder`, ready to answer. log: the file that it writes to."""
    arguments = ["serve", folder, "--host", "127.0.0.1", "--port", port, "--sequences", "8", "--context", "256"]
    process = int(fresh_processes.run(["-c", SERVER, log, *arguments], check=True).stdout)
    try:
        assert wait_for(lambda: is_answered(port)), "the server did not start: " + log.read_text()[-4000:]
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
            wait_for(lambda: not is_answered(port)) or os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """The port of a server, and its log."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "log"
    with serving(folder, port, log):
        yield port, log


def expected_answer(folder, prompt: str, tokens: int) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
@needs_serving
def test_serve_on_loopback(folder, server):
    port, log = server
    body = {"model": str(folder), "temperature": 0.0, "max_tokens": 6}
    try:
        chat = ask(port, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": PROMPT}]})
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}: {error.read()[:2000]} {log.read_text()[-3000:]}")
    answer = chat["choices"][0]["message"]["content"]
    assert answer.strip() == expected_answer(folder, PROMPT, 6).strip()
    text = log.read_text()
    assert f"http://127.0.0.1:{port}" in text and "8 sequences of 256 tokens" in text


@pytest.mark.slow
@needs_serving
def test_openai_client(folder, server):
    """Chat, streams, many clients at once, stop strings, one that leaves in the middle, and requests that make no
    sense. `test_serving_requests.py` has more, in one process."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server[0]}/v1", api_key="none", max_retries=0, timeout=120)

    def chat(prompt, **options):
        messages = [{"role": "user", "content": prompt}]
        options = {"max_tokens": 6, "temperature": 0.0, **options}
        return client.chat.completions.create(model=str(folder), messages=messages, **options)

    prompts = [f"{PROMPT} {index}" for index in range(6)]
    expected = [expected_answer(folder, prompt, 6).strip() for prompt in prompts]
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda prompt: chat(prompt).choices[0].message.content.strip(), prompts))
    assert answers == expected
    parts = [part.choices[0].delta.content or "" for part in chat(prompts[0], stream=True) if part.choices]
    assert "".join(parts).strip() == expected[0] and len([part for part in parts if part]) > 1
    if transformers_releases.has("5.19"):
        stop = expected[0][2:5]
        cut = chat(prompts[0], stop=stop).choices[0]
        assert (cut.message.content, cut.finish_reason) == (expected[0][: expected[0].index(stop)], "stop")
    leaving = chat(PROMPT, stream=True, max_tokens=200)
    next(iter(leaving))
    leaving.close()
    for bad in (dict(max_tokens="many"), dict(model="no/such-model"), dict(messages="hello")):
        with pytest.raises(openai.APIError):  # transformers closes the connection for some
            client.chat.completions.create(
                **{"model": str(folder), "messages": [{"role": "user", "content": "a"}], **bad}
            )
    client = openai.OpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=120)  # a new connection
    assert chat(prompts[1]).choices[0].message.content.strip() == expected[1]


@pytest.mark.slow
@needs_serving
def test_requests_that_cannot_be_run_fail_alone(folder, server):
    """An empty prompt, and one that all pages together could not hold. The next one is answered."""
    port, _ = server
    body = {"model": str(folder), "temperature": 0.0, "max_tokens": 6}
    for prompt in ("", PROMPT * 2000):
        with pytest.raises(urllib.error.HTTPError):
            ask(port, "/v1/completions", {**body, "prompt": prompt})
    answer = ask(port, "/v1/completions", {**body, "prompt": PROMPT})["choices"][0]["text"]
    assert answer.strip() == expected_answer(folder, PROMPT, 6).strip()


def asked(prompt: str) -> list[dict]:
    return [{"role": "user", "content": prompt}]


@pytest.mark.slow
@needs_serving
@pytest.mark.timeout(600)
def test_a_real_model_before_and_after_a_restart(sample_model, tmp_path):
    """int4 SmolLM2 in float32, streamed to three clients of OpenAI's at once: the text of `generate`. Then on the same
    port."""
    openai = pytest.importorskip("openai")
    config, tokenizer = WeightOnlyConfig(bits=4, method="rtn"), AutoTokenizer.from_pretrained(sample_model)
    model = AutoModelForCausalLM.from_pretrained(sample_model, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(tmp_path / "int4")
    tokenizer.save_pretrained(tmp_path / "int4")
    prompts, expected = ["Name three rivers of Europe.", "What is 2 plus 2?", "Write a line about the sea."], []
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            asked(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(output, skip_special_tokens=True))
    port = free_port()
    for run in range(2):
        with serving(tmp_path / "int4", port, tmp_path / f"log{run}"), ThreadPoolExecutor(3) as clients:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)

            def streamed(prompt, client=client):
                options = dict(model=str(tmp_path / "int4"), temperature=0.0, max_tokens=12, stream=True)
                parts = client.chat.completions.create(messages=asked(prompt), **options)
                return "".join(part.choices[0].delta.content or "" for part in parts)

            assert list(clients.map(streamed, prompts[run:])) == expected[run:]


def test_generate_batch(folder):
    from transformers import ContinuousBatchingConfig

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_paged")
    rows = [list(range(3, 3 + length)) for length in (5, 11, 8)]
    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    answers = model.generate_batch(
        rows,
        generation_config=greedy,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    )
    for row, answer in zip(rows, answers.values()):
        alone = model.generate(torch.tensor([row]), generation_config=greedy)
        assert answer.generated_tokens == alone[0, len(row) :].tolist()
