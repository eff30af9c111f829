"""Speculative against plain decoding of SmolLM2-135M-Instruct on a CPU, on prompts whose answers copy from them
(summarise, rewrite, edit code) and on open chat. Writes benchmarks/results/speculation_cpu.json.

    python benchmarks/speculation.py [--quick] [--bits 4] [--threads 2] [--repeats 5] [--prompts 8] [--heads FOLDER]
        [--parts copying-1 copying-8 long-1 chat-1 chat-8] [--ways NAME ...] [--calls N] [--output FILE]

Prompts: the copying ones, and those of about 2,048 tokens (`long`), were chosen by the answers of plain decoding,
before anything was timed: at least half of the tokens of each answer stand in the prompt within 8 tokens in a row
(`copied`).
`ceiling` bounds the tokens per step of any lookup: after each token it drafts whole the longest right continuation of
at least 3 tokens that stands anywhere in the text so far. Batch 1 runs the prompts one by one, batch 8 all of a kind at
once.

Ways to generate, greedy, whole calls of generate() with the prefill:
- generate: without a drafter.
- transformers: plain generate() of a model that this package has not touched (sdpa, DynamicCache).
- transformers prompt_lookup N, transformers assistant: its own speculation (batch 1); goals compare with the faster N.
- the others: our drafters. `both` is the best of prompt lookup and token recycling; `assistant` drafts with the same
  4-bit model as transformers' assistant; `heads` are those of --heads, trained by `hf-efficient train-draft`, and
  `heads int4` are the same with int4 matrices.
The model is in bf16. With --bits 4 it has int4 weights, an int8 output head and inputs rounded to int8 (then there is
no assistant: it would be the target).

Every repeat takes the prompts in turn, and each prompt all ways, so that other work on the machine hits all of them.
Before the first repeat our ways run twice, as their forwards are captured then, and transformers' ways once on
the first prompt; these runs are not counted.

A record has tokens/s (of the median of each prompt's seconds; beside it the slowest and fastest repeat) and their ratio
to `generate` and `transformers`; `decoding_ratio`, to `generate` without the prefill; tokens per step; acceptance by
position (mean over prompts); seconds of draft, verification and host; `host_share`: the share of these seconds spent
neither in the drafter nor in the target's forward (bookkeeping of the cache around a forward counts as forward).
`identical` counts the answers with the tokens of plain decoding (`generate`, or `transformers` for its own): in bf16
nearly equal logits may fall differently when several tokens are computed at once, so nothing is asserted.

`v` and `c` are the seconds of verifying and of drafting in a step by those of a plain step. `h200` is a model, not a
measurement: Llama-3.1-8B in bfloat16, with the acceptance and the drafts of this record. There v is 1 up to the tokens
whose products take as long as reading the weights, by the data sheet; drafters on the host take their seconds of here,
heads and models their share c. `speedup` is tokens per step by v + c.

With --parts and --ways the other records stay in the file, if they are of the same commit and weights. Each says with
which `command` it was made, and of how many `texts`.

With --calls N there are N repeats, and `calls` says of each what a call gained: the seconds of plain calls right before
and right after it (their mean) by its own, their median and quartiles, and what all of them together gained. Every
other repeat takes the ways in reverse, so neither what ran before nor a machine that gets faster or slower favours one.
That of `generate` is of equal calls: as far as it is from 1, other work on the machine moves the others. No drafter
should take longer than none over 20 calls.
"""

import copy
import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import harness
import torch
from harness import load, rounded
from speculation_model import add_model
from speculation_texts import CHAT, copying, long_contexts, rows_of, traits_of

import hf_efficient
from hf_efficient.evaluation import environment, samples
from hf_efficient.generation.output import SpeculativeOutput, Statistics
from hf_efficient.generation.ragged_model import RaggedModel


