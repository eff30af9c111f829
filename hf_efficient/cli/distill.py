"""`hf-efficient distill`: trains a given student, or one made by pruning the teacher, on the teacher's predictions."""

import argparse

from hf_efficient.cli import training_options
from hf_efficient.cli.models import check_model, check_tokenizer, check_uncompressed, load_causal_lm, save
from hf_efficient.cli.option_types import at_least, positive, share
from hf_efficient.cli.options import add_output_argument, given_options
from hf_efficient.cli.path_checks import check_output, check_text_file
from hf_efficient.cli.prune_structure import SIZES, check_sizes
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = training_options.KEYS
OPTION_OF = {field: option for option, field in SIZES.items()}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient distill`."""
    command.add_argument("teacher", help="Hub id or local folder of the model to learn from")
    command.add_argument("--student", help="folder or Hub id of the student; without it, give its sizes:")
    for option, field in SIZES.items():
        command.add_argument(option, type=at_least(1), dest=field, help=f"{field} of the student")
    add_output_argument(command)
    training_options.add_arguments(command, "the teacher")
    command.add_argument("--prompts", help="file with one prompt a line, which the teacher answers, instead of --texts")
    command.add_argument("--max-new-tokens", type=at_least(1), help="of an answer (default 256)")
    command.add_argument("--on-policy", type=share("[0, 1]"), help="share of steps on text that the student writes")
    command.add_argument("--hidden-states", type=positive, help="weight of the error of hidden states")
    command.add_argument("--relations", type=positive, help="weight of the divergence of attention relations")


def run(options: argparse.Namespace) -> Result:
    """Loads or makes the student, trains it and saves it.

    Raises:
        ValueError: for arguments that are not allowed, before a model is loaded where they show.
    """
    output, texts = check_output("--output", options.output), training_options.texts_of(options)
    more = "max_new_tokens", "on_policy", "hidden_states", "relations"
    training, shape = training_options.training_arguments(options, *more), given_options(options, SIZES.values())
    if (options.student is None) == (not shape):
        raise ValueError(f"give --student, or the sizes that it shall have ({', '.join(SIZES)}), not both")
    if options.prompts is not None:
        if texts is not None:
            raise ValueError("give --texts or --prompts, not both")
        lines = check_text_file("--prompts", options.prompts).splitlines()
        training["prompts"] = [line for line in lines if line.strip()]
        if not training["prompts"]:
            raise ValueError(f"--prompts {options.prompts}: the file is empty")
    found = check_model("teacher", options.teacher, causal=True)
    if options.student is None:
        check_uncompressed("teacher", options.teacher, found, "distill")
        check_sizes(shape, found)
    else:
        check_model("--student", options.student, causal=True)

    from hf_efficient import distill
    from hf_efficient.compression.recovery.options import check_arguments

    check_arguments(**{name: value for name, value in training.items() if name not in (*more, "prompts")})
    tokenizer = check_tokenizer("teacher", options.teacher)
    teacher = load_causal_lm(options.teacher)
    student = {"shape": shape} if options.student is None else load_causal_lm(options.student)
    student, done = distill(student, teacher, texts, tokenizer, **training)

    def describe(model, folder):
        write_record(folder, options, "recovered", options.teacher, made_from=options.student)

    save(output, student, tokenizer, options.teacher, describe)
    return Result(*training_options.report(output, done))
