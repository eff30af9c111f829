"""`hf-efficient evaluate`: perplexity, and tasks of lm-evaluation-harness."""

import argparse
import json
from pathlib import Path

from hf_efficient.cli.evaluate_options import add_arguments, check
from hf_efficient.cli.models import check_tokenizer, load_causal_lm
from hf_efficient.cli.record import shown_command
from hf_efficient.cli.result import Result


KEYS = {
    "model": "Hub id, or the name of the folder",
    "weights_sha256": "of the folder's weight files, or null",
    "dtype": "of the model",
    "weight_bytes": "of the weights in memory",
    "perplexity": "perplexity, nll (nat a token), its standard_error, and of what; null where none was measured",
    "tasks": "task -> metrics (value, standard_error), num_fewshot, samples, version",
    "limit": "samples of each task, or null for all",
    "lm_eval": "its version, or null",
    "environment": "hardware, versions, commit, command and time",
}
__all__ = ["KEYS", "add_arguments", "run"]
DEFAULT_TEXT = "Wikipedia articles of gensim's test data"


def run(options: argparse.Namespace) -> Result:
    """Loads the model, measures it, and writes the result where it was asked for.

    Raises:
        ValueError: for arguments that are not allowed, a task that does not exist; before the model is loaded.
        RuntimeError: a task is asked for and `lm_eval` is not installed.
    """
    text, manager = check(options, KEYS)
    from hf_efficient.evaluation.evaluate import evaluate, windows_of
    from hf_efficient.integrations import evaluation_card, hub

    is_folder = Path(options.model).is_dir()
    tokenizer = check_tokenizer("model", options.model)
    windows = None if text is None else windows_of(tokenizer, text, options.windows, options.window_length)
    model = load_causal_lm(options.model, dtype=options.dtype).eval()
    chosen = dict(limit=options.limit, num_fewshot=options.num_fewshot, batch_size=options.batch_size)
    tasks = None if manager is None else {"names": options.tasks, "manager": manager, **chosen}
    text_name = Path(options.text).name if options.text else DEFAULT_TEXT
    found = evaluate(
        model, tokenizer, windows, text_name, tasks and {**tasks, "chat": bool(options.apply_chat_template)}
    )
    content = {
        "model": Path(options.model).resolve().name if is_folder else options.model,
        "weights_sha256": hub.weights_sha256(Path(options.model)) if is_folder else None,
        **found,
    }
    content["environment"]["command"] = shown_command(options.given)
    evaluation_card.check(content)
    written = _write(options, content, evaluation_card, hub)
    return Result("\n\n".join([evaluation_card.table(content), *written]), content)


def _write(options: argparse.Namespace, content: dict, evaluation_card, hub) -> list[str]:
    """Writes what was asked for; returns lines that say where."""
    from hf_efficient.files import atomic_write

    written, paths = json.dumps(content, indent=2) + "\n", {}
    if options.output is not None:
        paths[Path(options.output)] = written
    if options.card:
        folder = Path(options.model)
        card = folder / hub.CARD
        before = card.read_text(encoding="utf-8") if card.is_file() else f"# {content['model']}\n"
        paths[folder / evaluation_card.FILE] = written
        paths[card] = evaluation_card.add_to(before, content, content["model"])
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return [f"written: {', '.join(map(str, paths))}"] if paths else []
