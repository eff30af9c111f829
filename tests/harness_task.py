"""A task of lm-evaluation-harness that needs no network."""

import json
from pathlib import Path


def write_task(folder: Path) -> None:
    """Writes the task `local`, of two questions, as `folder / "local.yaml"`, and its data beside it."""
    lines = [
        {"question": q, "choices": ["abc", "xyz"], "answer": i % 2} for i, q in enumerate(["hello ", "The river "])
    ]
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "local.yaml").write_text(json.dumps(task))  # JSON is YAML
