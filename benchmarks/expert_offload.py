"""Tokens a second of a mixture with a quarter of its experts on the device, beside all in memory. Writes
benchmarks/results/expert_offload.json and a table beside it.

    python benchmarks/expert_offload.py [--layers 4] [--share 0.25] [--quick] [--output FILE]

The model is random, of the shape of Qwen3-MoE with 8 of 64 experts. Its routers add the logarithm of a Zipf
distribution to what they compute of the hidden states, so that some experts are chosen more often. On a CPU the device
is memory, and the other experts lie in mapped files that the system's page cache holds ("mapped"), or that it was told
to drop before each run ("dropped"). Time is that of a token after the first, the median of the repeats. Bytes moved are
those of experts that were copied, of all forwards. Tokens are compared with those of the model in memory.
"""

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import harness
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_efficient import ExpertOffload, WeightOnlyConfig
from hf_efficient.evaluation import environment
from hf_efficient.expert_offload.residents import POLICIES


SHAPE = dict(hidden_size=2048, moe_intermediate_size=768, num_experts=64, num_experts_per_tok=8, vocab_size=4096)
SHAPE |= dict(num_attention_heads=16, num_key_value_heads=4, head_dim=128, eos_token_id=None, pad_token_id=0)
QUICK = dict(SHAPE, hidden_size=128, moe_intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
PROMPT, TOKENS = 16, 24
INT4 = WeightOnlyConfig(bits=4, group_size=128, method="rtn")  # the weights are random


class ZipfTopKRouter(nn.Module):
    """A router of Qwen3-MoE whose logits lean to some experts: the i-th of a random order by -log(i)."""

    def __init__(self, router: nn.Module, generator: torch.Generator):
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k
        experts = len(router.weight)
        order = torch.randperm(experts, generator=generator)
        self.register_buffer("prior", -torch.log1p(order.float()))

    def forward(self, hidden_states):
        logits = nn.functional.linear(hidden_states, self.weight).float() + self.prior
        scores, chosen = logits.softmax(-1).topk(self.top_k, -1)
        return logits, (scores / scores.sum(-1, keepdim=True)).to(hidden_states.dtype), chosen


def make_model(shape: dict, layers: int) -> nn.Module:
    """Random, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, num_hidden_layers=layers)).to(torch.bfloat16)
    model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1)
        else:  # logits of routers with a deviation of 1
            scale = 1 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.data.uniform_(-1.7 * scale, 1.7 * scale, generator=generator)
    for layer in model.model.layers:
        layer.mlp.gate = ZipfTopKRouter(layer.mlp.gate, generator)
    return model


def generate(model, prompt: torch.Tensor, count: int) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=count, do_sample=False)


def time_of_a_token(model, prompt: torch.Tensor, repeats: int, before=lambda: None) -> tuple[torch.Tensor, list[float]]:
    """(the tokens of a generation, seconds of a token after the first in each repeat)."""
    generate(model, prompt, TOKENS)
    seconds = []
    for _ in range(repeats):
        took = []
        for count in (1, TOKENS + 1):
            before()
            start = time.perf_counter()
            tokens = generate(model, prompt, count)
            took.append(time.perf_counter() - start)
        seconds.append((took[1] - took[0]) / TOKENS)
    return tokens, seconds


def drop(folder: Path) -> None:
    """Tells the system to drop the pages of the files in `folder`."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(model, kind: str, share: float, repeats: int, folder: Path) -> list[dict]:
    prompt = torch.arange(PROMPT)[None] + 7
    expected, seconds = time_of_a_token(model, prompt, repeats)
    rows = [dict(weights=kind, experts="all in memory", milliseconds=1e3 * statistics.median(seconds), times=1.0)]
    experts = sum(
        tensor.nbytes for name, tensor in model.state_dict().items() if ".experts." in name and tensor.ndim > 2
    )
    for policy, where in itertools.product(POLICIES, ("mapped", "dropped")):
        offload = ExpertOffload(int(share * experts) + 1, policy, disk=folder)
        offload.attach(model)
        before = (lambda: drop(folder)) if where == "dropped" else lambda: None
        tokens, seconds = time_of_a_token(model, prompt, repeats, before)
        stats = offload.stats()
        forwards = TOKENS + (TOKENS + 2) * repeats
        offload.detach()
        assert torch.equal(tokens, expected), f"{policy} gives other tokens"
        median = 1e3 * statistics.median(seconds)
        rows.append(
            dict(
                weights=kind, experts=f"{policy}, {where}", milliseconds=median, times=median / rows[0]["milliseconds"]
            )
            | dict(hit_rate=stats["hit_rate"], resident=stats["resident"], of=stats["experts"], moved=stats)
            | dict(megabytes_a_token=stats["bytes_to_device"] / forwards / 1e6)
        )
        print(harness.rounded(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = harness.parser(__doc__, "expert_offload.json")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["bfloat16", "int4"], choices=["bfloat16", "int4"])
    parser.add_argument("--quick", action="store_true", help="a small model, whose figures mean nothing")
    options = parser.parse_args()
    shape, rows = QUICK if options.quick else SHAPE, []
    with tempfile.TemporaryDirectory() as scratch:
        model, folder = make_model(shape, options.layers), Path(scratch) / "experts"
        folder.mkdir()
        for kind in options.kinds:
            if kind == "int4":
                model = compressed(model, Path(scratch) / "model")
            rows += measure(model, kind, options.share, options.repeats, folder)
    record = {"environment": environment.describe(), "shape": shape | {"layers": options.layers}}
    harness.write(options.output, harness.rounded(record | {"share": options.share, "rows": rows}))
    lines = [harness.row(["weights", "experts", "ms a token", "times as long", "hit rate", "MB moved a token"])]
    lines.append(harness.row(["---"] * 6))
    harness.write_table(options.output, lines + [harness.row(cells(row)) for row in rows])


def cells(row: dict) -> list[str]:
    moved = [f"{row['hit_rate']:.0%}", f"{row['megabytes_a_token']:.0f}"] if "hit_rate" in row else ["", ""]
    return [row["weights"], row["experts"], f"{row['milliseconds']:.0f}", f"{row['times']:.2f}", *moved]


def compressed(model: nn.Module, folder: Path) -> nn.Module:
    """The model in int4, with the same routers."""
    routers = [layer.mlp.gate for layer in model.model.layers]
    model.save_pretrained(folder, state_dict={k: v for k, v in model.state_dict().items() if "prior" not in k})
    found = Qwen3MoeForCausalLM.from_pretrained(folder, quantization_config=INT4)
    for layer, router in zip(found.model.layers, routers):
        layer.mlp.gate = router
    return found


if __name__ == "__main__":
    main()