GUESSES, THEIRS = 32, (10, 32)  # prompt_lookup_num_tokens: as many as we may, and what transformers always takes
# Tokens at most: of the copying answers all but one end before.
NEW = {"copying": 512, "long": 256, "chat": 128}
PARTS = ("copying-1", "copying-8", "long-1", "chat-1", "chat-8")
WARM_UPS, COUNTED = 2, ("draft_seconds", "verify_seconds", "host_seconds")


class Way(NamedTuple):
    """A way to generate. plain: the way whose tokens are the right ones. most: its largest batch."""

    plain: str
    most: int
    generate: Callable


class Measured(NamedTuple):
    """seconds: [repeats][batches]. ids, counts, forwards: of the last repeat, the output of each batch, what our loop
    counted, and the seconds of its forwards. around: [repeats][batches], the mean seconds of the plain calls right
    before and right after a call, if there were any."""

    seconds: list
    ids: list
    counts: list
    forwards: list
    around: list


def instrument(model) -> tuple[list[float], list[SpeculativeOutput]]:
    """Two lists that grow from now on: the seconds of each forward of `model` in our loop after the prefill, and the
    loop's statistics of each call."""
    seconds, counts, forward, log = [], [], RaggedModel.__call__, Statistics.log

    @functools.wraps(forward)
    def timed(self, *args, **kwargs):
        start = time.perf_counter()
        output = forward(self, *args, **kwargs)
        if self.model is model:
            seconds.append(time.perf_counter() - start)
        return output

    def noted(self, generated):
        counts.append(self.output(generated, sequences=None))
        log(self, generated)

    RaggedModel.__call__, Statistics.log = timed, noted
    return seconds, counts


def ways_to_generate(heads: Path | None, bits: int) -> tuple[dict[str, Way], tuple]:
    """The ways by name, and what `instrument` collects of our model."""
    quantized = {}
    if bits == 4:
        head = {"quantize_lm_head": True, "overrides": {"lm_head": {"bits": 8}}}
        int4 = hf_efficient.WeightOnlyConfig(bits=4, **head, int8_on_cpu=True)
        quantized = {"quantization_config": int4}
    ours = load(**quantized)
    hf_efficient.enable_speculation(ours).set_attn_implementation("flash_paged")
    four_bits = hf_efficient.WeightOnlyConfig(bits=4, group_size=32)

    # loaded where a way is asked for that needs them
    theirs = functools.cache(lambda: load(**quantized))
    draft = functools.cache(lambda: load(quantization_config=four_bits))
    settings = functools.cache(lambda: copy.deepcopy(draft().generation_config))
    itself = hf_efficient.SelfSpeculation(bits=4)

    def assisted(model, implementation):
        def generate(**inputs):
            draft().set_attn_implementation(implementation)
            draft().generation_config = copy.deepcopy(settings())  # transformers learns in it
            return model().generate(**inputs, assistant_model=draft())

        return generate

    def both():
        return hf_efficient.BestOf(hf_efficient.PromptLookup(GUESSES), hf_efficient.TokenRecycling())

    def drafted(make):
        return lambda **inputs: ours.generate(**inputs, assistant_model=make())

    def looking_up(model, guesses):
        return lambda **inputs: model().generate(**inputs, prompt_lookup_num_tokens=guesses)

    found = {
        "generate": Way("generate", 8, ours.generate),
        "prompt_lookup": Way("generate", 8, looking_up(lambda: ours, GUESSES)),
        # new ones each time, as they learn the answers
        "token_recycling": Way("generate", 8, drafted(hf_efficient.TokenRecycling)),
        "both": Way("generate", 8, drafted(both)),
        "self_speculation": Way("generate", 8, drafted(lambda: itself)),
        "assistant": Way("generate", 8, assisted(lambda: ours, "flash_paged")),
        "transformers": Way("transformers", 8, lambda **inputs: theirs().generate(**inputs)),
        **{f"transformers prompt_lookup {n}": Way("transformers", 1, looking_up(theirs, n)) for n in THEIRS},
        "transformers assistant": Way("transformers", 1, assisted(theirs, "sdpa")),
    }
    if bits == 4:
        for name in ("self_speculation", "assistant", "transformers assistant"):
            del found[name]
    if heads is not None:
        trained = hf_efficient.DraftHeads.from_pretrained(heads)
        found["heads"] = Way("generate", 8, drafted(lambda: trained))
        if hasattr(trained, "matrices"):
            rounded = hf_efficient.DraftHeads.from_pretrained(heads)
            rounded.bits = 4
            found["heads int4"] = Way("generate", 8, drafted(lambda: rounded))
    return found, instrument(ours)


