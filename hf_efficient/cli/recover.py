"""`hf-efficient recover`: trains a pruned model to say again what it said before."""

import argparse
from pathlib import Path

from hf_efficient.cli.paths import check_paths


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
    command.add_argument("--minutes", type=float, help="how long (default 10)")
    command.add_argument("--steps", type=int, help="how long, instead of --minutes")
    command.add_argument("--sequence-length", type=int, help="tokens of a window (default 512)")
    command.add_argument("--batch-size", type=int, help="windows a step (default 1)")
    command.add_argument("--learning-rate", type=float, help="the largest of the schedule")
    command.add_argument("--divergence", help="from the teacher: forward, reverse or both (default forward)")
    command.add_argument("--text-share", type=float, help="how much the text itself counts beside the teacher, 0 to 1")
    command.add_argument("--lora-rank", type=int, help="train adapters of this rank under the masks, and merge them")
    command.add_argument("--checkpoint-dir", help="folder where an interrupted recovery is resumed from")


def run(options: argparse.Namespace) -> None:
    """Loads both models, trains and saves.

    Raises:
        ValueError: for arguments that are not allowed, those of paths before a model is loaded.
    """
    output, texts = Path(options.output), Path(options.texts)
    check_paths(output, model=options.model, teacher=options.teacher)
    if not texts.is_file():
        raise ValueError(f"--texts {texts}: there is no such file")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_efficient import recover
    from hf_efficient.integrations.beside import new_folder

    given = {name: getattr(options, name) for name in TRAINING if getattr(options, name) is not None}
    if options.steps is None:
        given.setdefault("minutes", 10.0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    device_map = "cuda" if torch.cuda.is_available() else None
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map=device_map)
        for name in (options.model, options.teacher)
    )
    done = recover(model, teacher, [texts.read_text(encoding="utf-8")], tokenizer, **given)
    with new_folder(output) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    print(
        f"{output}: {done['steps']} steps over {done['tokens']} tokens in {done['seconds']:.0f} s, loss {done['loss']:.3f}"
    )
