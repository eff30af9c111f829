"""What reading prompts on a CPU takes in memory: parts within a budget, captures without all their results at once,
and no more pages than a forward of all prompts would write."""

import copy
import sys
from pathlib import Path

import fresh_processes
import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch
from native_loop import NATIVE_LOOP, served_model, transformers_loop

from hf_efficient.cache.stats import written_bytes
from hf_efficient.evaluation import memory
from hf_efficient.generation import model_state, prompt_reading
from hf_efficient.kernels.replay import memory as replay_memory
from hf_efficient.kernels.replay.recorder import Capture


pytestmark = NATIVE_LOOP
OPTIONS = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None)
RESETS_PEAKS = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is reset by Linux alone")
WIDE = dict(hidden_size=64, intermediate_size=4096, num_hidden_layers=8)


def taken(call) -> int:
    """The most bytes that the process held in `call` beyond those it held before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory.peak_memory_bytes(torch.device("cpu"))
    call()
    return memory.peak_memory_bytes(torch.device("cpu")) - before


@pytest.fixture
def parts(monkeypatch):
    """(sequences, columns) of each forward of prompts."""
    shapes, prefill = [], prompt_reading.prefill

    def noted(model, input_ids, config, kwargs):
        rows, columns = input_ids.shape
        size = config.prefill_chunk_size or columns
        shapes.extend((rows, min(size, columns - first)) for first in range(0, columns, size))
        return prefill(model, input_ids, config, kwargs)

    monkeypatch.setattr(prompt_reading, "prefill", noted)
    return shapes


@pytest.mark.parametrize("name", TINY_MODELS)
def test_wide_prompts_are_read_in_parts_with_the_same_tokens(name, parts, monkeypatch):
    monkeypatch.setattr(prompt_reading, "tokens_within_budget", lambda model: 40)
    monkeypatch.setattr(prompt_reading, "LEAST_COLUMNS", 4)
    model, drops = served_model(name), name in ("mistral", "gemma2", "gemma3", "gpt_oss")
    for lengths in ((90,), (23, 4, 40, 16), (30, 30, 30)):
        batch = left_padded_batch(lengths)
        given = copy.deepcopy(batch)
        with transformers_loop():
            expected = model.generate(**batch, **OPTIONS)
        parts.clear()
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
        assert all(torch.equal(batch[key], given[key]) for key in batch)
        assert parts and (drops or max(rows * columns for rows, columns in parts) <= 40), parts
        assert sum(rows * columns for rows, columns in parts) <= len(lengths) * max(lengths)


def taken_by_wide_prompts() -> int:
    """Bytes that four prompts of 1,024 tokens take."""
    model, batch = served_model("llama", **WIDE), left_padded_batch((1024,) * 4)
    model.generate(**left_padded_batch((8,)), **OPTIONS)
    return taken(lambda: model.generate(**batch, **OPTIONS))


@RESETS_PEAKS
def test_activations_of_wide_prompts_stay_within_their_budget():
    here = Path(__file__).resolve().parent
    code = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]}; import test_prompt_memory as tests"
    done = fresh_processes.run(["-c", f"{code}; print(tests.taken_by_wide_prompts())"], check=True)  # of one process
    widest = 4 * 1024 * WIDE["intermediate_size"] * 4  # bytes of one result of all prompts; a layer has four at once
    assert int(done.stdout.split()[-1]) < widest < 2.1 * prompt_reading.ACTIVATION_BYTES


@RESETS_PEAKS
def test_a_capture_does_not_hold_all_its_results(monkeypatch):
    drop, given_back = replay_memory.drop_pages, []
    monkeypatch.setattr(replay_memory, "drop_pages", lambda *pages: given_back.append(drop(*pages)))
    x, captures = torch.randn(128, 4096), []

    def forward():
        y = x
        for _ in range(40):
            y = (y * 0.5 + x).abs()
        return y

    most = taken(lambda: captures.append(Capture(forward)))
    assert most < 20 * x.nbytes and sum(given_back) > 100 * x.nbytes, "of 120 results"
    for _ in range(2):
        x.copy_(torch.randn(128, 4096))
        torch.testing.assert_close(captures[0].replay(), forward())


def test_prompts_that_are_replayed_write_the_pages_of_the_first_forward():
    model, batch, written = served_model("llama"), left_padded_batch((200, 170, 120)), []
    for _ in range(3):
        model.generate(**batch, **OPTIONS)
        (entry,) = model_state.current(model).pool.entries
        written.append(written_bytes(entry.cache))
    assert len(set(written)) == 1, "the second call replays each prompt apart"
