"""`hf-efficient recover`: trains a pruned model to say again what it said before."""

import argparse

from hf_efficient.cli.numbers import at_least, positive, share
from hf_efficient.cli.paths import check_folder, check_model, check_output, check_text_file, check_tokenizer


TRAINING = (
    *("minutes", "steps", "sequence_length", "batch_size", "learning_rate"),
    *("divergence", "text_share", "lora_rank", "checkpoint_dir"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient recover`."""
    command.add_argument("model", help="folder of the pruned model")
    command.add_argument("--teacher", required=True, help="Hub id or local folder of the model from before pruning")
    command.add_argument("--texts", required=True, help="text file to learn from, read whole")
    command.add_argument("--output", required=True, help="folder to write; must not exist or be empty")
    command.add_argument("--minutes", type=positive, help="how long (default 10)")
    command.add_argument("--steps", type=at_least(1), help="how long, instead of --minutes")
    command.add_argument("--sequence-length", type=at_least(2), help="tokens of a window (default 512)")
    command.add_argument("--batch-size", type=at_least(1), help="windows a step (default 1)")
    command.add_argument("--learning-rate", type=positive, help="the largest of the schedule")
    command.add_argument("--divergence", help="from the teacher: forward, reverse or both (default forward)")
    command.add_argument(
        "--text-share", type=share("[0, 1]"), help="how much the text itself counts beside the teacher, 0 to 1"
    )
    command.add_argument(
        "--lora-rank", type=at_least(1), help="train adapters of this rank under the masks, and merge them"
    )
    command.add_argument("--checkpoint-dir", help="folder where an interrupted recovery is resumed from")


def run(options: argparse.Namespace) -> None:
    """Loads both models, trains and saves.

    Raises:
        ValueError: for arguments that are not allowed, those of paths before a model is loaded.
    """
    output, texts = check_output("--output", options.output), check_text_file("--texts", options.texts)
    if options.checkpoint_dir is not None:
        check_folder("--checkpoint-dir", options.checkpoint_dir)
    check_model("model", options.model, causal=True)
    check_model("--teacher", options.teacher, causal=True)
    given = {name: getattr(options, name) for name in TRAINING if getattr(options, name) is not None}
    if options.steps is None:
        given.setdefault("minutes", 10.0)

    import torch
    from transformers import AutoModelForCausalLM

    from hf_efficient import recover
    from hf_efficient.compression.recovery import check_arguments, read_windows
    from hf_efficient.files import new_folder
    from hf_efficient.integrations import hub

    check_arguments(**given)
    tokenizer = check_tokenizer("model", options.model)
    windows = read_windows([texts], tokenizer, given.get("sequence_length", 512))
    device_map = "cuda" if torch.cuda.is_available() else None
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map=device_map)
        for name in (options.model, options.teacher)
    )
    done = recover(model, teacher, windows, **given)
    with new_folder(output) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        hub.record_base_model(aside, output.name, hub.recorded_base_model(options.model) or options.teacher)
    print(
        f"{output}: {done['steps']} steps over {done['tokens']} tokens in {done['seconds']:.0f} s, loss {done['loss']:.3f}"
    )
