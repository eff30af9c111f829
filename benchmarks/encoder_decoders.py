"""Whisper's decoder on a CPU: transformers' loop, the native loop, and a draft that agrees with 80 % of the tokens.
Writes benchmarks/results/encoder_decoders_cpu.json.

    python benchmarks/encoder_decoders.py [--threads 2] [--batch 8] [--tokens 128] [--repeats 5] [--output FILE]

The model has the shape of whisper-base's decoder (6 layers of 512 channels, 51,865 tokens, sources of 1,500 positions)
and random weights, but for its output head: that makes one token follow each other one by a wide margin, so that what
is said does not depend on roundings. The draft is a decoder of one layer, as distil-whisper has, which reads the same
encoder's output; in a fifth of the rows of its head another token follows. Drafts have a fixed length, the best of 2 to
6.

Encoder outputs are given, and no call runs an encoder. `decoding` is the seconds of a call less those of a call for two
tokens (the prompt, with the keys and values of cross attention), a token of each sequence. All ways take turns.
"""

import copy
import functools
import json
import os
import statistics
import time

import harness
import torch
from transformers import GenerationMixin, WhisperConfig, WhisperForCausalLM, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from hf_efficient import Speculation, enable_speculation
from hf_efficient.evaluation import environment
from hf_efficient.generation.drafters.assistant import AssistantDrafter


AGREES = 0.8
LENGTHS = (2, 3, 4, 5, 6)  # of drafts
SHAPE = dict(
    vocab_size=51865, d_model=512, decoder_layers=6, decoder_attention_heads=8, decoder_ffn_dim=2048, encoder_layers=1,
    encoder_attention_heads=8, encoder_ffn_dim=2048, tie_word_embeddings=False, suppress_tokens=None,
    begin_suppress_tokens=None, eos_token_id=None, pad_token_id=0, bos_token_id=0, decoder_start_token_id=1,
)  # fmt: skip


def model_and_draft(dtype: torch.dtype):
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**SHAPE)).eval()
    draft = WhisperForCausalLM(WhisperConfig(**{**SHAPE, "decoder_layers": 1})).eval()
    size = SHAPE["vocab_size"]
    follows = torch.randperm(size)
    with torch.no_grad():
        embedding = model.model.decoder.embed_tokens.weight.normal_()
        model.proj_out.weight[follows] = embedding
        draft.model.decoder.embed_tokens.weight.copy_(embedding)
        other = torch.rand(size) >= AGREES
        follows[other] = follows[other].roll(1)
        draft.proj_out.weight[follows] = embedding
    return model.to(dtype), draft.to(dtype)


class Counted(AssistantDrafter):
    """Counts what it drafts and what is accepted."""

    drafted, accepted, is_counted = 0, 0, False

    def propose(self, limits, nodes):
        proposal = super().propose(limits, nodes)
        if proposal is not None:
            self.drafted += int(proposal.counts.sum())
            self.is_counted = True
        return proposal

    def accept(self, tokens, hidden=None):
        if self.is_counted:
            self.accepted += sum(max(len(row) - 1, 0) for row in tokens)
        self.is_counted = False
        super().accept(tokens, hidden)


def seconds(generate, tokens: int) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    output = generate(max_new_tokens=tokens)
    return time.perf_counter() - start, output


def measure(dtype: torch.dtype, batch: int, tokens: int, repeats: int) -> dict:
    model, draft = model_and_draft(dtype)
    ours = enable_speculation(copy.deepcopy(model))
    source = BaseModelOutput(torch.randn(batch, 1500, SHAPE["d_model"]).to(dtype))
    prompt = torch.randint(SHAPE["vocab_size"], (batch, 2), generator=torch.Generator().manual_seed(1))
    drafted = {}

    def calls(which, **options):
        generate = functools.partial(GenerationMixin.generate, which)  # Whisper's own takes no drafter objects

        def run(**more):
            return generate(encoder_outputs=source, decoder_input_ids=prompt, do_sample=False, **options, **more)

        return run

    ways = {"transformers": calls(model), "native": calls(ours)}
    for length in LENGTHS:
        settings = draft.generation_config
        settings.num_assistant_tokens, settings.assistant_confidence_threshold = length, 0.0
        drafted[f"assisted {length}"] = drafter = Counted(draft)
        ways[f"assisted {length}"] = calls(ours, assistant_model=Speculation(drafter, adaptive=False))
    expected = None
    for run in ways.values():  # captures and compiles
        for count in (2, tokens // 2):
            seconds(run, count)
    whole, first = ({name: [] for name in ways} for _ in range(2))
    same = dict.fromkeys(ways, True)
    for _ in range(repeats):
        for name, run in ways.items():
            first[name].append(seconds(run, 2)[0])
            took, output = seconds(run, tokens)
            whole[name].append(took)
            expected = output if expected is None else expected
            same[name] &= torch.equal(output, expected)
    decoding = {name: [1e3 * (a - b) / (tokens - 2) for a, b in zip(whole[name], first[name])] for name in ways}
    median = {name: statistics.median(values) for name, values in decoding.items()}
    best = min(drafted, key=median.get)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "decoding_ms": {name: harness.spread(values) for name, values in decoding.items()},
        "call_seconds": {name: harness.spread(values) for name, values in whole.items()},
        "accepted_of_drafted": {name: each.accepted / each.drafted for name, each in drafted.items()},
        "same_tokens": same,
        "native_over_transformers": median["transformers"] / median["native"],
        "assisted_over_native": median["native"] / median[best],
        "assisted_over_native_whole_calls": statistics.median(whole["native"]) / statistics.median(whole[best]),
        "best_length": best,
    }


def main() -> None:
    parser = harness.parser(__doc__, "encoder_decoders_cpu.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = []
    for dtype in options.dtypes:
        record = measure(getattr(torch, dtype), options.batch, options.tokens, options.repeats)
        records.append(harness.rounded(record))
        print(json.dumps(records[-1], indent=1), flush=True)
    pairs = [(name, at_least) for name, at_least in (("native_over_transformers", 2.0), ("assisted_over_native", 1.5))]
    goals = [(f"{name}, {record['dtype']}", at_least, record[name]) for record in records for name, at_least in pairs]
    found = harness.goals(goals, options.batch == 8)
    harness.print_goals(found)
    harness.write(
        options.output,
        {
            "question": "decoding speed of a Whisper-shaped decoder, milliseconds a token of each sequence",
            "environment": environment.describe(),
            "load_average": os.getloadavg(),
            "batch": options.batch,
            "tokens": options.tokens,
            "repeats": options.repeats,
            "goals": found,
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
