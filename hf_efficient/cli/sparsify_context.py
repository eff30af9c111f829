"""`hf-efficient sparsify-context`: trains predictors of the feed-forward neurons that each token needs."""

import argparse

from hf_efficient.cli import calibration_options
from hf_efficient.cli.models import check_model, check_uncompressed
from hf_efficient.cli.option_types import at_least, share
from hf_efficient.cli.options import add_output_argument
from hf_efficient.cli.path_checks import check_output
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = {"output": "the folder", "kept": "the share of the neurons that are computed"}
OPTION_OF = calibration_options.OPTION_OF


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient sparsify-context`."""
    command.add_argument("model", help="Hub id or local folder of a model with plain weights")
    add_output_argument(command, "folder for the predictors")
    help = ".txt or .jsonl file, or a dataset of the Hub"
    calibration_options.add_text_arguments(command, num_samples=32, required=True, help=help)
    kept = command.add_mutually_exclusive_group()
    kept.add_argument("--keep", type=share("(0, 1)"), help="share of the neurons to compute (default 0.5)")
    kept.add_argument(
        "--recall", type=share("(0, 1]"), help="instead, the share of the squared contributions to compute"
    )
    command.add_argument("--rank", type=at_least(0), default=0, help="of the predictors (default 0: the gate decides)")


def run(options: argparse.Namespace) -> Result:
    """Trains and saves the predictors, and tells the share of the neurons that they keep.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded where they show.
    """
    output = check_output("--output", options.output, replaced=False)
    found = check_model("model", options.model, causal=True)
    check_uncompressed("model", options.model, found, "sparsify-context")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_efficient import CalibrationConfig, sparsify_context

    calibration = CalibrationConfig(**calibration_options.calibration_arguments(options)["calibration"])
    calibration_options.check_calibration(calibration, found, options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    chosen = dict(keep=options.keep, recall=options.recall, rank=options.rank)
    context = sparsify_context(model, calibration, tokenizer, **chosen)

    def describe(folder):
        write_record(folder, options, "context predictors", options.model, kept=context.kept)

    context.save_pretrained(output, describe)
    return Result(f"{output}: {context.kept:.1%} of the neurons", {"output": str(output), "kept": context.kept})
