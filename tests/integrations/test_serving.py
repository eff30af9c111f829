"""`transformers serve` on loopback with a model that was compressed here and flash_paged, with and without continuous
batching."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.import_utils import is_serve_available

from hf_efficient import WeightOnlyConfig


PROMPT = "The river runs"


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


@pytest.mark.slow
@pytest.mark.skipif(not is_serve_available(), reason="needs fastapi, uvicorn and what else `transformers serve` does")
def test_serve_on_loopback(folder, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from hf_efficient.cli import main; sys.exit(main())", "exec"]
    command += ["transformers", "serve", str(folder), "--attn-implementation", "hf-efficient/flash_paged_2"]
    command += ["--continuous-batching", "--cb-num-blocks", "16", "--cb-max-batch-tokens", "64", "--device", "cpu"]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    try:
        for _ in range(1200):
            try:
                ask(port, "/health")
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(0.1)
        else:
            pytest.fail("the server did not start in two minutes: " + (tmp_path / "log").read_text()[-4000:])
        body = {"model": str(folder), "temperature": 0.0, "max_tokens": 6}
        chat = ask(port, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": PROMPT}]})
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}: {error.read()[:2000]} {(tmp_path / 'log').read_text()[-3000:]}")
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = tiny_tokenizer()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert chat["choices"][0]["message"]["content"].strip() == answer.strip()


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