def about_heads(folder: Path) -> dict:
    """Of draft heads: what they are, and how often the likeliest guess of each depth was right on answers not trained
    on."""
    heads = hf_efficient.DraftHeads.from_pretrained(folder)
    return {
        "kind": heads.kind,
        "million_parameters": sum(parameter.numel() for parameter in heads.parameters()) / 1e6,
        "draft_tokens": len(heads.draft_tokens),
        "right_by_depth": [rights[0] for rights in heads.accuracies],
    }


def measure(
    found: dict[str, Way], noted: tuple, batches: list[dict], new: int, repeats: int, warm_ups: int, pairs: bool
) -> dict[str, Measured]:
    """By name. pairs: plain calls run before and after each call."""
    forwards, counts = noted
    options = dict(max_new_tokens=new, do_sample=False)
    seconds, around = ({name: [[] for _ in range(repeats)] for name in found} for _ in range(2))
    outputs, counted, inside = ({name: [None] * len(batches) for name in found} for _ in range(3))

    def timed(generate, inputs) -> tuple[float, torch.Tensor]:
        start = time.perf_counter()
        ids = generate(**inputs, **options)
        return time.perf_counter() - start, ids

    plain = found["generate"].generate
    for repeat in range(-warm_ups, repeats):
        for index, inputs in enumerate(batches):
            before = timed(plain, inputs)[0] if pairs and repeat >= 0 else None
            for name, way in list(found.items())[:: -1 if repeat % 2 else 1]:
                if repeat < 0 and (index > 0 or repeat < -1) and name.startswith("transformers"):
                    continue
                forwards.clear()
                counts.clear()
                passed, outputs[name][index] = timed(way.generate, inputs)
                inside[name][index], counted[name][index] = list(forwards), counts[-1] if counts else None
                if repeat >= 0:
                    seconds[name][repeat].append(passed)
                if before is not None:
                    after = timed(plain, inputs)[0]
                    around[name][repeat].append((before + after) / 2)
                    before = after
    return {name: Measured(*(each[name] for each in (seconds, outputs, counted, inside, around))) for name in found}


def record(kind: str, size: int, name: str, measured: dict, plain: str, batches: list[dict], end: int) -> dict:
    """One record, without the ratios. plain: the way whose tokens are the right ones."""
    seconds, outputs, counted, inside, _ = measured[name]
    rows = [row for output, inputs in zip(outputs, batches) for row in rows_of(output, inputs, end)]
    expected = [row for output, inputs in zip(measured[plain].ids, batches) for row in rows_of(output, inputs, end)]
    tokens = sum(map(len, rows))
    median, sums = sum(map(statistics.median, zip(*seconds))), [*map(sum, seconds)]
    line = {
        "prompts": kind,
        "batch": size,
        "way": name,
        "repeats": len(seconds),
        "texts": len(rows),
        "tokens_per_s": {"median": tokens / median, "min": tokens / max(sums), "max": tokens / min(sums)},
        "identical": f"{sum(a == b for a, b in zip(rows, expected))} of {len(rows)}",
    }
    if None not in counted:
        spent = {key: sum(getattr(counts, key) for counts in counted) for key in COUNTED}
        shares = itertools.zip_longest(*(counts.acceptance_by_position for counts in counted))
        line |= {
            "tokens_per_step": (tokens - len(rows)) / sum(int(counts.row_steps.sum()) for counts in counted),
            "acceptance_by_position": [statistics.mean(x for x in each if x is not None) for each in shares],
            **spent,
            "steps": sum(counts.num_steps for counts in counted),
            "drafted_tokens": sum(int(counts.drafted_tokens.sum()) for counts in counted),
            "decoded_tokens_per_s": (tokens - len(rows)) / sum(spent.values()),
        }
        if all(len(each) == counts.num_steps for each, counts in zip(inside, counted)):  # the drafter runs none of them
            inside_or_draft = sum(map(sum, inside)) + spent["draft_seconds"]
            line["host_share"] = 1 - inside_or_draft / sum(spent.values())
    return line


