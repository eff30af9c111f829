"""Tasks of lm-evaluation-harness (Gao et al. 2024, "A framework for few-shot language model evaluation"), run on a
model that is loaded."""

import difflib
import importlib.metadata
import importlib.util
import math
import os
from pathlib import Path

from transformers.utils import logging


def find_tasks(names: list[str], include_path: str | os.PathLike | None = None):
    """The harness's `TaskManager`, which knows the tasks `names`.

    Args:
        names: of tasks or groups of tasks.
        include_path: a folder with YAML files of tasks. Where it has all of `names`, those of the harness, which take
            seconds to list, are not read.

    Raises:
        RuntimeError: `lm_eval` is not installed.
        ValueError: a task is not known, or `include_path` is no folder.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise RuntimeError("tasks need the package 'lm_eval': pip install 'hf_efficient[evaluate]'")
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path={os.fspath(include_path)!r}: there is no such folder")
    from lm_eval.tasks import TaskManager

    known: list[str] = []
    with logging.tqdm(desc="listing tasks", total=None) as bar:
        for includes_defaults in (False, True) if include_path is not None else (True,):
            path = None if include_path is None else str(include_path)
            manager = TaskManager(include_path=path, include_defaults=includes_defaults)
            known = manager.all_tasks
            bar.update()
            if set(names) <= set(known):
                return manager
    missing = next(name for name in names if name not in known)
    close = difflib.get_close_matches(missing, known)
    raise ValueError(
        f"tasks={missing!r}: there is no such task in lm_eval {importlib.metadata.version('lm_eval')}"
        + (f" or {include_path}" if include_path is not None else "")
        + (f"; close to it are {', '.join(close)}" if close else "")
        + ("" if include_path is not None else "; tasks of your own: include_path='FOLDER', with their YAML files")
    )


def run_tasks(
    model,
    tokenizer,
    names: list[str],
    manager,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    chat: bool = False,
) -> dict[str, dict]:
    """Runs tasks and groups.

    Args:
        manager: of `find_tasks`.
        limit: samples of each task; None: all.
        num_fewshot: examples before each question; None: as the task says.
        batch_size: sequences a forward.
        chat: whether questions are put into the tokenizer's chat template.

    Returns:
        task -> `metrics` (name, with its filter after a comma where that is not "none" -> `value` and `standard_error`,
        None where the harness has none), `num_fewshot`, `samples` and `version`.

    Raises:
        ValueError: a task cannot be set up, as where its data cannot be loaded.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        found = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=names,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=chat,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (KeyError, FileNotFoundError, ConnectionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"tasks={' '.join(names)!r} cannot be run: {type(error).__name__}: {reason}") from error
    return {name: _task(name, found) for name in found["results"]}


def _task(name: str, found: dict) -> dict:
    """What is kept of a task's results. The harness writes "acc,none" and "acc_stderr,none", and "N/A" for nothing."""
    metrics = {}
    for key, value in found["results"][name].items():
        metric, _, filter = key.partition(",")
        if filter and not metric.endswith("_stderr") and _is_number(value):
            error = found["results"][name].get(f"{metric}_stderr,{filter}")
            shown = metric if filter == "none" else f"{metric}, {filter}"
            metrics[shown] = {"value": float(value), "standard_error": float(error) if _is_number(error) else None}
    samples = found.get("n-samples", {}).get(name, {}).get("effective")
    if samples is None:  # a group
        members = found.get("group_subtasks", {}).get(name, [])
        samples = sum(found["n-samples"][member]["effective"] for member in members if member in found["n-samples"])
    return {
        "metrics": metrics,
        "num_fewshot": found.get("n-shot", {}).get(name),
        "samples": samples,
        "version": found.get("versions", {}).get(name),
    }


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
