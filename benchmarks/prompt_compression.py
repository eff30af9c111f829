"""What do answers lose when half of the prompt is left out, and what does it cost to choose which half?

    python benchmarks/prompt_compression.py --tokens FOLDER [--prompts 2] [--seeds 3] [--keep 0.5] [--output FILE]

FOLDER has wiki_long.pt (int64 [16, 2048]): tokens of sample_text(). SmolLM2-135M-Instruct in bfloat16 is both the small
model that chooses and the one that answers. A prompt is a text of 256 tokens and a question that always stays:

- word, code: the needles of kv_retrieval.py in Wikipedia, at depths spread evenly over a seed's prompts.
- cloze: news stories, and a sentence of them up to a name or number that the stories say once: the answer.

For every way and task: the answer's mean -log p per token, less that after the whole prompt ("loss", nats); the
standard error of that over all prompts; the loss of each seed; whether greedy decoding gives the answer. For needles,
whether every token of the key and of the value is kept ("needle kept").

The baselines drop the same words as `PromptCompressor` could, at the same budget: "random"; "stop words" (and
punctuation) first, then at random; "Selective-Context" (https://arxiv.org/abs/2310.06201), the least self-information
first, by words and by whole sentences (its noun phrases need a parser). "seconds" are medians of the choice alone.
"""

import random
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import harness
import torch
from kv_retrieval import KINDS, questions

from hf_efficient import PromptCompressor
from hf_efficient.evaluation import environment, samples
from hf_efficient.prompts.groups import ends_sentence
from hf_efficient.prompts.surprisal import Context
from hf_efficient.prompts.tokens import tokenize


LENGTH = 256
TASKS = (*KINDS, "cloze")
STOP_WORDS = set(
    "a about above after again against all am an and any are as at be because been before being below between both but "
    "by can could did do does doing down during each few for from further had has have having he her here hers herself "
    "him himself his how i if in into is it its itself just me more most my myself no nor not now of off on once only "
    "or other our ours ourselves out over own same she should so some such than that the their theirs them themselves "
    "then there these they this those through to too under until up very was we were what when where which while who "
    "whom why will with would you your yours yourself yourselves".split()
)


@dataclass
class Task:
    """A text, a question, its answer, and what of the text the answer needs (characters)."""

    text: str
    question: str
    answer: str
    needed: list[tuple[int, int]]


def tasks(tokenizer, tokens: torch.Tensor, kind: str, number: int, seed: int) -> Iterator[Task]:
    if kind == "cloze":
        yield from clozes(tokenizer, number, seed)
        return
    rows = tokens[(torch.arange(number) + number * seed) % len(tokens)]
    for prompt, question, answer in questions(tokenizer, rows, number, kind, LENGTH, seed=100 + seed):
        text, asked, value = tokenizer.decode(prompt), tokenizer.decode(question).strip(), tokenizer.decode(answer)
        at = text.index(f"{asked}{value}.")
        key = asked.removeprefix(KINDS[kind]).removesuffix(" is")
        starts = at + len(KINDS[kind]), at + len(asked)
        needed = [(starts[0] + 1, starts[0] + len(key)), (starts[1] + 1, starts[1] + len(value))]
        yield Task(text, asked, value, needed)


def clozes(tokenizer, number: int, seed: int) -> Iterator[Task]:
    generator = random.Random(seed)
    stories = samples.sample_text("news").split("\n\n")
    generator.shuffle(stories)
    while number:
        text = ""
        while len(tokenizer.encode(text)) < LENGTH:
            text += "\n\n" * bool(text) + stories.pop().strip()
        found = []
        for sentence in re.finditer(r"[A-Z][^.!?\n]{60,}[.!?]", text):
            for name in re.finditer(r" ((?:[A-Z][a-z]+ ?){2,3}|[1-9][\d,]{2,})\b", sentence.group()):
                answer = name.group().rstrip()
                if name.start() > 40 and text.count(answer) == 1:
                    found.append((sentence.start(), sentence.start() + name.start(), answer))
        if found:
            start, end, answer = generator.choice(found)
            yield Task(text, f"Quote: {text[start:end]}", answer, [])
            number -= 1