def gains_of_calls(plain: list[list[float]], seconds: list[list[float]]) -> dict:
    """Of seconds [repeats][batches] without a drafter and with one. Stalls of the machine move what is together."""
    ratios = [without / own for each, owns in zip(plain, seconds) for without, own in zip(each, owns)]
    together = sum(map(sum, plain)) / sum(map(sum, seconds))
    counted = {"count": len(ratios), "together": together}
    return {**counted, "median": statistics.median(ratios), "quartiles": harness.quartiles(ratios)}


def goals(lines: list[dict]) -> list[tuple]:
    """What the records are to reach, as `harness.goals` takes it."""
    found = {(line["prompts"], line["batch"], line["way"]): line for line in lines}

    def ratio(kind, size, ours, *others):
        speed = [found[kind, size, name]["tokens_per_s"] for name in (ours, *others) if (kind, size, name) in found]
        there = (kind, size, ours) in found and len(speed) > 1  # not all of the others, with --ways
        return speed[0]["median"] / max(other["median"] for other in speed[1:]) if there else None

    rows = [
        (f"{way} over plain decoding, {kind}, batch {size}", at_least, ratio(kind, size, way, "generate"))
        for way, kind, size, at_least in (
            ("prompt_lookup", "copying", 1, 2.5),
            ("prompt_lookup", "copying", 8, 2.0),
            *((way, "chat", 8, 1.0) for way in ("prompt_lookup", "both", "assistant", "heads int4")),
            ("prompt_lookup", "chat", 1, 1.0),
            ("heads int4", "chat", 1, 1.4),
        )
    ]
    rows += [
        (f"{way} over that of transformers, {kind}, batch 1", 1.3, ratio(kind, 1, way, *theirs))
        for way, theirs in (
            ("prompt_lookup", [f"transformers prompt_lookup {n}" for n in THEIRS]),
            ("assistant", ["transformers assistant"]),
        )
        for kind in ("copying", "chat")
    ]
    if ("long", 1, "prompt_lookup") in found:
        measured = found["long", 1, "prompt_lookup"]["decoding_ratio"]
        rows.append(("prompt_lookup over plain decoding after prompts of 2,048 tokens, batch 1", 2.5, measured))
    if ("copying", 8, "prompt_lookup") in found:
        measured = found["copying", 8, "prompt_lookup"]["decoding_ratio"]
        rows.append(("prompt_lookup over plain decoding, copying, batch 8, without the prompts", 2.0, measured))
    host = [line["host_share"] for line in lines if line["batch"] == 8 and "host_share" in line]
    rows.append(
        ("share of a step that is not the host's, batch 8, the worst way", 0.95, 1 - max(host) if host else None)
    )
    return rows


