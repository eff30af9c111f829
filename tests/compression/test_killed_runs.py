"""A compression from disk to disk that is killed: the same call goes on to the bits of a run in one go.

`python tests/compression/test_killed_runs.py 20` does so for 20 seeds, with three kills each."""

import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import pytest


sys.path.append(str(Path(__file__).parents[1]))  # for the command above; pytest has it already

BLOCKS, KILLS = 4, 3
SIZES = dict(num_hidden_layers=BLOCKS, hidden_size=32, intermediate_size=32, num_attention_heads=2)
RUNS = {  # architecture -> what the run compresses it to
    "llama": dict(bits=4, group_size=16, method="gptq", refine=True),
    "mixtral": dict(bits=4, group_size=32, method="awq"),
}


class CallsAfterShard:
    """Counts the calls and returns of this process, those of C functions included, after it renamed its first shard,
    and sends itself SIGKILL when they are `most`."""

    def __init__(self, most: int | None):
        self.most, self.count, self.before_next = most, 0, None
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if event != "os.rename" or not Path(os.fsdecode(arguments[1])).match("checkpoint/model-*-of-*.safetensors"):
            return
        if sys.getprofile() is None:
            sys.setprofile(self.see)
        elif self.before_next is None:
            self.before_next = self.count

    def see(self, frame, event: str, argument) -> None:
        self.count += 1
        if self.count == self.most:
            os.kill(os.getpid(), signal.SIGKILL)


def compress(name: str, model: Path, output: Path) -> None:
    import torch

    from hf_efficient import CalibrationConfig, WeightOnlyConfig, compress_on_disk

    tokens = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    config = WeightOnlyConfig(**RUNS[name], calibration=CalibrationConfig(tokens=tokens, batch_size=2))
    compress_on_disk(model, output, config, memory="2GB", say=lambda text: None)


def in_a_child(call) -> int:
    """The status of a forked process that calls `call`, as of `os.waitpid`."""
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def written(output: Path) -> dict[str, int]:
    """Block -> the time of its shard, of the blocks that the progress of a run names."""
    folder = output.with_name(f".{output.name}.compressing")
    done = json.loads((folder / "progress.json").read_text())["written"] if (folder / "progress.json").exists() else []
    shard = "checkpoint/model-{:05}-of-{:05}.safetensors"
    return {n: (folder / shard.format(int(n.split(".")[-1]) + 2, BLOCKS + 1)).stat().st_mtime_ns for n in done}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def kill(name: str, seeds: int, scratch: Path) -> None:
    """Compresses a model in one go, and once for each seed with three kills; raises AssertionError where bits differ.
    Prints how many blocks were done at each kill, a line a seed."""
    import torch
    import transformers
    from helpers import save_tiny

    import hf_efficient.compression.disk_to_disk  # noqa: F401 (the children have it)

    torch.set_num_threads(1)  # a forked process has no other threads, and would wait for them forever
    transformers.logging.disable_progress_bar()
    model, whole, output = scratch / "model", scratch / "whole", scratch / "killed"
    save_tiny(model, name, **SIZES, **({"num_local_experts": 2} if name == "mixtral" else {}))

    def in_one_go():
        calls = CallsAfterShard(None)
        compress(name, model, whole)
        (scratch / "calls").write_text(str(calls.before_next))

    assert in_a_child(in_one_go) == 0
    calls = int((scratch / "calls").read_text())  # from one shard to the next
    for seed in range(seeds):
        moments, done = random.Random(f"{name} {seed}"), {}
        for most in [moments.randint(1, calls) for _ in range(KILLS)]:

            def killed(most=most):
                CallsAfterShard(most)
                compress(name, model, output)

            assert in_a_child(killed) == signal.SIGKILL and not output.exists()
            before, done = done, written(output)
            assert before.items() <= done.items(), "a block was compressed twice"
            assert len(done) < BLOCKS, "nothing was left to go on with"
            print(len(done), end=" ", flush=True)
        assert in_a_child(lambda: compress(name, model, output)) == 0
        assert contents(output) == contents(whole)
        assert not list(scratch.glob(".*")), "progress is left"
        print()
        for path in output.iterdir():
            path.unlink()
        output.rmdir()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_killed_three_times_it_ends_with_the_same_bits():
    import fresh_processes

    ran = fresh_processes.run([__file__, "1"], timeout=120)
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [[int(count) for count in line.split()] for line in ran.stdout.splitlines()]
    assert [len(done) for done in lines] == [KILLS] * len(RUNS)
    assert all(done[0] < done[-1] for done in lines), lines  # they had gone on between the kills


if __name__ == "__main__":
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        for each in RUNS:
            kill(each, int(sys.argv[1]), Path(tempfile.mkdtemp(dir=scratch)))