def baselines(model, task: Task, ids: list[int], words: list, budget: int, generator) -> dict[str, tuple]:
    """way -> (indices of the kept words, seconds)."""

    def take(order) -> set[int]:
        left, kept = budget, set()
        for index in order:
            if len(words[index]) <= left:
                kept.add(index)
                left -= len(words[index])
        return kept

    start = time.perf_counter()
    shuffled = generator.sample(range(len(words)), len(words))
    is_stop = [is_stop_word(task.text[word.start : word.end]) for word in words]
    seconds = time.perf_counter() - start
    made = {
        "random": (take(shuffled), seconds),
        "stop words": (take(sorted(shuffled, key=lambda index: is_stop[index])), seconds),
    }
    start = time.perf_counter()
    parts = Context(model, [], None).surprisal(ids).split([len(word) for word in words])
    information = [part.mean().item() for part in parts]
    order = sorted(range(len(words)), key=lambda index: -information[index])
    made["Selective-Context, words"] = (take(order), time.perf_counter() - start)
    sentences = [[]]
    for index, word in enumerate(words):
        sentences[-1].append(index)
        if ends_sentence(task.text, word):
            sentences.append([])
    sentences = [sentence for sentence in sentences if sentence]
    sentences.sort(key=lambda sentence: -statistics.mean(part.item() for i in sentence for part in parts[i]))
    order = [index for sentence in sentences for index in sentence]
    made["Selective-Context, sentences"] = (take(order), time.perf_counter() - start)
    return made


def is_stop_word(word: str) -> bool:
    return word.strip().lower() in STOP_WORDS or not re.search(r"\w", word)


def compressed(compressor, task: Task, keep: float, generator) -> dict[str, tuple]:
    """way -> (text, kept positions, seconds)."""
    ids, words = tokenize(compressor.tokenizer, task.text, [])
    made = {"whole prompt": (task.text, set(range(len(ids))), 0.0)}
    with torch.no_grad():
        chosen = baselines(compressor.model, task, ids, words, round(keep * len(ids)), generator)
    for way, (kept, seconds) in chosen.items():
        text = "".join(task.text[words[index].start : words[index].end] for index in sorted(kept))
        made[way] = (text, {t for index in kept for t in range(words[index].first, words[index].stop)}, seconds)
    for way, question in (("ours", None), ("ours, question", task.question)):
        start = time.perf_counter()
        result = compressor.compress(task.text, keep=keep, question=question)
        made[way] = (result.text, set(result.positions), time.perf_counter() - start)
    return made


@torch.no_grad()
def answered(model, tokenizer, text: str, task: Task) -> tuple[float, bool]:
    """Mean -log p of the answer's tokens, in nats, and whether each is the likeliest."""
    prompt, answer = tokenizer.encode(f"{text}\n\n{task.question}"), tokenizer.encode(task.answer)
    logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item()
    return loss, logits.argmax(-1).tolist() == answer


def measure(compressor, tokens: torch.Tensor, kind: str, options) -> list[dict]:
    tokenizer, rows = compressor.tokenizer, {}
    for seed in range(options.seeds):
        generator = random.Random(seed)
        for task in tasks(tokenizer, tokens, kind, options.prompts, seed):
            offsets = tokenizer(task.text, return_offsets_mapping=True)["offset_mapping"]
            needed = {i for i, (a, b) in enumerate(offsets) for c, d in task.needed if a < d and b > c}
            found = compressed(compressor, task, options.keep, generator)
            whole = answered(compressor.model, tokenizer, task.text, task)[0]
            for way, (text, positions, seconds) in found.items():
                loss, hit = answered(compressor.model, tokenizer, text, task)
                row = dict(seed=seed, loss=loss - whole, hit=hit, kept=needed <= positions, seconds=seconds)
                rows.setdefault(way, []).append({**row, "saved": 1 - len(positions) / len(offsets)})
        print(
            kind, seed, {way: round(statistics.mean(r["loss"] for r in of), 3) for way, of in rows.items()}, flush=True
        )
    return [summary(way, kind, of) for way, of in rows.items()]


def summary(way: str, kind: str, rows: list[dict]) -> dict:
    losses = [row["loss"] for row in rows]
    seeds = sorted({row["seed"] for row in rows})
    return {
        "way": way,
        "task": kind,
        "prompts": len(rows),
        "loss": statistics.mean(losses),
        "loss_standard_error": statistics.stdev(losses) / len(losses) ** 0.5,
        "loss_by_seed": [statistics.mean(row["loss"] for row in rows if row["seed"] == seed) for seed in seeds],
        "answered": statistics.mean(row["hit"] for row in rows),
        **({} if kind == "cloze" else {"needle_kept": statistics.mean(row["kept"] for row in rows)}),
        "tokens_saved": statistics.mean(row["saved"] for row in rows),
        "seconds": statistics.median(row["seconds"] for row in rows),
    }


def main() -> None:
    parser = harness.parser(__doc__, "prompt_compression.json")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--prompts", type=int, default=2, help="of each task and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    options = parser.parse_args()
    tokens = torch.load(f"{options.tokens}/wiki_long.pt", weights_only=True)
    compressor = PromptCompressor(harness.load(), harness.tokenizer())
    record = {"environment": environment.describe(), "keep": options.keep, "records": []}
    for kind in options.tasks:
        record["records"] += harness.rounded(measure(compressor, tokens, kind, options))
        harness.write(options.output, record)


if __name__ == "__main__":
    main()
