"""Runs transformers' own tests with and without hf_efficient, and reports what differs.

The tests come with transformers' repository, not with its wheel. Take the commit or tag nearest to the installed
release (any clone of the repository serves) and unpack its tests outside this one:

    mkdir /tmp/upstream git -C transformers archive <tag> tests conftest.py pyproject.toml | tar x -C /tmp/upstream
    .venv/bin/pip install parameterized timeout_decorator sentencepiece datasets httpx requests scipy .venv/bin/python
    tests/upstream/run.py /tmp/upstream --modes import forced twins --targets llama gpt2 generation

A name of transformers' that the installed release lacks skips what calls it. A constant has to be written into the
tests: for 5.24 `_TEXT_MODEL_TESTER_DEFAULTS`, which is gone from `transformers.testing_utils`.

Modes:
    import: `import hf_efficient` comes first, and nothing else changes.
    forced: models generate with this package's loop and attend with "flash_paged", wherever they can and a test does
        not say otherwise. A difference is run again with the loop alone ("loop") and the attention alone ("attention").
    twins: every `generate()` is repeated on copies: see `upstream_twins`.

A test counts as different when its outcome with the mode is another than without hf_efficient, twice, each time in a
process of its own. `refusals.py` lists the error messages that are documented refusals; a test that fails with one is
"refused". Targets are folders of `tests/models` (their `test_modeling_*.py`), "generation" and "cache".
`<output>/report.md` has the counts and every difference, `<output>/<mode>/<target>.jsonl` what the tests recorded.
Records of the runs without hf_efficient are kept and used again. The exit status is 1 when anything differs.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys

import refusals


HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = ROOT / "benchmarks" / "results" / "upstream.json"
MODELS = (
    "llama qwen3 mistral gemma2 gemma3 gpt2 opt phi3 gpt_neox mixtral qwen2_moe qwen3_moe gpt_oss cohere olmo2 falcon "
    "bloom t5 bart whisper llava"
).split()
FILES = {"generation": "tests/generation/test_*.py", "cache": "tests/utils/test_cache_utils.py"}
# of twins; "loop": how many of all were answered by this package's loop
KINDS = ("loop", "equal", "tie", "refused", "undocumented", "not asked", "different")
PYTEST_RAN = (0, 1)  # exit statuses: all tests passed, some failed
FAULTS = ("different", "undocumented")  # of twins
PARTS = ("loop", "attention")  # of the mode "forced"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream", type=pathlib.Path, help="the folder that holds transformers' tests and conftest.py")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output/upstream"))
    parser.add_argument(
        "--modes", nargs="+", choices=("import", "forced", "twins"), default=["import", "forced", "twins"]
    )
    parser.add_argument("--targets", nargs="+", default=[*MODELS, *FILES])
    parser.add_argument("--tests", nargs="+", default=[], help="only these test ids, of one target")
    parser.add_argument(
        "--record", action="store_true", help=f"counts go into {RECORD.relative_to(ROOT)}, for the docs"
    )
    parser.add_argument(
        "-m", default="not is_fsdp_test and not is_tensor_parallel_test", help="pytest's marker expression"
    )
    options = parser.parse_args()
    installed = options.upstream / "src" / "transformers"  # what the tests read of transformers' sources
    if not installed.exists():
        import transformers

        installed.parent.mkdir(exist_ok=True)
        installed.symlink_to(pathlib.Path(transformers.__file__).parent)
    results = []
    for target in options.targets:
        for mode in options.modes:
            results.append(Comparison(options, target, mode).run())
            write(results, options.output)
            if options.record:
                record(results[-1])
            print(line(results[-1]), flush=True)
    return int(any(result["different"] or any(result["twins"].get(kind) for kind in FAULTS) for result in results))


class Comparison:
    """One target in one mode against the same without hf_efficient."""

    def __init__(self, options, target: str, mode: str):
        self.options, self.target, self.mode = options, target, mode

    def run(self) -> dict:
        tests, is_twins = self.options.tests, self.mode == "twins"
        # a twin leaves the test as it was: only what fails is run without hf_efficient too
        without = None if is_twins else Records(self._run("plain", tests, keep=not tests))
        plain = without and without.outcomes
        if plain and not tests and "passed" not in plain.values():
            log = self.options.output / "plain" / f"{self.target}.log"
            raise SystemExit(f"{self.target}: no test passes without hf_efficient, so nothing is compared; see {log}")
        records = Records(self._run(self.mode, tests))
        if is_twins:
            suspects = {test for test, outcome in records.outcomes.items() if outcome not in ("passed", "skipped")}
        else:
            everywhere = [*plain, *records.outcomes]
            suspects = {test for test in everywhere if records.outcomes.get(test) != plain.get(test)}
            # tests that ask transformers for its caches find this package's too
            suspects -= {test for test in suspects - set(plain) if is_as_its_siblings(test, records, without)}
        refused = {test: refusals.documented(records.messages.get(test, "")) for test in suspects}
        refused = {test: reason for test, reason in refused.items() if reason}
        suspects = sorted(suspects - set(refused))
        different = self._confirmed(suspects, plain, records) if suspects else {}
        return {
            "target": self.target,
            "mode": self.mode,
            "plain": dict(collections.Counter((plain or {}).values())),
            "run": dict(collections.Counter(records.outcomes.values())),
            "refused": refused,
            "unsteady": [] if is_twins else sorted(set(suspects) - set(different)),
            "different": different,
            "twins": records.twins(),
            "calls": records.calls,
        }

    def _confirmed(self, suspects: list[str], plain: dict | None, records: "Records") -> dict:
        """The `suspects` that differ once more, each with its outcomes, the mode's part at fault and its message."""
        known = [test for test in suspects if plain is None or test in plain]
        again = Records(self._run("plain", known, name="again")).outcomes if known else {}
        once_more = Records(self._run(self.mode, suspects, name="again"))
        parts = PARTS if self.mode == "forced" else ()
        parts = {part: Records(self._run(part, suspects, name="again")).outcomes for part in parts}
        different = {}
        for test in suspects:
            outcome = again.get(test, "absent")
            is_steady = plain is None or plain.get(test, "absent") == outcome
            if is_steady and once_more.outcomes.get(test, "absent") != outcome:
                different[test] = {
                    "outcomes": (outcome, records.outcomes.get(test, "absent")),
                    "by": [part for part, outcomes in parts.items() if outcomes.get(test, "absent") != outcome],
                    "message": once_more.messages.get(test, ""),
                }
        return different

    def _run(self, mode: str, tests, keep: bool = False, name: str = "") -> pathlib.Path:
        """The file that a process in `mode` wrote. A process that a test ends is started again without that test."""
        path = (self.options.output / mode / f"{self.target}{name and '.' + name}.jsonl").resolve()
        if keep and path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        done = set()
        while True:
            status = self._pytest(mode, tests, partial, done)
            entries = [json.loads(text) for text in partial.read_text().splitlines()] if partial.exists() else []
            started = [entry["start"] for entry in entries if "start" in entry]
            is_whole = any("finished" in entry for entry in entries)  # also where pytest itself failed before any test
            if is_whole and status in PYTEST_RAN and started:
                break
            if is_whole or not started or started[-1] in done:
                raise SystemExit(
                    f"{self.target}, {mode}: pytest ended with {status}; see {partial.with_suffix('.log')}"
                )
            done.update(started)
            with open(partial, "a") as file:
                crash = {
                    "test": started[-1],
                    "when": "call",
                    "outcome": "crashed",
                    "message": f"the process ended: {status}",
                }
                file.write(json.dumps(crash) + "\n")
        partial.replace(path)
        return path

    def _pytest(self, mode: str, tests, partial: pathlib.Path, done) -> int:
        upstream = self.options.upstream.resolve()
        pattern = FILES.get(self.target, f"tests/models/{self.target}/test_modeling_*.py")
        files = sorted(str(path.relative_to(upstream)) for path in upstream.glob(pattern))
        if not files:
            raise SystemExit(f"{self.target}: no {upstream / pattern}")
        environment = {
            **os.environ,
            "UPSTREAM_MODE": mode,
            "UPSTREAM_RECORD": str(partial),
            "UPSTREAM_TESTS": str(upstream / "tests"),
            "PYTHONPATH": str(HERE),
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", "-p", "no:cacheprovider"]
        command += ["-o", "log_cli=false", "--timeout", "300", "-m", self.options.m, "--rootdir", "."]
        # a file of arguments, for there may be thousands of tests
        arguments = partial.with_suffix(".arguments")
        arguments.write_text("\n".join([*(tests or files), *(f"--deselect={test}" for test in done)]))
        with open(partial.with_suffix(".log"), "a") as log:
            return subprocess.run(
                [*command, f"@{arguments}"], cwd=upstream, env=environment, stdout=log, stderr=subprocess.STDOUT
            ).returncode


def is_as_its_siblings(test: str, records: "Records", without: "Records") -> bool:
    """Whether `test`, a case that only this package adds, passes, skips, or ends as all other cases do without it.

    A case is named after its number and its value: test_cache_batched_6_paged_int8.
    """
    outcome = records.outcomes[test]
    siblings = [other for other in without.outcomes if function_of(other) == function_of(test)]
    ends = {(without.outcomes[other], kind_of(without.messages[other])) for other in siblings}
    return outcome in ("passed", "skipped") or ends == {(outcome, kind_of(records.messages[test]))}


def function_of(test: str) -> str:
    return re.sub(r"_\d+_\w+$", "", test)


def kind_of(message: str) -> str:
    """The exception's type and the beginning of what it says."""
    return message[:60]


class Records:
    """What a process recorded: `outcomes` and `messages` by test, `entries` of twins."""

    def __init__(self, path: pathlib.Path):
        entries = [json.loads(text) for text in path.read_text().splitlines()]
        self.outcomes, self.messages, self.entries = {}, {}, []
        order = ("passed", "skipped", "failed", "error", "crashed")
        for entry in entries:
            if "test" in entry and "outcome" in entry:  # subtests report under the id of their test
                test, known = entry["test"], self.outcomes.get(entry["test"], "passed")
                if order.index(entry["outcome"]) >= order.index(known):
                    self.outcomes[test], self.messages[test] = entry["outcome"], entry["message"]
            elif "call" in entry:
                self.entries.append(entry)
        self.calls = len({(entry["call"], entry["test"]) for entry in self.entries})

    def twins(self) -> dict:
        """Counts by result and of calls that this package's loop answered ("loop"), and by message with the tests:
        "refused", "undocumented", "tie", "not asked" and "different"."""
        result = {"counts": {}, "refused": {}, "undocumented": {}, "tie": {}, "not asked": {}, "different": []}
        for entry in self.entries:
            kind = entry["result"]
            if kind == "refused" and not refusals.documented(entry["message"]):
                kind = "undocumented"
            counts = result["counts"].setdefault(entry["twin"], {})
            counts[kind] = counts.get(kind, 0) + 1
            counts["loop"] = counts.get("loop", 0) + entry["loop"]
            if kind == "different":
                result["different"].append(entry)
            elif kind != "equal":
                text = refusals.documented(entry["message"]) if kind == "refused" else entry["message"]
                tests = result[kind].setdefault(text, {"count": 0, "first": entry["test"]})
                tests["count"] += 1
        return result if self.entries else {}


def record(result: dict) -> None:
    """Keeps the counts of `result` in `RECORD`, in place of those of the same target, mode and release."""
    import transformers

    kept = json.loads(RECORD.read_text()) if RECORD.exists() else []
    key = {"transformers": transformers.__version__, "target": result["target"], "mode": result["mode"]}
    kept = [row for row in kept if not key.items() <= row.items()]
    counts = {name: len(result[name]) for name in ("refused", "unsteady", "different")}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    row = {**key, "without": result["plain"], "with": result["run"], **counts, "commit": commit}
    kept = sorted([*kept, row], key=lambda row: (row["transformers"], row["mode"], row["target"]))
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def line(result: dict) -> str:
    text = f"{result['target']:12} {result['mode']:7} plain {result['plain']} | {result['run']} | refused "
    text += f"{len(result['refused'])}, unsteady {len(result['unsteady'])}, different {len(result['different'])}"
    if result["twins"]:
        total = collections.Counter()
        for counts in result["twins"]["counts"].values():
            total.update({kind: number for kind, number in counts.items() if kind != "loop"})
        text += f" | {result['calls']} calls, twins {dict(total)}"
    return text


def write(results: list[dict], output: pathlib.Path) -> None:
    """`report.json` and `report.md`."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.json").write_text(json.dumps(results, indent=1))
    rows = [
        "| target | mode | tests | passed without / with | refused | unsteady | different |",
        "|---|---|---|---|---|---|---|",
    ]
    twin_rows = ["| target | twin | " + " | ".join(KINDS) + " |", "|---" * (2 + len(KINDS)) + "|"]
    details = []
    for result in results:
        target, mode, plain, run = (result[key] for key in ("target", "mode", "plain", "run"))
        passed = f"{plain.get('passed', 0)} / {run.get('passed', 0)}"
        rows.append(
            f"| {target} | {mode} | {sum(run.values())} | {passed} | {len(result['refused'])} | "
            f"{len(result['unsteady'])} | {len(result['different'])} |"
        )
        for test, entry in result["different"].items():
            by = f" (by {' and '.join(entry['by']) or 'both together'})" if mode == "forced" else ""
            details.append(f"- `{test}` {mode}{by}: {' -> '.join(entry['outcomes'])}: {_line(entry['message'])}")
        twins = result["twins"]
        for twin, counts in twins.get("counts", {}).items():
            twin_rows.append(f"| {target} | {twin} | " + " | ".join(str(counts.get(kind, 0)) for kind in KINDS) + " |")
        groups = {}
        for entry in twins.get("different", ()):
            text, _, call = entry["message"].partition(" | generate(")
            key = entry["test"], entry["model"], entry["decoding"], entry["mask"], _line(text)
            groups.setdefault(key, ([], call))[0].append(entry["twin"])
        for (test, model, decoding, mask, text), (names, call) in groups.items():
            names = ", ".join(dict.fromkeys(names))
            details.append(f"- `{test}` {model}, {decoding}, mask {mask}; {names}: {text}\n  `generate({_line(call)}`")
        for kind in ("undocumented", "tie"):
            for text, tests in twins.get(kind, {}).items():
                details.append(f"- {kind} ({tests['count']} calls, first `{tests['first']}`): {_line(text)}")
    (output / "report.md").write_text("\n".join([*rows, "", *twin_rows, "", *details, ""]))


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
