"""What does training under codes and masks give back, and what does each loss of distillation give at equal minutes?

    python benchmarks/learning.py [--rows GLOB ...] [--minutes 20 | --steps N] [--start-windows 128] [--starts FOLDER]
        [--tokens FILE --calibration-tokens FILE] [--checkpoints FOLDER] [--seed 0] [--output FILE]
        [--batch-size 1] [--learning-rate R] [--text-share 0] [--own-windows N] [--device cuda]
    python benchmarks/learning.py --table          # the table of what has been measured

Model, measured texts and calibration text are those of `benchmarks/quality.py`, the text that is trained on is that of
`benchmarks/pruning_recovery.py`, without the articles that are measured (705 windows of 512 tokens); where that is too
little, N windows of a plain text are added (for the results: the paragraphs of "An Anarchist FAQ" that are longer than
200 characters, from the HTML pages of Debian's package `anarchism` 15.3, which `apt-get download` fetches). A row makes
a model (kept in FOLDER, and taken from there where it is) and calls `recover`, `distill` or `to_bitnet` with the dense
model as teacher.

Minutes are CPU minutes of this process, so that a machine that does other things gives the same training: 60 minutes of
two cores are 120. They are those of the call, with the teacher's forwards, the measuring of held-out text and the
packing. With --checkpoints an interrupted row goes on, and its minutes count from its beginning (with --steps: from
the interruption). The model that a row made stays in its folder there. With --device the models train and
are measured there; such rows are named for it. Their minutes, too, are those that this process computes or waits for.
Several processes can measure a row each, on a GPU under CUDA's MPS; --starts keeps the text that the first one wrote.
"FLOPs" counts six times the linear parameters a token for the student and two for the teacher. Rows named "loss: ..."
compare losses at equal minutes.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import harness
import torch
from pruning_recovery import compared, score, training_tokens
from quality import digests, texts
from safetensors.torch import load_file, save_file

import hf_efficient
from hf_efficient.compression.recovery import progress
from hf_efficient.compression.recovery import training as recovery_training
from hf_efficient.compression.recovery.texts import read_windows
from hf_efficient.evaluation import environment, memory


# name -> how the model is made from the calibration tokens
STARTS = {
    "int2 g64": lambda tokens: weight_only(tokens, bits=2, group_size=64, method="gptq", refine=True),
    "int3 g64": lambda tokens: weight_only(tokens, bits=3, group_size=64, method="gptq", refine=True),
    "int3 g64 fast": lambda tokens: weight_only(None, bits=3, group_size=64, quality="fast"),
    "int4 g64": lambda tokens: weight_only(tokens, bits=4, group_size=64, method="mse"),
    "50 %": lambda tokens: sparse(tokens, sparsity=0.5, method="alps"),
    "2:4": lambda tokens: sparse(tokens, pattern="2:4", method="alps", refine=True),
    "2:4 int4": lambda tokens: sparse(tokens, pattern="2:4", method="sparsegpt", weights=dict(bits=4, method="gptq")),
    "22 of 30 layers": lambda tokens: smaller(tokens, num_hidden_layers=22),
    "half the layers": lambda tokens: smaller(tokens, num_hidden_layers=15),
    "0.75 width": lambda tokens: smaller(tokens, intermediate_size=1152),
}
SMALLER = "22 of 30 layers", "half the layers", "0.75 width"
# name -> (start, function, arguments)
ROWS = {
    **{name: (name, "recover", {}) for name in STARTS if name not in SMALLER},
    **{name: (name, "distill", {}) for name in SMALLER},
    "ternary": (None, "to_bitnet", {}),
    **{
        f"loss: {name}": ("half the layers", "distill", options)
        for name, options in {
            "forward": {},
            "reverse": {"divergence": "reverse"},
            "skewed forward": {"divergence": "skewed_forward"},
            "skewed reverse": {"divergence": "skewed_reverse"},
            "Jensen-Shannon": {"divergence": "jensen_shannon"},
            "hidden states": {"hidden_states": 1.0},
            "relations": {"relations": 1.0},
            "on-policy": {"on_policy": 0.5, "divergence": "reverse"},
        }.items()
    },
}


def weight_only(tokens, **options):
    """SmolLM2 as a `WeightOnlyConfig` makes it."""
    calibration = None if tokens is None else {"tokens": tokens}
    return harness.load(quantization_config=hf_efficient.WeightOnlyConfig(**options, calibration=calibration))


def sparse(tokens, **options):
    """SmolLM2 as a `SparseConfig` makes it."""
    return harness.load(quantization_config=hf_efficient.SparseConfig(**options, calibration={"tokens": tokens}))


def smaller(tokens, **shape):
    """SmolLM2 as `prune_structure` makes it."""
    calibration = hf_efficient.CalibrationConfig(tokens=tokens)
    return hf_efficient.prune_structure(harness.load(), "shape", shape=shape, calibration=calibration)


def started(name: str, calibration: torch.Tensor, folder: Path, device=None):
    """The model that a row starts from, made in `folder` where it is not there."""
    if not folder.is_dir():
        STARTS[name](calibration).save_pretrained(folder)
    return harness.load(folder, device_map=device)


def scores_of(model, name: str, scored: dict, folder: Path | None) -> dict[str, torch.Tensor]:
    """`score`, kept in `folder` where there is one, for these texts."""
    texts = "-".join(digests(scored).values())
    kind = "" if model.device.type == "cpu" else f".{model.device.type}"
    path = folder and folder / f"{name.replace(' ', '-').replace(':', 'of')}.{texts}{kind}.scores.safetensors"
    if path is not None and path.is_file():
        return load_file(path)
    found = score(model, scored)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(found, path)
    return found


def measure(
    name: str, teacher, dense: dict, calibration, scored: dict, training, starts: Path, kept, budget: dict
) -> dict:
    """One row: perplexities before and after, and what the training took. dense: what `teacher` scores.
    kept: folder that keeps the scores of starts, or None."""
    start, function, options = ROWS[name]
    result = {"start": start, "function": function, "arguments": {**options, **budget}}
    model, before = None, None
    if start is not None:
        model = started(start, calibration, starts / start.replace(" ", "-").replace(":", "of"), teacher.device)
        before = scores_of(model, start, scored, kept)
    earlier = seconds_before(budget["checkpoint_dir"])
    began, spent = time.perf_counter(), time.process_time()
    if function == "recover":
        done = hf_efficient.recover(model, teacher, training, **options, **budget)
    elif function == "to_bitnet":
        model, done = hf_efficient.to_bitnet(teacher, training, **options, **budget)
    else:
        model, done = hf_efficient.distill(model, teacher, training, **options, **budget)
    spent = earlier + time.process_time() - spent
    result |= {**done, "wall_seconds": time.perf_counter() - began, "cpu_seconds": spent}
    if budget["checkpoint_dir"] is not None:
        model.save_pretrained(Path(budget["checkpoint_dir"]) / "model")
    result["peak_memory_bytes"] = memory.peak_memory_bytes(teacher.device)
    result["floating_point_operations"] = operations(model, teacher, done["tokens"])
    return result | compared(score(model, scored), dense, before)


def seconds_before(folder: str | None) -> float:
    """CPU seconds of the interrupted training whose checkpoints lie in `folder`."""
    states = [] if folder is None else Path(folder).glob("checkpoint-*/trainer_state.json")
    budgets = [json.loads(path.read_text())["stateful_callbacks"]["Budget"] for path in states]
    return max((each["attributes"]["gone"] for each in budgets if each["args"]["seconds"]), default=0.0)


def operations(model, teacher, tokens: int) -> float:
    """Of the products with weights, the output embedding included."""
    linear = [
        sum(m.in_features * m.out_features for m in each.modules() if isinstance(m, torch.nn.Linear))
        for each in (model, teacher)
    ]
    return tokens * (6.0 * linear[0] + 2.0 * linear[1])


def table(path: Path) -> None:
    """learning.md beside the results."""
    heads = ("row", "minutes", "CPU minutes", "steps", "tokens", "loss", "wiki before", "wiki", "news before", "news")
    lines = [harness.row(heads), harness.row(["---"] * len(heads))]
    for name, row in json.loads(path.read_text()).items():
        texts = [row["wikipedia"][key] for key in ("perplexity_before", "perplexity")]
        texts += [row["news"][key] for key in ("perplexity_before", "perplexity")]
        numbers = [f"{row['wall_seconds'] / 60:.1f}", f"{row['cpu_seconds'] / 60:.1f}", str(row["steps"])]
        shown = ["" if value is None else f"{value:.2f}" for value in texts]
        lines.append(harness.row([name, *numbers, str(row["tokens"]), f"{row['loss']:.3f}", *shown]))
    harness.write_table(path, lines)


def main() -> None:
    """Measures the rows in turn; each is in the results when it is done."""
    parser = harness.parser(__doc__, "learning.json")
    parser.add_argument("--rows", nargs="*", default=["*"], help="globs of row names")
    parser.add_argument("--minutes", type=float, default=20, help="CPU minutes of this process")
    parser.add_argument("--steps", type=int, help="instead of minutes")
    parser.add_argument("--batch-size", type=int, default=1, help="windows of 512 tokens in a step")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--text-share", type=float, default=0.0)
    parser.add_argument("--own-windows", type=int, default=0, help="of 512 tokens that the dense model writes")
    parser.add_argument("--start-windows", type=int, default=128, help="of calibration, for what rows start from")
    parser.add_argument("--tokens", help="measured windows instead of the sample's")
    parser.add_argument("--calibration-tokens", help="calibration windows instead of the sample's")
    parser.add_argument("--starts", type=Path, help="folder of models to start from (default: a temporary one)")
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps the state of trainings")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the windows; others name their rows")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--device", default="cpu", help="of models and training")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        return table(options.output)
    if bool(options.tokens) != bool(options.calibration_tokens):
        parser.error("--tokens and --calibration-tokens need each other: the sample's text may hold what is measured")
    scored, tokenizer = texts(options.tokens), harness.tokenizer()
    calibration = harness.windows(options.calibration_tokens, "calibration", options.start_windows, 512)
    training = training_tokens(tokenizer, scored["wikipedia"])
    teacher = harness.load(device_map=options.device)
    if options.own_windows:
        asked = hf_efficient.CalibrationConfig(num_samples=options.own_windows, own_text="sampled")
        training = torch.cat([training, read_windows(asked, None, 512, teacher, options.starts)])
    training = training[torch.randperm(len(training), generator=torch.Generator().manual_seed(0))]
    budget = {"minutes": options.minutes} if options.steps is None else {"steps": options.steps}
    budget |= {"batch_size": options.batch_size, "learning_rate": options.learning_rate, "seed": options.seed}
    budget["text_share"] = options.text_share
    recovery_training.SAVE_EVERY, progress.TIMES_MEASURED, progress.clock = options.save_every, 2, time.process_time
    dense = scores_of(teacher, "dense", scored, options.starts)
    with tempfile.TemporaryDirectory() as scratch:
        for name in harness.matching(ROWS, options.rows):
            load, starts = os.getloadavg()[1], options.starts or Path(scratch)
            shown_name = name if options.seed == 0 else f"{name}, seed {options.seed}"
            shown_name += "" if options.device == "cpu" else f", {options.device}"
            kept = options.checkpoints and options.checkpoints / shown_name.replace(" ", "-").replace(":", "of")
            own = budget | {"checkpoint_dir": None if kept is None else str(kept)}
            row = measure(name, teacher, dense, calibration, scored, training, starts, options.starts, own)
            row |= {"own_windows": options.own_windows, "start_windows": options.start_windows}
            row |= {"training_windows": list(training.shape)}
            row |= {"load_average_before": load, "load_average_after": os.getloadavg()[1]}
            row["environment"] = environment.describe()
            harness.write(options.output, harness.read(options.output, {}) | {shown_name: row})
            shown = ", ".join(f"{text} {row[text]['perplexity']:.2f}" for text in scored)
            print(f"{shown_name}: {shown} in {row['wall_seconds']:.0f} s, {row['tokens']} tokens", flush=True)
    return None


if __name__ == "__main__":
    main()
