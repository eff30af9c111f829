"""`hf-efficient to-bitnet`: a ternary student of a model (BitNet b1.58)."""

import argparse

from hf_efficient.cli import training_options
from hf_efficient.cli.models import check_model, check_tokenizer, check_uncompressed, load_causal_lm, save
from hf_efficient.cli.options import add_modules_argument, add_output_argument
from hf_efficient.cli.path_checks import check_output
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = training_options.KEYS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient to-bitnet`."""
    command.add_argument("model", help="Hub id or local folder of the model, which is the teacher")
    add_output_argument(command)
    training_options.add_arguments(command, "the model")
    add_modules_argument(command)
    command.add_argument("--no-norms", action="store_true", help="no norm before each ternary layer")
    command.add_argument("--dense", action="store_true", help="five weights in a byte instead of four")


def run(options: argparse.Namespace) -> Result:
    """Loads the model, trains its student and saves that.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded where they show.
    """
    output, texts = check_output("--output", options.output), training_options.texts_of(options)
    training = training_options.training_arguments(options)
    found = check_model("model", options.model, causal=True)
    check_uncompressed("model", options.model, found, "to-bitnet")

    from hf_efficient import to_bitnet
    from hf_efficient.compression.recovery.options import check_arguments

    check_arguments(**training)
    tokenizer = check_tokenizer("model", options.model)
    model = load_causal_lm(options.model)
    own = {"norms": not options.no_norms, "dense": options.dense}
    own["modules_to_not_convert"] = options.modules_to_not_convert
    student, done = to_bitnet(model, texts, tokenizer, **own, **training)

    def describe(model, folder):
        write_record(folder, options, "compressed", options.model)

    save(output, student, tokenizer, options.model, describe)
    return Result(*training_options.report(output, done))
