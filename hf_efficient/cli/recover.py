"""`hf-efficient recover`: trains a compressed or pruned model on the original model's predictions, under its codes and
masks."""

import argparse

from hf_efficient.cli import training_options
from hf_efficient.cli.models import check_model, check_tokenizer, load_causal_lm, save
from hf_efficient.cli.option_types import at_least
from hf_efficient.cli.options import add_output_argument
from hf_efficient.cli.path_checks import check_output
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = training_options.KEYS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient recover`."""
    command.add_argument("model", help="folder of the compressed or pruned model")
    command.add_argument("--teacher", required=True, help="Hub id or local folder of the model from before")
    add_output_argument(command)
    training_options.add_arguments(command, "the teacher")
    command.add_argument(
        "--lora-rank", type=at_least(1), help="train adapters of this rank under the masks, and merge them"
    )


def run(options: argparse.Namespace) -> Result:
    """Loads both models, trains and saves.

    Raises:
        ValueError: for arguments that are not allowed, those of paths before a model is loaded.
    """
    output, texts = check_output("--output", options.output), training_options.texts_of(options)
    training = training_options.training_arguments(options, "lora_rank")
    check_model("model", options.model, causal=True)
    check_model("--teacher", options.teacher, causal=True)

    from hf_efficient.compression.recovery import RecoveryOptions, read_windows, recover
    from hf_efficient.integrations import hub

    RecoveryOptions(**training)  # checks them
    tokenizer = check_tokenizer("model", options.model)
    if texts is not None:
        texts = read_windows(texts, tokenizer, training.get("sequence_length", 512))
    model, teacher = load_causal_lm(options.model), load_causal_lm(options.teacher)
    done = recover(model, teacher, texts, **training)
    base_model = hub.recorded_base_model(options.model) or options.teacher

    def describe(model, folder):
        write_record(folder, options, "recovered", base_model, made_from=options.model)

    save(output, model, tokenizer, base_model, describe)
    return Result(*training_options.report(output, done))
