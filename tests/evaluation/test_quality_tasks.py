"""The task that `benchmarks/quality_tasks.py` gives lm-evaluation-harness."""

import json
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import quality_tasks


STORY = " ".join(f"w{i}" for i in range(140))


def test_the_right_passage_goes_on_after_the_prompt_and_stands_everywhere(tmp_path):
    text = "\n\n".join([STORY, "too short", *[STORY] * 4])
    questions = quality_tasks.questions(text)
    assert [question["answer"] for question in questions] == [0, 1, 2, 3, 0]
    for question in questions:
        assert question["question"].split() == STORY.split()[:60]
        right = question["choices"][question["answer"]]
        assert right.split() == STORY.split()[60:80]
        others = [choice for choice in question["choices"] if choice != right]
        assert " ".join(others).split() == STORY.split()[80:]
    quality_tasks.write_task(tmp_path, text)
    task = json.loads((tmp_path / "next_passage.yaml").read_text())
    data = Path(task["dataset_kwargs"]["data_files"]["test"])
    assert [json.loads(line) for line in data.read_text().splitlines()] == questions


@pytest.mark.parametrize("row, shown", [(None, ""), (0.69306, "69.3 (3.3)")])
def test_cells(row, shown):
    metrics = {"acc": {"value": row, "standard_error": 0.0326}}
    assert quality_tasks.cell(row and {"tasks": {"next_passage": {"metrics": metrics}}}) == shown
