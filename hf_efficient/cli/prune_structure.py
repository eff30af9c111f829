"""`hf-efficient prune-structure`: makes a smaller model of the same class and saves it for plain transformers."""

import argparse
import time
from functools import partial

from hf_efficient.cli import calibration_options
from hf_efficient.cli.models import check_model, check_tokenizer, check_uncompressed, find_tokenizer, save
from hf_efficient.cli.option_types import at_least, share
from hf_efficient.cli.options import add_output_argument, given_options
from hf_efficient.cli.path_checks import check_output
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


SIZES = {  # option -> field of the model's config
    "--layers": "num_hidden_layers",
    "--heads": "num_attention_heads",
    "--key-value-heads": "num_key_value_heads",
    "--intermediate-size": "intermediate_size",
    "--hidden-size": "hidden_size",
}
KEYS = {
    "output": "the folder",
    "parameters": "of the smaller model",
    "parameters_before": "of the model it was made from",
    "seconds": "of loading and pruning",
}
OPTION_OF = calibration_options.OPTION_OF | {field: option for option, field in SIZES.items()}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient prune-structure`."""
    command.add_argument("model", help="Hub id or local folder")
    add_output_argument(command)
    command.add_argument(
        "--method", help="l1, llm_pruner, slicegpt or shape (default llm_pruner, shape where a size is given)"
    )
    command.add_argument("--remove", type=share("[0, 1)"), help="share of the parameters to remove, for example 0.2")
    for option, field in SIZES.items():
        command.add_argument(option, type=at_least(1), dest=field, help=f"{field} of the smaller model (method shape)")
    calibration_options.add_text_arguments(command)
    command.add_argument("--no-repair", action="store_true", help="do not fit the remaining weights by least squares")


def check_sizes(shape: dict[str, int], config) -> None:
    """Raises ValueError where `shape` has a size larger than the model of the transformers config `config`."""
    for field, size in shape.items():
        now = getattr(config.get_text_config(decoder=True), field, None)
        if now is not None and size > now:
            raise ValueError(f"{field}={size} is not supported: it must be an integer from 1 to {now}")


def run(options: argparse.Namespace) -> Result:
    """Loads, prunes and saves.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded where they show.
    """
    output = check_output("--output", options.output)
    shape = given_options(options, SIZES.values())
    if (options.remove is None) == (not shape):
        raise ValueError(f"give --remove SHARE, or the sizes that shall be left ({', '.join(SIZES)}), not both")
    text = calibration_options.calibration_arguments(options).get("calibration")
    found = check_model("model", options.model, causal=True)
    check_uncompressed("model", options.model, found, "prune-structure")
    check_sizes(shape, found)

    from transformers import AutoModelForCausalLM

    import hf_efficient
    from hf_efficient.compression.structured_pruning import check_arguments

    arguments = {
        "method": options.method if options.method is not None else ("shape" if shape else "llm_pruner"),
        "remove": options.remove,
        "shape": shape or None,
        "calibration": None if text is None else hf_efficient.CalibrationConfig(**text),
    }
    check_arguments(**arguments)
    calibration_options.check_calibration(arguments["calibration"], found, options.model)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    tokenizer = find_tokenizer(options.model) if text is None else check_tokenizer("model", options.model)
    repair = False if options.no_repair else None
    small = hf_efficient.prune_structure(model, tokenizer=tokenizer, repair=repair, **arguments)
    counts = [each.num_parameters() for each in (small, model)]
    describe = partial(write_record, options=options, kind="pruned", base_model=options.model)
    save(output, small, tokenizer, describe=lambda model, folder: describe(folder))
    seconds = time.perf_counter() - start
    millions = [count / 1e6 for count in counts]
    text = f"{output}: {millions[0]:.1f} of {millions[1]:.1f} million parameters, made in {seconds:.0f} s"
    return Result(text, dict(zip(KEYS, (str(output), *counts, seconds))))
