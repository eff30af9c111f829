"""The text that draft heads learn from: the target's answers to prompts, on a CPU with the hidden state before every
token."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import GenerationConfig
from transformers.utils import logging

from hf_efficient.generation.decode import speculative_generate
from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.generation.speculation.options import Speculation
from hf_efficient.generation.training.prompts import default_prompts
from hf_efficient.generation.training.rows import Row, save_tensors
from hf_efficient.generation.training.target_states import are_kept
from hf_efficient.observers.hooks import frozen
from hf_efficient.tensor_files import check_whole


MAX_PROMPT_TOKENS = 64  # of a prompt that the model writes itself
_MARK = "\N{SNOWMAN}"  # stands for the user's turn in the chat template


class Recorder(Drafter):
    """Proposes nothing, and keeps the target's hidden states.

    states: by index in the batch, for answers of more than one token: the states that predicted its tokens, from the
        second position of the prompt on, as a list of [positions, hidden size * (1 + layers)] in order.
    """

    reads_hidden = True
    max_tokens = 1

    def __init__(self, layers: tuple[int, ...] = ()):
        self.reads_layers = layers
        self.states: dict[int, list[torch.Tensor]] = {}

    def begin(self, sequences, hidden=None) -> None:
        self._sequences = sequences
        self.states = {b: [prompt] for b, prompt in zip(sequences.live, hidden) if sequences.unfinished(b)}

    def propose(self, limits, nodes):
        return None

    def accept(self, tokens, hidden=None) -> None:
        for b, new, states in zip(self._sequences.live, tokens, hidden):
            if b in self.states:
                self.states[b].append(states[: len(new)])

    def select(self, rows) -> None:
        pass


def generate_text(
    model,
    tokenizer,
    prompts: list[str] | None,
    folder: Path,
    number: int,
    batch_size: int,
    max_new_tokens: int,
    seed: int,
) -> Path:
    """Answers batch `number` of the prompts, which repeat when they run out: every second batch greedily, the others
    sampled at temperature 0.8. Without `prompts`, of four batches two take `default_prompts` and two `own_prompts`.

    Returns the path of a safetensors file of all rows, one after the other and without padding:
        tokens: int64, prompts and answers.
        hidden: [., hidden size * (1 + layers)] in the model's dtype, one less a row: the i-th predicted token i + 1.
            Not there where `are_kept` says no: then transformers' own loop generates, which takes large batches.
        lengths, prompts: int64 [rows], tokens of each row and of its prompt.
    A file that exists already is kept: the same arguments make the same file.
    """
    path = folder / f"text-{number}.safetensors"
    if path.exists():
        check_whole(path)
        return path
    given = default_prompts(seed) if prompts is None else prompts
    seed = seed * 1_000_003 + number
    chosen = own_prompts(model, tokenizer, batch_size, seed) if prompts is None and number % 4 > 1 else []
    chosen += [given[(number * batch_size + i) % len(given)] for i in range(batch_size - len(chosen))]
    inputs = encode(tokenizer, chosen, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0} if number % 2 else {"do_sample": False}
    options = {**sampling, "max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    rows = (_recorded if are_kept(model) else _generated)(model, inputs, seed, options)
    if not rows:
        raise ValueError(
            f"{type(model).__name__} ends all {len(chosen)} answers of a batch at once: give other prompts, or a "
            "larger batch_size"
        )
    tensors = {
        "tokens": torch.cat([row.tokens for row in rows]),
        "lengths": torch.tensor([len(row.tokens) for row in rows]),
        "prompts": torch.tensor([row.prompt for row in rows]),
    }
    if are_kept(model):
        tensors["hidden"] = torch.cat([row.hidden for row in rows]).to(model.dtype)
    save_tensors(path, tensors)
    return path


def _recorded(model, inputs, seed: int, options: dict) -> list[Row]:
    """Answers of more than one token, with their hidden states."""
    layers = DraftHeads.layers_read(model.config.get_text_config(decoder=True).num_hidden_layers)
    recorder, width, rows = Recorder(layers), inputs["input_ids"].shape[1], []
    ids = _generate(model, inputs, recorder, seed, **options)
    for b, parts in recorder.states.items():
        padding = width - int(inputs["attention_mask"][b].sum())
        states = torch.cat(parts)[padding:]
        rows.append(Row(ids[b, padding : padding + len(states) + 1], states, width - padding))
    return rows


def _generated(model, inputs, seed: int, options: dict) -> list[Row]:
    """Answers of more than one token."""
    ids, ends = _generate(model, inputs, None, seed, **options), model.generation_config.eos_token_id
    width, paddings = inputs["input_ids"].shape[1], (inputs["attention_mask"] == 0).sum(1).tolist()
    counts = torch.full((len(ids),), ids.shape[1] - width)
    if ends is not None:  # what comes after an end is padding
        ended = torch.isin(ids[:, width:], torch.tensor(ends, device=ids.device)).long().cumsum(1)
        counts = 1 + (ended[:, :-1] == 0).sum(1).cpu()
    rows = zip(ids.cpu(), counts.tolist(), paddings)
    return [Row(row[skip : width + count], None, width - skip) for row, count, skip in rows if count > 1]


def own_prompts(model, tokenizer, count: int, seed: int) -> list[str]:
    """Prompts that a chat model writes itself: its continuations of the beginning of a user's turn, sampled from its 50
    most probable tokens. They are like those it was trained on (Xu et al. 2024, "Magpie: Alignment Data Synthesis from
    Scratch by Prompting Aligned LLMs with Nothing").

    Returns at most `count` different prompts: those of `count` that end within `MAX_PROMPT_TOKENS`. None without a chat
    template or an end-of-turn token.
    """
    end = model.generation_config.eos_token_id
    if tokenizer.chat_template is None or end is None:
        return []
    turn = _as_chat(tokenizer, _MARK).partition(_MARK)[0]
    inputs = tokenizer([turn] * count, return_tensors="pt", add_special_tokens=False).to(model.device)
    settings = GenerationConfig(
        do_sample=True,
        top_k=50,
        max_new_tokens=MAX_PROMPT_TOKENS,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    recorder = Recorder() if are_kept(model) else None
    written = _generate(model, inputs, recorder, seed, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
    ended = torch.isin(written, torch.tensor(end, device=written.device)).any(1).tolist()
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    return list(dict.fromkeys(text.strip() for text, whole in zip(texts, ended) if whole and text.strip()))


def collect_text(
    model,
    tokenizer,
    prompts: list[str] | None,
    folder: Path,
    num_tokens: int,
    count: int | None = None,
    is_late=None,
    **answers,
) -> list[Path]:
    """Calls `generate_text` batch by batch until the answers have `num_tokens` tokens.

    count: the number of batches of an earlier run, after which this one ends as well. is_late: without `count`, the
    first batch after which it returns True is the last.
    """
    files, answered = [], 0
    with logging.tqdm(total=num_tokens, desc="generating text", unit="token") as bar:
        while answered < num_tokens:
            files.append(generate_text(model, tokenizer, prompts, folder, len(files), **answers))
            with safe_open(files[-1], "pt") as file:
                new = int((file.get_tensor("lengths") - file.get_tensor("prompts")).sum())
            answered += new
            bar.update(new)
            if len(files) == count or (count is None and is_late is not None and is_late()):
                break
    return files


def _generate(model, inputs, recorder: Recorder | None, seed: int, **options) -> torch.Tensor:
    """Token by token, seeded. Sequences that end leave the batch, as they do with any drafter. Without a `recorder`,
    by transformers' own loop."""
    if recorder is not None:
        draft = Speculation(recorder, adaptive=False)
        options |= {"custom_generate": speculative_generate, "draft_model": draft}
    with torch.random.fork_rng(), frozen(model):
        torch.manual_seed(seed)
        return model.generate(**inputs, **options)


def _as_chat(tokenizer, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def encode(tokenizer, prompts: list[str], **options):
    """What `tokenizer` makes of the prompts, in its chat template where it has one. options: of its call."""
    is_chat = tokenizer.chat_template is not None
    prompts = [_as_chat(tokenizer, prompt) for prompt in prompts] if is_chat else prompts
    return tokenizer(prompts, add_special_tokens=not is_chat, **options)
