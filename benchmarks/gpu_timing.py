"""What the benchmarks of GPU kernels share: timing by CUDA graph replay, the limits of the machine, and the record.

Every case of ours is first checked against the reference. It is timed by replaying a CUDA graph of calls that rotate
over copies of random data of more than 200 MB together, so that nothing is found in the L2 cache. Times are the median,
the smallest and the largest of 15 replays, in microseconds per call. The same run measures the limits to compare GB/s
and TFLOP/s with. They are the bandwidth of a device copy (bytes read plus written; the driver's or a kernel's, which is
faster) and the rate of a bf16 matrix product 8192^3. A case that fails or is wrong is in the record as such.

Each line is appended to a `.jsonl` file as it comes, which the record replaces at the end. `--seconds N` begins no case
after N seconds, and `--only PATTERN` runs those cases whose names match the regular expression. Behind such a run, and
behind one that was killed, the next goes on after what was measured. All our kernels come before the first peer.
`--compile I/N` in N processes at once fills Triton's cache before.

`--tiny` runs the same code on small sizes under the Triton interpreter where there is no GPU: it tests the script, its
times mean nothing, and the record says so.
"""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

import harness
import torch

from hf_efficient.evaluation import environment
from hf_efficient.kernels import efficient_linear, flash_paged
from hf_efficient.kernels.replay.cuda_graph import COUNTERS


sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import interpreter  # noqa: E402


ROTATE_BYTES = 200e6  # of data that the calls rotate over: more than any L2 cache
REPLAYS = 15


