"""The options of commands that train a model against a teacher."""

import argparse

from hf_efficient.cli.option_types import at_least, positive, share
from hf_efficient.cli.options import given_options
from hf_efficient.cli.path_checks import check_folder, check_outside, check_text_file


KEYS = {
    "output": "the folder",
    "steps": "of training",
    "tokens": "of the training text that were read",
    "seconds": "of training",
    "loss": "at the end, nat",
    "perplexity": "of held-out text; null if the text was too short to hold any out",
}
NAMES = (
    *("minutes", "steps", "sequence_length", "batch_size", "learning_rate"),
    *("divergence", "text_share", "checkpoint_dir", "optimizer", "memory_gb"),
    *("gradient_checkpointing", "warm_up", "kv_format", "plot", "seed"),
)


def add_arguments(command: argparse.ArgumentParser, writer: str) -> None:
    """writer: the model that writes the text if none is given."""
    command.add_argument("--texts", help=f"text file to learn from, read whole (default: text that {writer} writes)")
    command.add_argument("--minutes", type=positive, help="how long (default 10)")
    command.add_argument("--steps", type=at_least(1), help="how long, instead of --minutes")
    command.add_argument("--sequence-length", type=at_least(2), help="tokens of a window (default 512)")
    command.add_argument("--batch-size", type=at_least(1), help="windows per step (default 1)")
    command.add_argument(
        "--learning-rate", type=positive, help="peak of the schedule (default 0.0002, with adapters 0.001)"
    )
    command.add_argument("--divergence", help="forward (default), reverse, both, skewed_forward, ...")
    command.add_argument("--text-share", type=share("[0, 1]"), help="weight of the next-token loss, 0 (default) to 1")
    command.add_argument("--optimizer", help="adamw, adamw_8bit or muon (default adamw)")
    command.add_argument("--memory-gb", type=positive, help="limit on activations; a step is split to fit")
    command.add_argument(
        "--gradient-checkpointing", action="store_true", default=None, help="takes less memory and more time"
    )
    command.add_argument("--warm-up", type=share("[0, 1]"), help="share of the time in which rounding is introduced")
    command.add_argument("--kv-format", help="train with pages rounded to int8, fp8, int4 or int2")
    command.add_argument("--plot", help="PNG file for the loss and the held-out perplexity over the steps")
    command.add_argument("--checkpoint-dir", help="folder from which an interrupted training resumes")
    command.add_argument(
        "--seed", type=at_least(0, (1 << 32) - 1), help="of the order of the text, and of generated text (default 0)"
    )


def training_arguments(options: argparse.Namespace, *more: str) -> dict:
    """What was given of `NAMES` and `more`, with a time. Raises ValueError for a folder that cannot be one."""
    check_outside(options, "checkpoint_dir", "plot")
    if options.checkpoint_dir is not None:
        check_folder("--checkpoint-dir", options.checkpoint_dir)
    given = given_options(options, (*NAMES, *more))
    if options.steps is None:
        given.setdefault("minutes", 10.0)
    return given


def texts_of(options: argparse.Namespace) -> list[str] | None:
    """The text that was given. Raises ValueError where it cannot be read."""
    return None if options.texts is None else [check_text_file("--texts", options.texts)]


def report(output, done: dict) -> tuple[str, dict]:
    """The line and the document of a command that wrote `output` and `done`."""
    document = {**{key: done.get(key) for key in KEYS}, "output": str(output)}
    text = "{output}: {steps} steps over {tokens} tokens in {seconds:.0f} s, loss {loss:.3f}".format(**document)
    if "perplexity" in done:
        text += f", perplexity of held-out text {done['perplexity']:.2f}"
    return text, document
