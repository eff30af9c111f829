"""What does a quantization method cost in accuracy? Rows of `quality.py` on a task of lm-evaluation-harness.

    python benchmarks/quality_tasks.py [--rows GLOB ...] [--output FILE]
    python benchmarks/quality.py --table    # the table of both

The task needs no network. `next_passage` asks which of four passages of 20 words goes on after the first 60 words of a
news story: the next one, or one of three that come later in the same story. The answer is the most likely passage; a
guess is right in 25 % of cases. As `hf-efficient evaluate --tasks next_passage --include-path FOLDER` does, the rows go
through lm-evaluation-harness (`pip install lm_eval`) without examples in the prompt. Each row is made as `quality.py`
makes it, with the same calibration.
"""

import json
import sys
import tempfile
from pathlib import Path

import harness


TASK, CALIBRATION_WINDOWS = "next_passage", 128
PROMPT, PASSAGE, CHOICES = 60, 20, 4  # words, words, passages


def questions(text: str) -> list[dict]:
    """One of every story of `text` (joined by blank lines) that is long enough; the right choice stands at every
    place equally often."""
    found = []
    for words in (story.split() for story in text.split("\n\n")):
        starts = [PROMPT + PASSAGE * i for i in range(CHOICES)]
        if len(words) < starts[-1] + PASSAGE:
            continue
        passages = [" ".join(words[start : start + PASSAGE]) for start in starts]
        answer = len(found) % CHOICES
        choices = passages[1 : answer + 1] + passages[:1] + passages[answer + 1 :]
        found.append({"question": " ".join(words[:PROMPT]), "choices": choices, "answer": answer})
    return found


def write_task(folder: Path, text: str) -> None:
    """Writes `next_passage.yaml` and its data, what --include-path wants."""
    data = folder / "next_passage.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions(text)))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1},
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))  # JSON is YAML


def cell(row: dict | None) -> str:
    """A row's accuracy with its standard error, in percent; empty where it was not measured."""
    if row is None:
        return ""
    accuracy = row["tasks"][TASK]["metrics"]["acc"]
    return f"{100 * accuracy['value']:.1f} ({100 * accuracy['standard_error']:.1f})"


def main() -> None:
    parser = harness.parser(__doc__, "quality_tasks.json")
    parser.add_argument("--rows", nargs="*", default=["bf16"], help="globs of row names of quality.py")
    options = parser.parse_args()
    import quality

    from hf_efficient.evaluation import environment, samples, tasks
    from hf_efficient.evaluation.evaluate import evaluate

    chosen = harness.matching(quality.rows(), options.rows)
    if not chosen:
        sys.exit(f"--rows {' '.join(options.rows)}: no row of quality.py has such a name")
    calibration = harness.windows(None, "calibration", CALIBRATION_WINDOWS, 512)
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), samples.sample_text("news"))
        manager = tasks.find_tasks([TASK], folder)
        asked = {"names": [TASK], "manager": manager, "limit": None, "num_fewshot": 0, "batch_size": 1}
        for name in chosen:
            config = quality.config_of(quality.rows()[name], calibration)
            model = harness.load(quantization_config=config).eval()
            found = evaluate(model, harness.tokenizer(), None, "", asked)
            done = harness.read(options.output, {})
            kept = {key: found[key] for key in ("tasks", "lm_eval", "weight_bytes")}
            done[name] = {**kept, "environment": environment.describe()}
            harness.write(options.output, done)
            print(name, cell(done[name]), flush=True)


if __name__ == "__main__":
    main()
