"""`hf-efficient sparsify-context`: trains what tells a model's feed-forward layers which neurons a token calls for."""

import argparse

from hf_efficient.cli.calibration_text import WORDS as TEXT_WORDS
from hf_efficient.cli.calibration_text import check_calibration
from hf_efficient.cli.compression import check_dense
from hf_efficient.cli.numbers import at_least, share
from hf_efficient.cli.paths import check_model, check_output


WORDS = TEXT_WORDS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient sparsify-context`."""
    command.add_argument("model", help="Hub id or local folder of a model with plain weights")
    command.add_argument("--output", required=True, help="folder for the predictors; must not exist or be empty")
    command.add_argument(
        "--calibration", required=True, metavar="FILE", help=".txt or .jsonl file, or a dataset of the Hub"
    )
    command.add_argument("--num-samples", type=at_least(1), default=32, help="windows of text (default 32)")
    command.add_argument("--sequence-length", type=at_least(1), default=512, help="tokens of a window (default 512)")
    kept = command.add_mutually_exclusive_group()
    kept.add_argument("--keep", type=share("(0, 1)"), help="share of the neurons to compute (default 0.5)")
    kept.add_argument(
        "--recall", type=share("(0, 1]"), help="instead, the share of the squared contributions to compute"
    )
    command.add_argument("--rank", type=at_least(0), default=0, help="of the predictors (default 0: the gate decides)")


def run(options: argparse.Namespace) -> None:
    """Trains and saves the predictors, and prints the share of the neurons that they keep.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded where they show.
    """
    output = check_output("--output", options.output, replaced=False)
    found = check_model("model", options.model, causal=True)
    check_dense("model", options.model, found, "sparsify-context")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_efficient import CalibrationConfig, sparsify_context

    text = dict(dataset=options.calibration, num_samples=options.num_samples, sequence_length=options.sequence_length)
    calibration = CalibrationConfig(**text)
    check_calibration(calibration, found, options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    given = dict(keep=options.keep, recall=options.recall, rank=options.rank)
    context = sparsify_context(model, calibration, tokenizer, **given)
    context.save_pretrained(output)
    print(f"{output}: {context.kept:.1%} of the neurons")
