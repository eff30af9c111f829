"""`hf-efficient recover`: trains a compressed or pruned model against the model from before, under its codes and
masks."""

import argparse

from hf_efficient.cli.models import check_model, check_tokenizer, load_causal_lm, save
from hf_efficient.cli.option_types import at_least, positive, share
from hf_efficient.cli.options import add_output_argument, given_options
from hf_efficient.cli.path_checks import check_folder, check_output, check_text_file
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = {
    "output": "the folder",
    "steps": "of training",
    "tokens": "that were learned from",
    "seconds": "of training",
    "loss": "at the end, nat",
}
TRAINING = (
    *("minutes", "steps", "sequence_length", "batch_size", "learning_rate"),
    *("divergence", "text_share", "lora_rank", "checkpoint_dir", "optimizer", "memory_gb"),
    *("gradient_checkpointing", "warm_up"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient recover`."""
    command.add_argument("model", help="folder of the compressed or pruned model")
    command.add_argument("--teacher", required=True, help="Hub id or local folder of the model from before")
    command.add_argument("--texts", help="text file to learn from, read whole (default: text that the teacher writes)")
    add_output_argument(command)
    command.add_argument("--minutes", type=positive, help="how long (default 10)")
    command.add_argument("--steps", type=at_least(1), help="how long, instead of --minutes")
    command.add_argument("--sequence-length", type=at_least(2), help="tokens of a window (default 512)")
    command.add_argument("--batch-size", type=at_least(1), help="windows a step (default 1)")
    command.add_argument("--learning-rate", type=positive, help="the largest of the schedule")
    command.add_argument("--divergence", help="from the teacher: forward, reverse, both, skewed_forward, ...")
    command.add_argument("--text-share", type=share("[0, 1]"), help="weight of the loss on the text itself, 0 to 1")
    command.add_argument(
        "--lora-rank", type=at_least(1), help="train adapters of this rank under the masks, and merge them"
    )
    command.add_argument("--optimizer", help="adamw, adamw_8bit or muon (default adamw)")
    command.add_argument("--memory-gb", type=positive, help="what activations may take; a step is split to fit")
    command.add_argument("--gradient-checkpointing", action="store_true", default=None, help="takes less memory")
    command.add_argument(
        "--warm-up", type=share("[0, 1]"), help="share of the time in which rounding comes into effect"
    )
    command.add_argument("--checkpoint-dir", help="folder where an interrupted recovery is resumed from")


def run(options: argparse.Namespace) -> Result:
    """Loads both models, trains and saves.

    Raises:
        ValueError: for arguments that are not allowed, those of paths before a model is loaded.
    """
    output = check_output("--output", options.output)
    texts = None if options.texts is None else [check_text_file("--texts", options.texts)]
    if options.checkpoint_dir is not None:
        check_folder("--checkpoint-dir", options.checkpoint_dir)
    check_model("model", options.model, causal=True)
    check_model("--teacher", options.teacher, causal=True)
    training = given_options(options, TRAINING)
    if options.steps is None:
        training.setdefault("minutes", 10.0)

    from hf_efficient import recover
    from hf_efficient.compression.recovery.options import check_arguments, read_windows
    from hf_efficient.integrations import hub

    check_arguments(**training)
    tokenizer = check_tokenizer("model", options.model)
    if texts is not None:
        texts = read_windows(texts, tokenizer, training.get("sequence_length", 512))
    model, teacher = load_causal_lm(options.model), load_causal_lm(options.teacher)
    done = recover(model, teacher, texts, **training)
    base_model = hub.recorded_base_model(options.model) or options.teacher

    def describe(model, folder):
        write_record(folder, options, "recovered", base_model, made_from=options.model)

    save(output, model, tokenizer, base_model, describe)
    document = {"output": str(output), **{key: done[key] for key in KEYS if key != "output"}}
    text = "{output}: {steps} steps over {tokens} tokens in {seconds:.0f} s, loss {loss:.3f}".format(**document)
    return Result(text, document)