def others(output: Path, settings: dict, about: dict, parts: list[str], ways) -> tuple[list[dict], dict]:
    """The records and answers of the other parts and ways that `output` holds from before."""
    before = harness.read(output, {})
    same = bool(before) and before["environment"].get("commit") == about.get("commit")
    if not same or any(before.get(name) != value for name, value in settings.items()):
        return [], {}
    records = [
        record
        for record in before["records"]
        if f"{record['prompts']}-{1 if record['batch'] == 1 else 8}" not in parts or record["way"] not in ways
    ]
    return records, {part: value for part, value in before["answers"].items() if part not in parts}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="three prompts, 16 tokens, once: tests the script")
    parser.add_argument("--bits", type=int, choices=(4, 16), default=16, help="of the weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, at batch 1")
    parser.add_argument("--heads", type=Path, help="folder of draft heads trained for the model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", help="only these ways to generate; all by default")
    calls = dict(type=int, choices=range(2, 1001), metavar="N")
    parser.add_argument("--calls", **calls, help="so many calls of each way, plain ones between; 2 to 1,000")
    parser.add_argument("--output", type=Path, help="by default benchmarks/results/speculation_cpu[_int4].json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats = options.calls or (1 if options.quick else options.repeats)
    output = options.output or harness.RESULTS / f"speculation_cpu{'_int4' if options.bits == 4 else ''}.json"
    settings = {"bits": options.bits}
    about = environment.describe()
    tokenizer = harness.tokenizer(padding_side="left")
    found, noted = ways_to_generate(options.heads, options.bits)
    if options.ways:
        found = {name: way for name, way in found.items() if name in (*options.ways, "generate")}
    lines, traits = others(output, settings, about, options.parts, found)
    for part in options.parts:
        kind, size = part.split("-")
        new = 16 if options.quick else NEW[kind]
        texts = {"copying": copying, "long": lambda: long_contexts(tokenizer), "chat": lambda: CHAT}[kind]()
        chats = [[{"role": "user", "content": prompt}] for prompt in texts]
        template = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True)
        chats = chats[-3:] if options.quick else chats
        size = 1 if size == "1" else len(chats)
        apart = chats[:: max(1, len(chats) // options.prompts)][: options.prompts]
        groups = [[chat] for chat in apart] if size == 1 else [chats]
        batches = [dict(tokenizer.apply_chat_template(group, **template)) for group in groups]
        ways = {name: way for name, way in found.items() if way.most >= size}
        measured = measure(ways, noted, batches, new, repeats, 1 if options.quick else WARM_UPS, bool(options.calls))
        end = tokenizer.eos_token_id
        some = [record(kind, size, name, measured, ways[name].plain, batches, end) for name in ways]
        speed = {line["way"]: line["tokens_per_s"]["median"] for line in some}
        decoded = next(line["decoded_tokens_per_s"] for line in some if line["way"] == "generate")
        for line in some:
            plain = [name for name in ("generate", "transformers") if name in speed]
            line["ratio"] = {name: speed[line["way"]] / speed[name] for name in plain}
            line["command"] = about["command"]
            if options.calls:
                line["calls"] = gains_of_calls(measured[line["way"]].around, measured[line["way"]].seconds)
            if "decoded_tokens_per_s" in line:
                line["decoding_ratio"] = line["decoded_tokens_per_s"] / decoded
                add_model(line, next(each for each in some if each["way"] == "generate"))
            print(json.dumps(rounded(line)), flush=True)
        lines += some
        traits[part] = traits_of(batches, measured["generate"].ids, end)
        print(part, json.dumps(rounded(traits[part])), flush=True)
    reached = harness.goals(goals(lines), not options.quick)
    harness.print_goals(reached)
    result = {
        "question": "tokens/s of generate() with and without speculation on CPU",
        "model": samples.SAMPLE_MODEL,
        "environment": about,
        "load_average": os.getloadavg(),
        "new_tokens": NEW,
        **settings,
        "goals": rounded(reached),
        **({"heads": rounded(about_heads(options.heads))} if options.heads else {}),
        "answers": rounded(traits),
        "records": rounded(lines),
    }
    if options.quick:
        result["warning"] = "a quick run: too few tokens and repeats for its times to mean anything"
    harness.write(output, result)


if __name__ == "__main__":
    main()
