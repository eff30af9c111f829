"""Whisper's decoder on a CPU: transformers' loop, the native loop, and a draft that agrees with 80 % of the tokens.
Writes benchmarks/results/encoder_decoders_cpu.json.

    python benchmarks/encoder_decoders.py [--shape base] [--dtype bfloat16] [--threads 2] [--batch 8] [--tokens 96]
        [--repeats 3] [--lengths 2 3] [--output FILE]

The model has the decoder of whisper-base or whisper-medium (6 layers of 512 channels, 24 of 1,024; 51,865 tokens;
sources of 1,500 positions) and random weights, but for its output head: that makes one token follow each other one by a
wide margin, so that what is said does not depend on roundings. The draft is a decoder of one layer, as distil-whisper's
has two, which reads the same encoder's output; in a fifth of the rows of its head another token follows.

Encoder outputs are given, and no call runs an encoder. `decoding` is the seconds of a call less those of a call for
three tokens (the prompt, with the keys and values of cross attention, those of the draft too), a token of each
sequence. All ways take turns. Records of other shapes, dtypes and batches stay in the file.
"""

import functools
import json
import os
import statistics
import time
from unittest import mock

import harness
import torch
from transformers import GenerationMixin, WhisperConfig, WhisperForCausalLM, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from hf_efficient import Speculation, enable_speculation
from hf_efficient.evaluation import environment
from hf_efficient.generation import served
from hf_efficient.generation.drafters.assistant import AssistantDrafter


AGREES = 0.8
SIZES = {"base": (6, 512), "medium": (24, 1024)}  # layers, channels
VOCABULARY, POSITIONS = 51865, 1500
FIRST = 3  # tokens of a call that is hardly more than the prompts: with fewer, nothing is drafted
SAME = "shape", "dtype", "batch"  # fields of a record that a new one replaces


def config(layers: int, size: int) -> WhisperConfig:
    heads = size // 64
    return WhisperConfig(
        vocab_size=VOCABULARY, d_model=size, decoder_layers=layers, decoder_attention_heads=heads,
        decoder_ffn_dim=4 * size, encoder_layers=1, encoder_attention_heads=heads, encoder_ffn_dim=size,
        tie_word_embeddings=False, suppress_tokens=None, begin_suppress_tokens=None, eos_token_id=None, pad_token_id=0,
        bos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip


def model_and_draft(shape: str, dtype: torch.dtype):
    torch.manual_seed(0)
    layers, size = SIZES[shape]
    torch.set_default_dtype(dtype)
    model = WhisperForConditionalGeneration(config(layers, size)).eval()
    draft = WhisperForCausalLM(config(1, size)).eval()
    torch.set_default_dtype(torch.float32)
    follows = torch.randperm(VOCABULARY)
    with torch.no_grad():
        embedding = model.model.decoder.embed_tokens.weight.normal_()
        model.proj_out.weight[follows] = embedding
        draft.model.decoder.embed_tokens.weight.copy_(embedding)
        other = torch.rand(VOCABULARY) >= AGREES
        follows[other] = follows[other].roll(1)
        draft.proj_out.weight[follows] = embedding
    return enable_speculation(model), draft


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


def measure(shape: str, dtype: str, batch: int, tokens: int, repeats: int, lengths: list[int]) -> dict:
    model, draft = model_and_draft(shape, getattr(torch, dtype))
    source = BaseModelOutput(torch.randn(batch, POSITIONS, SIZES[shape][1]).to(model.dtype))
    prompt = torch.randint(VOCABULARY, (batch, 2), generator=torch.Generator().manual_seed(1))
    generate = functools.partial(  # Whisper's own generate() takes no drafter objects
        GenerationMixin.generate, model, encoder_outputs=source, decoder_input_ids=prompt, do_sample=False
    )

    def transformers(**options):
        with mock.patch.object(served, "serves", lambda request: False):
            return generate(**options)

    ways, drafters = {"transformers": transformers, "native": generate}, {}
    for length in lengths:
        settings = draft.generation_config
        settings.num_assistant_tokens, settings.assistant_confidence_threshold = length, 0.0
        name = f"assisted {length}"
        drafters[name] = Counted(draft)
        ways[name] = functools.partial(generate, assistant_model=Speculation(drafters[name], adaptive=False))
    for name, run in ways.items():  # captures and compiles
        for count in (FIRST,) if name == "transformers" else (FIRST, 24):
            seconds(run, count)
    expected, whole, first = None, {name: [] for name in ways}, {name: [] for name in ways}
    same = dict.fromkeys(ways, True)
    for _ in range(repeats):
        for name, run in ways.items():
            first[name].append(seconds(run, FIRST)[0])
            took, output = seconds(run, tokens)
            whole[name].append(took)
            expected = output if expected is None else expected
            same[name] &= torch.equal(output, expected)
    decoding = {name: [1e3 * (a - b) / (tokens - FIRST) for a, b in zip(whole[name], first[name])] for name in ways}
    median = {name: statistics.median(values) for name, values in decoding.items()}
    best = min(drafters, key=median.get)
    return {
        "shape": shape,
        "dtype": dtype,
        "batch": batch,
        "tokens": tokens,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "decoding_ms": {name: harness.spread(values) for name, values in decoding.items()},
        "call_seconds": {name: harness.spread(values) for name, values in whole.items()},
        "accepted_of_drafted": {name: each.accepted / each.drafted for name, each in drafters.items()},
        "same_tokens": same,
        "native_over_transformers": median["transformers"] / median["native"],
        "assisted_over_native": median["native"] / median[best],
        "best": best,
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = harness.parser(__doc__, "encoder_decoders_cpu.json")
    parser.add_argument("--shape", choices=SIZES, default="base")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = harness.rounded(
        measure(options.shape, options.dtype, options.batch, options.tokens, options.repeats, options.lengths)
    )
    print(json.dumps(record, indent=1), flush=True)
    question = "decoding speed of a Whisper-shaped decoder, milliseconds a token of each sequence"
    written = harness.read(options.output, {"question": question, "records": []})
    others = [each for each in written["records"] if any(each[name] != record[name] for name in SAME)]
    harness.write(options.output, {"question": question, "records": [*others, record]})


if __name__ == "__main__":
    main()
