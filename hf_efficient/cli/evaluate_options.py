"""The options of `hf-efficient evaluate`, and their checks before a model is loaded."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from hf_efficient.cli.models import check_model
from hf_efficient.cli.option_types import at_least
from hf_efficient.cli.options import add_dtype_argument
from hf_efficient.cli.path_checks import check_file, check_path, check_text_file, is_there


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient evaluate`."""
    command.add_argument("model", help="Hub id or local folder, compressed or not")
    command.add_argument("--tasks", nargs="+", metavar="TASK", help="of lm_eval, such as arc_easy hellaswag")
    command.add_argument("--include-path", metavar="FOLDER", help="folder with YAML files of your own tasks")
    command.add_argument("--limit", type=at_least(1), help="samples of each task (default: all)")
    command.add_argument("--num-fewshot", type=at_least(0), help="examples before a question (default: the task's)")
    command.add_argument("--batch-size", type=at_least(1), default=1, help="sequences a forward of tasks (default 1)")
    command.add_argument(
        "--apply-chat-template", action="store_true", default=None, help="put questions into the chat template"
    )
    command.add_argument("--text", help="text file to measure perplexity on (default: Wikipedia articles, from PyPI)")
    command.add_argument("--windows", type=at_least(0), default=8, help="of that text; 0: no perplexity (default 8)")
    command.add_argument(
        "--window-length", type=at_least(2), help="tokens of a window (default 1024, or the model's most)"
    )
    add_dtype_argument(command)
    command.add_argument("--card", action="store_true", help="write the figures into README.md of the folder, too")
    command.add_argument("--output", metavar="FILE", help="JSON file for the result")


def check(options: argparse.Namespace, keys: Iterable[str]) -> tuple:
    """(the text or None, lm_eval's TaskManager or None), after checks of all options. keys: of a result."""
    from hf_efficient.evaluation import samples, tasks

    if not options.windows and not options.tasks:
        raise ValueError("--windows 0 and no --tasks: there is nothing to measure")
    if not options.tasks:
        for name in ("include_path", "limit", "num_fewshot", "apply_chat_template"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is of tasks: give them with --tasks")
    if options.output is not None:
        output = check_file("--output", options.output, keys).resolve()
        if options.text and output == Path(options.text).resolve():
            raise ValueError(f"--output {options.output} is the text: give another file")
        if is_there(options.model, Path.is_dir) and output.is_relative_to(Path(options.model).resolve()):
            raise ValueError(f"--output {options.output} lies in the model's folder, where --card writes: give another")
    found = check_model("model", options.model, causal=True)
    if options.card and not Path(options.model).is_dir():
        raise ValueError(f"--card: {options.model} is no folder, and only a folder's README.md is written")
    longest = getattr(found.get_text_config(decoder=True), "max_position_embeddings", None)
    if options.window_length is None:
        options.window_length = min(1024, longest or 1024)
    if options.windows and longest is not None and options.window_length > longest:
        raise ValueError(f"--window-length {options.window_length}: the model takes at most {longest} tokens")
    if options.include_path is not None:
        check_path("--include-path", options.include_path)
    given = check_text_file("--text", options.text) if options.text is not None else None
    manager = tasks.find_tasks(options.tasks, options.include_path) if options.tasks else None
    if not options.windows:
        return None, manager
    return samples.sample_text() if given is None else given, manager
