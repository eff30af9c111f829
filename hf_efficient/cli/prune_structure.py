"""`hf-efficient prune-structure`: makes a smaller model of the same class and saves it for plain transformers."""

import argparse
import time

from hf_efficient.cli.calibration_text import WORDS as TEXT_WORDS
from hf_efficient.cli.calibration_text import add_text_arguments, calibration_arguments, check_calibration
from hf_efficient.cli.compression import check_dense
from hf_efficient.cli.numbers import at_least, share
from hf_efficient.cli.paths import check_model, check_output


SHAPE = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key-value-heads": "num_key_value_heads",
    "intermediate-size": "intermediate_size",
    "hidden-size": "hidden_size",
}
WORDS = TEXT_WORDS | {field: f"--{flag}" for flag, field in SHAPE.items()}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient prune-structure`."""
    command.add_argument("model", help="Hub id or local folder")
    command.add_argument("--output", required=True, help="folder to write; must not exist or be empty")
    command.add_argument(
        "--method", help="l1, llm_pruner, slicegpt or shape (default llm_pruner, shape where a size is given)"
    )
    command.add_argument("--remove", type=share("[0, 1)"), help="share of the parameters to remove, for example 0.2")
    for flag, field in SHAPE.items():
        command.add_argument(
            f"--{flag}", type=at_least(1), dest=field, help=f"{field} that shall be left (method shape)"
        )
    add_text_arguments(command)
    command.add_argument(
        "--no-repair", action="store_true", help="do not solve the remaining weights anew by least squares"
    )


def run(options: argparse.Namespace) -> None:
    """Loads, prunes and saves.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded where they show.
    """
    output = check_output("--output", options.output)
    shape = {field: getattr(options, field) for field in SHAPE.values() if getattr(options, field) is not None}
    if (options.remove is None) == (not shape):
        sizes = ", ".join(f"--{flag}" for flag in SHAPE)
        raise ValueError(f"give --remove SHARE, or the sizes that shall be left ({sizes}), not both")
    text = calibration_arguments(options).get("calibration")
    found = check_model("model", options.model, causal=True)
    check_dense("model", options.model, found, "prune-structure")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_efficient
    from hf_efficient.compression.structured_pruning import check_arguments
    from hf_efficient.files import new_folder

    arguments = {
        "method": options.method or ("shape" if shape else "llm_pruner"),
        "remove": options.remove,
        "shape": shape or None,
        "calibration": None if text is None else hf_efficient.CalibrationConfig(**text),
        "repair": False if options.no_repair else None,
    }
    check_arguments(**arguments)
    check_calibration(arguments["calibration"], found, options.model)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError):  # a model without a tokenizer
        if text is not None:
            raise
        tokenizer = None
        print("no tokenizer was found beside the model")
    small = hf_efficient.prune_structure(model, tokenizer=tokenizer, **arguments)
    with new_folder(output) as aside:
        small.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
    millions = [each.num_parameters() / 1e6 for each in (model, small)]
    seconds = time.perf_counter() - start
    print(f"{output}: {millions[1]:.1f} of {millions[0]:.1f} million parameters, made in {seconds:.0f} s")
