"""`hf-efficient train-draft`: trains draft heads or a draft model for a model on text that the model generates."""

import argparse
import json
from pathlib import Path

from hf_efficient.cli.models import check_model, check_tokenizer, load_causal_lm
from hf_efficient.cli.option_types import at_least, positive
from hf_efficient.cli.options import add_output_argument, given_options
from hf_efficient.cli.path_checks import check_folder, check_output, check_outside, check_text_file
from hf_efficient.cli.record import write_record
from hf_efficient.cli.result import Result


KEYS = {
    "output": "the folder",
    "parameters": "of the heads",
    "accuracies": "for each depth, the shares of tokens that the first, second, ... guess hits; a model has one share",
}
TRAINING = ("num_tokens", "epochs", "minutes", "draft_tokens", "max_new_tokens", "batch_size", "learning_rate", "seed")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient train-draft`."""
    command.add_argument("model", help="Hub id or local folder of the target")
    add_output_argument(command, "folder for the heads or the draft model")
    command.add_argument(
        "--kind", choices=("eagle", "medusa", "model"), default="eagle", help="what to train (default eagle)"
    )
    command.add_argument("--draft", help="for --kind model: folder or Hub id of a small model to train")
    command.add_argument("--layers", type=at_least(1), help="for --kind model, instead: layers of the target to keep")
    command.add_argument(
        "--prompts",
        help='file with one prompt a line, or .jsonl with "prompt" or "text" in each line (default: built in, and '
        "questions that the model generates)",
    )
    command.add_argument("--num-tokens", type=at_least(1), help="tokens of answers to learn from (default 300000)")
    command.add_argument("--epochs", type=at_least(1), help="how often each answer is seen (default 5)")
    command.add_argument("--minutes", type=positive, help="limit on the time, half of it for generating text")
    command.add_argument(
        "--draft-tokens", type=at_least(1), help="frequent tokens that the heads guess from (default 4096)"
    )
    command.add_argument("--max-new-tokens", type=at_least(3), help="longest answer (default 256)")
    command.add_argument("--batch-size", type=at_least(1), help="answers generated at a time (default 64)")
    command.add_argument("--learning-rate", type=positive, help="peak of the schedule (default 0.0005)")
    command.add_argument("--seed", type=at_least(0, (1 << 32) - 1), help="of sampling and of the order (default 0)")
    command.add_argument(
        "--cache", help="folder that keeps text and progress (default: OUTPUT-progress, deleted at the end)"
    )


def run(options: argparse.Namespace) -> Result:
    """Trains and saves the heads, and prints the accuracy of their guesses.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded where they show.
    """
    output = check_output("--output", options.output, replaced=False)
    check_outside(options, "cache")
    if options.cache is not None:
        check_folder("--cache", options.cache)
    check_model("model", options.model, causal=True)
    is_model = options.kind == "model"
    if (options.draft is not None) + (options.layers is not None) != is_model:
        raise ValueError("--kind model needs one of --draft and --layers, and no other kind has them")
    if options.draft is not None:
        check_model("--draft", options.draft, causal=True)
    prompts = None if options.prompts is None else _read_prompts(options.prompts)

    from hf_efficient import train_draft

    tokenizer = check_tokenizer("model", options.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model, training = load_causal_lm(options.model), given_options(options, TRAINING)
    if is_model:
        training |= {"layers": options.layers, "draft": options.draft and load_causal_lm(options.draft)}

    def describe(made, folder):
        if is_model:
            write_record(folder, options, "recovered", options.model, made_from=options.draft)
        else:
            write_record(folder, options, "draft heads", options.model, accuracies=_accuracies(made))

    training |= {"prompts": prompts, "cache": options.cache, "describe": describe}
    heads = train_draft(model, tokenizer, output, kind=options.kind, **training)
    if is_model:
        return _report_model(output, heads)
    count, accuracies = sum(p.numel() for p in heads.parameters()), _accuracies(heads)
    lines = [f"{output}: {count / 1e6:.1f} million parameters"]
    for depth, shares in enumerate(accuracies, 1):
        lines.append(
            f"guess {depth}: right {shares[0]:.1%} of the time, among the first {len(shares)} {sum(shares):.1%}"
        )
    return Result("\n".join(lines), dict(zip(KEYS, (str(output), count, accuracies))))


def _accuracies(heads) -> list[list[float]]:
    return [[*map(float, each)] for each in heads.accuracies]


def _report_model(output: Path, draft) -> Result:
    count, accuracies = draft.num_parameters(), [[draft.expected_acceptance]]
    text = f"{output}: {count / 1e6:.1f} million parameters, {draft.expected_acceptance:.1%} of drafts accepted"
    return Result(text, dict(zip(KEYS, (str(output), count, accuracies))))


def _read_prompts(given: str) -> list[str]:
    lines, path = [line for line in check_text_file("--prompts", given).splitlines() if line.strip()], Path(given)
    if path.suffix == ".jsonl":
        lines = [_prompt(path, number, line) for number, line in enumerate(lines, 1)]
    if not lines:
        raise ValueError(f"--prompts {path}: the file is empty")
    return lines


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"--prompts {path}, line {number}: no JSON ({error})") from None
    if isinstance(value, dict):
        value = value.get("prompt", value.get("text"))
    if not isinstance(value, str):
        raise ValueError(f'--prompts {path}, line {number}: expected a text, or an object with "prompt" or "text"')
    return value
