"""The text draft heads learn from: what the target itself answers to prompts, with the hidden state before every token."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from hf_efficient.files import atomic_write
from hf_efficient.generation.decode import speculative_generate
from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.generation.speculation.options import Speculation
from hf_efficient.generation.training.own_prompts import own_prompts
from hf_efficient.generation.training.prompts import default_prompts
from hf_efficient.generation.training.recorder import Recorder


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
    """Answers batch `number` of the prompts (which repeat when they run out): every second batch greedily, the others
    sampled at temperature 0.8. Rows that end leave the batch. Without `prompts`, of four batches two ask `default_prompts`
    and two what the model asks itself.

    Returns the path of a safetensors file of the rows, one after the other and without padding: `tokens` int64 (prompt and
    answer), `hidden` [., hidden size * (1 + layers)] in the model's dtype (one less a row: the i-th predicted token i + 1),
    `lengths` and `prompts` int64 [rows], the tokens of a row and of its prompt. A file that is already there is kept: the same arguments make it again.
    """
    path = folder / f"text-{number}.safetensors"
    if path.exists():
        return path
    given = default_prompts(seed) if prompts is None else prompts
    seed = seed * 1_000_003 + number
    chosen = own_prompts(model, tokenizer, batch_size, seed) if prompts is None and number % 4 > 1 else []
    chosen += [given[(number * batch_size + i) % len(given)] for i in range(batch_size - len(chosen))]
    inputs = _encode(tokenizer, chosen).to(model.device)
    recorder = Recorder(DraftHeads.layers_read(model.config.get_text_config(decoder=True).num_hidden_layers))
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0} if number % 2 else {"do_sample": False}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = model.generate(
            **inputs,
            **sampling,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            custom_generate=speculative_generate,
            draft_model=Speculation(recorder, adaptive=False),
        )
    width = inputs["input_ids"].shape[1]
    tokens, hidden, lengths, prompt_lengths = [], [], [], []
    for b, parts in recorder.states.items():
        padding = width - int(inputs["attention_mask"][b].sum())
        states = torch.cat(parts)[padding:]
        tokens.append(ids[b, padding : padding + len(states) + 1])
        hidden.append(states)
        lengths.append(len(states) + 1)
        prompt_lengths.append(width - padding)
    tensors = {"tokens": torch.cat(tokens), "hidden": torch.cat(hidden).to(model.dtype)}
    tensors |= {"lengths": torch.tensor(lengths), "prompts": torch.tensor(prompt_lengths)}
    with atomic_write(path) as partial:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
    return path


def collect_text(
    model,
    tokenizer,
    prompts: list[str] | None,
    folder: Path,
    num_tokens: int,
    count: int | None = None,
    late=None,
    **answers,
) -> list[Path]:
    """`generate_text`, batch by batch, until the answers have `num_tokens` tokens. It ends earlier after the batch at which
    `late()` becomes true; `count`, when given, is the number of batches where it ended last time."""
    files, answered = [], 0
    with tqdm(total=num_tokens, desc="generating text", unit="token") as bar:
        while answered < num_tokens:
            files.append(generate_text(model, tokenizer, prompts, folder, len(files), **answers))
            with safe_open(files[-1], "pt") as file:
                new = int((file.get_tensor("lengths") - file.get_tensor("prompts")).sum())
            answered += new
            bar.update(new)
            if len(files) == count or (count is None and late is not None and late()):
                break
    return files


class Row:
    """One answer: tokens int64 [n], hidden [n - 1, hidden_size * (1 + layers)], and how many of the tokens are the prompt."""

    def __init__(self, tokens: torch.Tensor, hidden: torch.Tensor, prompt: int):
        self.tokens, self.hidden, self.prompt = tokens, hidden, prompt


def load_rows(files: list[Path]) -> list[Row]:
    """All rows of the files; hidden states stay on disk until they are used (memory-mapped)."""
    rows = []
    for file in files:
        shard = load_file(file)
        lengths = shard["lengths"].tolist()
        tokens = shard["tokens"].split(lengths)
        hidden = shard["hidden"].split([length - 1 for length in lengths])
        rows += [Row(*parts) for parts in zip(tokens, hidden, shard["prompts"].tolist())]
    return rows


def frequent_tokens(rows: list[Row], vocab_size: int, count: int) -> torch.Tensor:
    """The `count` tokens that the answers hold most often, int64, most frequent first; ties by number."""
    answers = torch.cat([row.tokens[row.prompt :] for row in rows])
    return torch.bincount(answers, minlength=vocab_size).argsort(descending=True, stable=True)[:count].clone()


def _encode(tokenizer, prompts: list[str]):
    if tokenizer.chat_template is not None:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
    return tokenizer(
        prompts,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=tokenizer.chat_template is None,
    )
