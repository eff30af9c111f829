"""`hf-efficient sparsify-context`: trains what tells a model's feed-forward layers which neurons a token calls for."""

import argparse
from pathlib import Path

from hf_efficient.cli.paths import check_paths


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient sparsify-context`."""
    command.add_argument("model", help="Hub id or local folder of a model with plain weights")
    command.add_argument("--output", required=True, help="folder for the predictors; must not exist or be empty")
    command.add_argument("--calibration", required=True, help=".txt or .jsonl file, or a dataset of the Hub")
    command.add_argument("--num-samples", type=int, default=32, help="windows of text (default 32)")
    command.add_argument("--sequence-length", type=int, default=512, help="tokens of a window (default 512)")
    command.add_argument("--keep", type=float, help="share of the neurons to compute (default 0.5)")
    command.add_argument("--recall", type=float, help="instead, the share of the squared contributions to compute")
    command.add_argument("--rank", type=int, default=0, help="of the predictors (default 0: the gate decides)")


def run(options: argparse.Namespace) -> None:
    """Trains and saves the predictors, and prints the share of the neurons that they keep.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded where they show.
    """
    output = Path(options.output)
    check_paths(output, model=options.model)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_efficient import CalibrationConfig, sparsify_context

    text = dict(dataset=options.calibration, num_samples=options.num_samples, sequence_length=options.sequence_length)
    calibration = CalibrationConfig(**text)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    given = dict(keep=options.keep, recall=options.recall, rank=options.rank)
    context = sparsify_context(model, calibration, tokenizer, **given)
    context.save_pretrained(output)
    print(f"{output}: {context.kept:.1%} of the neurons")
