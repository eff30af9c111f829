"""Draft heads for a model, from nothing but the model: it writes the text, the heads learn from it."""

import math
import shutil
import time
from pathlib import Path

import torch

from hf_efficient.generation.drafters.draft_heads import KINDS, class_of
from hf_efficient.generation.model_traits import check_ragged, decoder_layers
from hf_efficient.generation.training.distill import BATCH_ROWS, batch_rows, distill, measure, step_seconds
from hf_efficient.generation.training.progress import Progress, fingerprint
from hf_efficient.generation.training.prompts import check_prompts, default_prompts
from hf_efficient.generation.training.rows import frequent_tokens, load_rows, split_rows
from hf_efficient.generation.training.target_states import hidden_of
from hf_efficient.generation.training.text import collect_text, encode


HELD_OUT = 20  # the answers to one prompt in so many are held out: accuracies are measured on them
DRAFT_TOKENS = 4096  # which heads guess from by default
FIT_ROWS = 1024  # answers of the least-squares fit that training starts from


def train_draft(
    model,
    tokenizer,
    output,
    kind: str = "eagle",
    prompts: list[str] | None = None,
    num_tokens: int = 300_000,
    epochs: int = 5,
    minutes: float | None = None,
    draft_tokens: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    learning_rate: float = 5e-4,
    seed: int = 0,
    cache=None,
    *,
    draft=None,
    layers: int | None = None,
    describe=None,
):
    """Trains draft heads or a draft model for `model` by distillation and saves them in `output`.
    `generate(assistant_model=...)` uses them.

    The model answers the prompts, half of them greedily and half sampled. Heads of `kind` then learn the model's
    distributions on these answers (Zhou et al. 2023, "DistillSpec"). On a CPU the hidden states of every token are
    saved: `3 * num_tokens * hidden_size` numbers of the model's dtype (the input of the output head and the outputs of
    two inner layers), and about a fifth of that for the prompts. On an accelerator they are computed again in every
    step, and a step has up to 128 answers instead of 8. It then learns from millions of tokens in minutes, with a large
    `batch_size` and `num_tokens`, and a larger `learning_rate`.

    With kind="model" the student is a small model, given as `draft` or made of `layers` of the target's layers. It
    learns the target's answers, and in half of the steps text that it drafts itself, by the Jensen-Shannon divergence
    (DistillSpec, https://arxiv.org/abs/2310.08461).

    Args:
        model: a decoder-only causal LM.
        tokenizer: its tokenizer, with a padding token. Its chat template, if any, wraps every prompt.
        output: folder for the heads or the model.
        kind: "eagle" or "medusa" heads, or "model".
        prompts: what to ask; by default 7,899 everyday chat prompts and, if the tokenizer has a chat template, as many
            again that the model writes itself.
        num_tokens: tokens of answers to learn from.
        epochs: how often each answer is seen.
        minutes: a limit on the time. Text generation ends after half of it, and training fits into the rest. None: no
            limit. With kind="model" training takes all of the rest, whatever `epochs` is, and a resumed run keeps the
            minutes that it had for training.
        draft: for kind="model", a model of the target's vocabulary, which is trained in place.
        layers: for kind="model" instead of `draft`: the number of the target's layers to keep (`prune_structure`).
        draft_tokens: the heads guess from this many tokens, the most frequent ones of the answers; by default 4096. A
            model guesses from all.
        max_new_tokens: the longest answer, in tokens.
        batch_size: answers that are generated at a time.
        learning_rate: the peak of its schedule.
        seed: of the sampled answers and of the order of training.
        cache: folder for text and progress. An interrupted run continues from it, with the same result up to rounding
            in text that is generated again. Heads of the other kind take their text from it. By default
            `<output>-progress`, which is deleted at the end.
        describe: called with (the heads or the model, the folder that is being written) to add files.

    Returns:
        the heads, with accuracies measured on the answers to held-out prompts (one in twenty); or the model, with
        `expected_acceptance` measured there: the probability that a drafted token is accepted at temperature 1.

    Raises:
        ValueError: before anything is computed, for arguments that are not allowed, or a cache of another run; heads
            whose training diverged.
    """
    is_model = kind == "model"
    if kind not in (*KINDS, "model"):
        raise ValueError(f"kind={kind!r} is not one of {[*sorted(KINDS), 'model']}")
    if not is_model and (draft is not None or layers is not None):
        raise ValueError(f"kind={kind!r} has no draft model: draft and layers are for kind='model'")
    if is_model and draft_tokens is not None:
        raise ValueError(f"draft_tokens={draft_tokens}: a draft model guesses from all tokens; leave it out")
    draft_tokens = DRAFT_TOKENS if draft_tokens is None else draft_tokens
    _check_integers(num_tokens=num_tokens, epochs=epochs, draft_tokens=draft_tokens, batch_size=batch_size)
    _check_integers(3, max_new_tokens=max_new_tokens)
    _check_integers(0, seed=seed)
    _check_numbers(learning_rate=learning_rate)
    if minutes is not None:
        _check_numbers(minutes=minutes)
    if seed >= 1 << 32:
        raise ValueError(f"seed={seed}: expected less than 2**32")
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no padding token: set tokenizer.pad_token")
    _check_texts(prompts)
    check_ragged(model, batch_size, "model")
    decoder_layers(model)  # training reads hidden states of some
    output = Path(output)
    if output.is_file():
        raise ValueError(f"output={str(output)!r} is a file: give a folder")
    prompts = None if prompts is None else list(prompts)
    start = time.perf_counter()
    answers = {"batch_size": batch_size, "max_new_tokens": max_new_tokens, "seed": seed}
    run = {"model": fingerprint(model), "prompts": prompts, "num_tokens": num_tokens, **answers}
    if is_model:
        from hf_efficient.compression.distillation.draft_model import LENGTH, check_draft, train_draft_model

        check_draft(model, draft, layers)
        run["draft"] = layers if draft is None else fingerprint(draft)
    given = default_prompts(seed) if prompts is None else prompts
    lengths = [len(row[: LENGTH // 2] if is_model else row) for row in encode(tokenizer, given)["input_ids"]]
    for reader in (model, draft) if draft is not None else (model,):
        check_prompts(reader, given, lengths, max_new_tokens)
    folder = output.with_name(output.name + "-progress") if cache is None else Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(folder, run)
    if is_model:
        how = {"num_tokens": num_tokens, "epochs": epochs, "minutes": minutes, "learning_rate": learning_rate}
        how |= {"draft": draft, "layers": layers, "prompts": prompts, "describe": describe, **answers}
        made = train_draft_model(model, tokenizer, output, folder, progress, **how)
        if cache is None:
            shutil.rmtree(folder)
        return made
    is_late = None if minutes is None else lambda: time.perf_counter() - start > 30 * minutes
    files = collect_text(model, tokenizer, prompts, folder, num_tokens, progress.get("files"), is_late, **answers)
    progress.set("files", len(files))
    held_out, rows = split_rows(load_rows(files), HELD_OUT)
    if not rows:
        raise ValueError("fewer than two answers have more than one token: ask for more num_tokens, or other prompts")
    count = batch_rows(model, len(rows))
    heads = _fitted_heads(kind, model, rows, draft_tokens, count, seed)
    steps = epochs * -(-len(rows) // count)
    if minutes is not None:
        left = 60 * minutes - (time.perf_counter() - start)
        name = f"{kind} steps" if count == BATCH_ROWS else f"{kind} steps of {count} answers"
        fitting = progress.get(name) or int(left / step_seconds(heads, model, rows))
        steps = max(1, min(steps, fitting))
        progress.set(name, steps)
    distill(heads, model, rows, folder, steps, learning_rate, seed)
    if not all(parameter.isfinite().all() for parameter in heads.parameters()):
        raise ValueError(f"learning_rate={learning_rate}: training diverged, its weights are NaN or infinite; lower it")
    measure(heads, model, held_out)
    heads.save_pretrained(output, describe and (lambda new: describe(heads, new)))
    if cache is None:
        shutil.rmtree(folder)
    return heads


def _fitted_heads(kind: str, model, rows: list, draft_tokens: int, count: int, seed: int):
    """Heads for the most frequent tokens of `rows`, fitted to the first of them, `count` at once."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        heads = class_of(kind).for_model(model, min(draft_tokens, vocab_size))
    heads.draft_tokens.copy_(frequent_tokens(rows, vocab_size, len(heads.draft_tokens)))
    heads.bind(model)
    parts = [rows[start : start + count] for start in range(0, min(len(rows), FIT_ROWS), count)]
    heads.fit((row.tokens, hidden) for part in parts for row, hidden in zip(part, hidden_of(model, part)))
    return heads


def _check_integers(least: int = 1, **arguments) -> None:
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")


def _check_numbers(**arguments) -> None:
    for name, value in arguments.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise ValueError(f"{name}={value!r}: expected more than 0, and a number")


def _check_texts(prompts) -> None:
    if prompts is not None and not prompts:
        raise ValueError("prompts is empty: give at least one, or None for the default prompts")
    is_list = isinstance(prompts, (list, tuple)) and all(isinstance(prompt, str) for prompt in prompts)
    if prompts is not None and not is_list:
        raise ValueError(f"prompts={prompts!r:.60}: expected a list of strings, or None for the default prompts")
