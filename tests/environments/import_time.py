"""How long `import hf_efficient` takes, in environments that `run.py` built.

    python tests/environments/import_time.py transformers-5.16.1 transformers-5.24

Every time is that of a fresh process, less that of one that imports nothing. The ways take turns, and what is written
are medians. Modules are compiled to bytecode beforehand, as at a user's second import. The result file is
benchmarks/results/import_time.json, where the rows of other environments stay; `docs/figures.py` makes a table of it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from run import ROOT, versions

from hf_efficient.evaluation.environment import describe


RUNS = 5
MODELS = "from transformers import AutoModelForCausalLM, LlamaForCausalLM"
WAYS = {
    "nothing": "pass",
    "transformers": "import transformers",
    "transformers and hf_efficient": "import transformers, hf_efficient",
    "a model": MODELS,
    "a model and hf_efficient": f"import hf_efficient; {MODELS}",
}


def seconds(python, code: str) -> float:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([str(python), "-c", code], check=True, capture_output=True, cwd=tempfile.gettempdir(), env=kept)
    return time.perf_counter() - start


def measure(python) -> dict[str, float]:
    """Seconds of each of `WAYS`, without those of starting Python."""
    for code in WAYS.values():
        seconds(python, code)  # compiles, and fills the disk cache
    runs = [{way: seconds(python, code) for way, code in WAYS.items()} for _ in range(RUNS)]
    medians = {way: statistics.median(run[way] for run in runs) for way in WAYS}
    return {way: round(medians[way] - medians["nothing"], 3) for way in WAYS if way != "nothing"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="ENV")
    names = parser.parse_args().names
    path = ROOT / "benchmarks" / "results" / "import_time.json"
    found = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in names:
        python = ROOT / "output" / "environments" / name / "bin" / "python"
        every = versions(python)
        found[name] = {"seconds": measure(python), "versions": {key: every[key] for key in ("transformers", "torch")}}
    environment = describe()
    path.write_text(json.dumps({"environment": environment, "runs": RUNS, "results": found}, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