class Benchmark:
    """One run: `record` its cases, then `finish` with the goals."""

    def __init__(self, name: str, doc: str, arguments: list[str] | None = None):
        parser = harness.parser(doc, f"gpu_{name}.json")
        parser.add_argument("--quick", action="store_true", help="one shape of each kind")
        parser.add_argument(
            "--tiny", action="store_true", help="small sizes under TRITON_INTERPRET=1: tests the script"
        )
        parser.add_argument("--only", default="", help="regular expression that the names of cases contain")
        parser.add_argument(
            "--compile", metavar="I/N", help="call every N-th case of ours from the I-th on once, and measure nothing"
        )
        parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
        options = parser.parse_args(arguments)
        self._only, self._end = re.compile(options.only), time.monotonic() + options.seconds
        self._is_partial = bool(options.only)  # whether cases are missing
        self.quick, self.tiny, self.output = options.quick, options.tiny, options.output
        if not self.tiny:
            harness.need_gpu(name)
        elif os.environ.get("TRITON_INTERPRET") == "1":  # tests that call no kernel run where others are compiled
            interpreter.speed_up()
        self.device = "cpu" if self.tiny else "cuda"
        self.dtype = torch.float16 if self.tiny else torch.bfloat16  # the interpreter's bf16 products are wrong
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.lines = self.output.with_suffix(".jsonl")
        self.results = self._measured_before()
        self.ours: bool | None = None  # whose cases `turns` runs now
        self._part, self._parts = (int(x) for x in options.compile.split("/")) if options.compile else (0, 0)
        self._seen = 0
        torch.manual_seed(0)
        if self._parts:
            return
        self.limits = self._limits()
        print({key: round(value, 3) for key, value in self.limits.items()}, flush=True)

    def _measured_before(self) -> list[dict]:
        """The right lines of a run that did not end, and of the record of one that left cases out."""
        record = harness.read(self.output, {})
        lines = [] if record.get("complete", True) else record["results"]
        if self.lines.is_file():
            lines += [json.loads(line) for line in self.lines.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if "us" in line and line.get("correct", True)]

    def turns(self):
        """Two turns over the same cases, with `ours` True and then False: only ours are run, and then only the
        peers."""
        for ours in (True,) if self._parts else (True, False):
            self.ours = ours
            yield ours

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def copies_of(self, bytes_each: float) -> int:
        return 2 if self.tiny or self._parts else max(2, int(ROTATE_BYTES // bytes_each) + 1)

    def time(self, call, variants: int) -> dict:
        """call(i) for i in range(variants), in turn -> microseconds a call {median, min, max}."""
        if self.tiny:
            start = time.perf_counter()
            call(0)
            return harness.spread([(time.perf_counter() - start) * 1e6])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(min(3, variants)):
                call(i)
        torch.cuda.current_stream().wait_stream(stream)
        order = [i % variants for i in range(max(variants, 20))]
        graph = torch.cuda.CUDAGraph()
        # as in captured forwards, whose graph owns the counters: else each kernel that splits its work is cleared first
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)
        with efficient_linear.counters_in(counters), flash_paged.counters_in(counters), torch.cuda.graph(graph):
            for i in order:
                call(i)
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(order))
        return harness.spread(times)

    def _limits(self) -> dict:
        """Device copy in GB/s (read plus written) and the matrix product in TFLOP/s."""
        size, side = (2**16, 64) if self.tiny else (2**30, 8192)
        source = self.random(size // 2)
        target = torch.empty_like(source)
        # in a graph the driver's copy reaches two thirds of what a kernel does (H200)
        copies = (lambda i: target.copy_(source)), (lambda i: torch.neg(source, out=target))
        copy = min(self.time(call, 2)["median"] for call in copies)
        a, b = self.random(side, side), self.random(side, side)
        product = self.time(lambda i: a @ b, 2)["median"]
        return {"copy_gb_s": 2 * size / copy / 1e3, "matmul_tflop_s": 2 * side**3 / product / 1e6}

    def record(self, case: dict, call, variants: int, bytes_: float, flops: float, check=None, allowed=1e-2) -> dict:
        """Checks (`check()` is the error against the reference; peers have none) and times one case, prints and appends
        it. `case` names the kernel and everything that was varied."""
        line = dict(case)
        name = " ".join(str(value) for value in case.values())
        if not self.wants(case):
            return line
        if self._parts:
            self._seen += 1
            if self._seen % self._parts == self._part:
                with contextlib.suppress(Exception):  # the run that measures says what
                    call(0)
            return line
        try:
            if check is not None:
                line["error"] = check()
                line["correct"] = line["error"] <= allowed
            line["us"] = self.time(call, variants)
            line["gb_s"], line["tflop_s"] = bytes_ / line["us"]["median"] / 1e3, flops / line["us"]["median"] / 1e6
            line["of_copy"] = line["gb_s"] / self.limits["copy_gb_s"]
            line["of_matmul"] = line["tflop_s"] / self.limits["matmul_tflop_s"]
            text = f"{line['us']['median']:9.1f} us {line['gb_s']:7.0f} GB/s {line['tflop_s']:6.1f} TFLOP/s"
            if check is not None:
                text += f"  error {line['error']:.1e}{'' if line['correct'] else '  WRONG'}"
        except Exception as reason:  # a peer that does not take this shape, or a kernel of ours that fails
            line["failed"] = text = f"{type(reason).__name__}: {str(reason)[:200]}"
        self.append(line)
        print(f"{name:72s} {text}", flush=True)
        return line

    def wants(self, case: dict) -> bool:
        """Whether the case is to be run: it was not measured before, is named by `--only`, and there is time."""
        if any(all(old.get(key) == case[key] for key in case) for old in self.results):
            return False
        if self.ours is not None and case["ours"] != self.ours:
            return False
        if not self._only.search(" ".join(str(value) for value in case.values())) or time.monotonic() > self._end:
            self._is_partial = True
            return False
        return True

    def append(self, line: dict) -> None:
        self.results.append(line)
        with self.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def attempt(self, kernel: str, ours: bool):
        """What fails before there is anything to time is recorded too, and the run goes on."""
        try:
            yield
        except Exception as reason:
            if self._parts:
                return
            self.append(dict(kernel=kernel, ours=ours, failed=f"{type(reason).__name__}: {str(reason)[:200]}"))
            print(f"{kernel}: {self.results[-1]['failed']}", flush=True)

    def find(self, **case) -> list[dict]:
        """The measured lines, right ones if they are ours, that agree with `case`."""
        return [
            line
            for line in self.results
            if "us" in line and line.get("correct", True) and all(line.get(key) == case[key] for key in case)
        ]

    def finish(self, goals: list[tuple]) -> int:
        """Writes the record; goals as in `harness.goals`. Returns the exit status: 1 when a kernel of ours failed or
        was wrong."""
        if self._parts:
            return 0
        wrong = [line for line in self.results if line["ours"] and ("failed" in line or not line.get("correct", True))]
        goals = [goal | {"without_cases_that_failed": len(wrong)} for goal in harness.goals(goals, not self.tiny)]
        harness.print_goals(goals)
        report = {"environment": environment.describe(), "limits": self.limits, "goals": goals, "results": self.results}
        if self.tiny:
            report["warning"] = "tiny sizes under the Triton interpreter: no time here means anything"
        report["complete"] = not self._is_partial
        harness.write(self.output, report)
        self.lines.unlink(missing_ok=True)  # its lines stand in the record
        print(f"written to {self.output}{'' if report['complete'] else ', not complete: run it again to go on'}")
        return int(bool(wrong))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of the expected values; infinite when something is not finite."""
    if not torch.isfinite(actual).all():
        return float("inf")
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def lowest(lines: list[dict], key: str) -> float | None:
    return min((line[key] for line in lines), default=None)


def speedup(lines: list[dict], others: list[dict], same: tuple[str, ...]) -> float | None:
    """The smallest ratio of the others' time to ours over the cases that agree in `same`."""
    times = {tuple(line[key] for key in same): line["us"]["median"] for line in others}
    ratios = [times[at] / line["us"]["median"] for line in lines if (at := tuple(line[key] for key in same)) in times]
    return min(ratios, default=None)
