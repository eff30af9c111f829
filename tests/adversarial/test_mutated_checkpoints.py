"""A changed checkpoint is refused by an error that names what is wrong, or gives the weights that a reader written
from the definition gives.

`python tests/adversarial/test_mutated_checkpoints.py 1000` makes so many changes and counts; a second number is the
first seed."""

import collections
import json
import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch


sys.path.append(str(Path(__file__).parents[1]))  # for the command above; pytest has it already

import foreign_layouts  # noqa: E402
import mutations  # noqa: E402
import readers  # noqa: E402
from helpers import tiny_model  # noqa: E402
from raw_checkpoint import FLOATS, Checkpoint  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.quantizers import auto  # noqa: E402

import hf_efficient  # noqa: E402
from hf_efficient.layers import EfficientLinear  # noqa: E402


HALF, WIDE = torch.float16, torch.bfloat16
FOREIGN = {  # name -> layout, dtype, options, reader
    "gptq": ("gptq", HALF, {}, readers.gptq),
    "gptq_v2 8": ("gptq", HALF, dict(version="gptq_v2", bits=8), readers.gptq),
    "gptq order": ("gptq", HALF, dict(order="activation", size=16), readers.gptq),
    "gptq 3": ("gptq", HALF, dict(bits=3), readers.gptq),
    "awq": ("awq", HALF, {}, readers.awq),
    "packed": ("packed", WIDE, {}, readers.compressed_tensors),
    "packed order": ("packed", WIDE, dict(symmetric=False, order="activation"), readers.compressed_tensors),
    "packed 8 channel": ("packed", WIDE, dict(bits=8, strategy="channel"), readers.compressed_tensors),
    "w8a8": ("plain", WIDE, {}, readers.compressed_tensors),
    "w8a8 static": ("plain", WIDE, dict(dynamic=False, strategy="tensor"), readers.compressed_tensors),
    "w8a16": ("plain", WIDE, dict(inputs=False, symmetric=False), readers.compressed_tensors),
    "fp8 block": ("plain", WIDE, dict(kind="float", strategy="block"), readers.compressed_tensors),
    "2:4": ("bitmask", WIDE, {}, readers.bitmask),
    "bitmask": ("bitmask", WIDE, dict(pattern=None), readers.bitmask),
    "nf4": ("bitsandbytes_4bit", WIDE, {}, readers.bitsandbytes_4bit),
    "fp4 double": ("bitsandbytes_4bit", WIDE, dict(table="fp4", double=True), readers.bitsandbytes_4bit),
    "llm_int8": ("bitsandbytes_8bit", HALF, {}, readers.bitsandbytes_8bit),
    "hqq": ("hqq", HALF, {}, readers.hqq),
    "hqq 3": ("hqq", WIDE, dict(bits=3), readers.hqq),
    "torchao int8": ("torchao_int8", WIDE, {}, readers.torchao),
    "torchao intx": ("torchao_int8", WIDE, dict(size=32, bits=4), readers.torchao),
    "torchao int4": ("torchao_int4", WIDE, {}, readers.torchao),
}
OWN = {  # name -> config, dtype, reader
    "own 4": (hf_efficient.WeightOnlyConfig(group_size=32), HALF, readers.weight_only),
    "own 8 channel": (hf_efficient.WeightOnlyConfig(bits=8, group_size=-1, symmetric=True), WIDE, readers.weight_only),
    "own 3 hqq": (
        hf_efficient.WeightOnlyConfig(bits=3, group_size=32, method="hqq", zero_point="float"),
        *(HALF, readers.weight_only),
    ),
    "own nf4": (hf_efficient.WeightOnlyConfig(codebook="nf4"), WIDE, readers.weight_only),
    "own double": (
        hf_efficient.WeightOnlyConfig(codebook="fp4", group_size=32, double_quantization=True),
        *(HALF, readers.weight_only),
    ),
    "own kmeans": (
        hf_efficient.WeightOnlyConfig(codebook="kmeans", bits=3, group_size=-1),
        *(WIDE, readers.weight_only),
    ),
    "own w8a8": (hf_efficient.W8A8Config(method="zeropoint"), HALF, readers.w8a8),
    "own fp8": (hf_efficient.W8A8Config(dtype="fp8"), WIDE, readers.w8a8),
    "own bitnet": (hf_efficient.BitNetConfig(), HALF, readers.bitnet),
    "own dense bitnet": (hf_efficient.BitNetConfig(dense=True, per_channel=True), WIDE, readers.bitnet),
    "own 2:4": (hf_efficient.SparseConfig(pattern="2:4", method="magnitude"), HALF, readers.sparse),
    "own sparse": (hf_efficient.SparseConfig(sparsity=0.5, method="magnitude"), WIDE, readers.sparse),
    "own 2:4 int4": (
        hf_efficient.SparseConfig(pattern="2:4", method="magnitude", weights={"bits": 4, "group_size": 32}),
        *(HALF, readers.sparse),
    ),
}
LAYERS = [
    *(f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"),
    *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
]
REFUSALS = (ValueError, OSError, RuntimeError)  # RuntimeError: transformers' own, over a report that names the weights
TOLERANCE = dict(rtol=2**-7, atol=2**-9)  # of bfloat16, and of the largest of a row: half a code of 8 bits at most


class Bench:
    """Makes checkpoints, changes them and loads them."""

    def __init__(self, folder: Path):
        self.folder, self.whole, self.log = folder, {}, []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.log.append(record.getMessage())

    def checkpoint(self, layout: str) -> Checkpoint:
        if layout not in self.whole:
            path, plain = self.folder / "whole" / layout, tiny_model("llama", num_hidden_layers=1)
            if layout in FOREIGN:
                name, dtype, options, _ = FOREIGN[layout]
                foreign_layouts.write(path, plain, getattr(foreign_layouts, name), dtype, **options)
            else:
                config, dtype, _ = OWN[layout]
                plain.to(dtype).save_pretrained(path / "plain")
                model = AutoModelForCausalLM.from_pretrained(path / "plain", quantization_config=config, dtype=dtype)
                model.save_pretrained(path)
            self.whole[layout] = Checkpoint.read(path)
            self.whole[layout].config["dtype"] = str(dtype).removeprefix("torch.")
        return self.whole[layout].copy()

    def load(self, files: dict[str, bytes]):
        """(name -> float64 weights, None) or (None, the text of an error)."""
        path = Path(tempfile.mkdtemp(dir=self.folder))
        for name, data in files.items():
            (path / name).write_bytes(data)
        logger = logging.getLogger("transformers.modeling_utils")
        self.log.clear()
        logger.addHandler(self.handler)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except REFUSALS as error:
            return None, f"{type(error).__name__}: {error}\n" + "\n".join(self.log)
        finally:
            logger.removeHandler(self.handler)
        self.model, values = model, {}
        for name, parameter in model.named_parameters():
            module = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(module, EfficientLinear):
                values[name] = parameter.detach().numpy().astype(np.float64)
            elif name.endswith(".weight"):
                values[name] = module.dequantized(dtype=torch.float32).numpy().astype(np.float64)
        return values, None

    def expected(self, layout: str, checkpoint: Checkpoint) -> dict[str, np.ndarray] | str:
        """name -> weights by the definition, or why it holds none."""
        reader, values, left = (FOREIGN.get(layout) or OWN[layout])[-1], {}, dict(checkpoint.tensors)
        shapes = {f"{n}.weight": tuple(m.weight.shape) for n, m in PLAIN.named_modules() if n in LAYERS}
        try:
            for layer in LAYERS:
                parts = {n.removeprefix(f"{layer}."): left.pop(n) for n in list(left) if n.startswith(f"{layer}.")}
                if layout in OWN:
                    assert parts.pop("weight").shape == (3,)
                about = checkpoint.metadata.get(f"{layer}.weight")
                config = json.loads(json.dumps(checkpoint.config["quantization_config"]))
                with np.errstate(all="ignore"):
                    values[f"{layer}.weight"] = reader(config, parts, shapes[f"{layer}.weight"], about)
            for name, parameter in PLAIN.named_parameters():
                if name not in values:
                    assert left[name].dtype in FLOATS and left[name].shape == tuple(parameter.shape)
                    values[name] = left[name].values()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return values

    def disagreement(self) -> str | None:
        """Where the forward of a layer and its weights differ: of those whose inputs are not rounded."""
        x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
        for layer in LAYERS:
            module = self.model.get_submodule(layer)
            weight = module.dequantized(dtype=torch.float32) if isinstance(module, EfficientLinear) else module.weight
            own = x[:, : weight.shape[1]]
            y, expected = module(own), own @ weight.detach().t()
            if not torch.allclose(y, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item() + 1e-30):
                return f"{layer}: its forward is not that of its weights"
        return None

    def trial(self, layout: str, kind: str, seed: int) -> tuple[str, str]:
        """("refused", "equal" or what went wrong, the details) of one change."""
        rng = np.random.default_rng(seed)
        checkpoint = self.checkpoint(layout)
        if kind in mutations.IN_CHECKPOINT:
            named, files = mutations.IN_CHECKPOINT[kind](rng, checkpoint, LAYERS), checkpoint.files()
            expected = self.expected(layout, checkpoint)
        else:
            checkpoint.shards = 1 if kind == "cut off" else 2
            files = checkpoint.files()
            named = mutations.IN_FILES[kind](rng, files)
            whole = kind == "renamed shards" or files == checkpoint.files()
            expected = self.expected(layout, checkpoint) if whole else "a damaged file"
            named = [*named, *checkpoint.tensors]
        try:
            found, error = self.load(files)
        except Exception as error:
            return "an error of another kind", f"{named[:2]}: {type(error).__name__}: {error}"
        if found is None:
            is_named = any(name in error for name in named)
            return "refused" if is_named else "refused without a name", f"{named[:2]}: {error[:300]}"
        if isinstance(expected, str):
            return "loaded what it should not", f"{named[:2]}: {expected}"
        for name, values in expected.items():
            largest = np.abs(values).max(initial=0, axis=-1, keepdims=True)
            close = np.abs(found[name] - values) <= TOLERANCE["rtol"] * np.abs(values) + TOLERANCE["atol"] * largest
            # what float16 cannot hold is infinite in its dtype, and the readers compute in float64
            overflown = np.isinf(found[name]) & (np.abs(values) > 65504) & ((found[name] > 0) == (values > 0))
            if found[name].shape != values.shape or not (close | (found[name] == values) | overflown).all():
                return "other values", f"{named[:2]}: {name}"
        is_finite = all(np.isfinite(values).all() for values in found.values())
        if is_finite and not ("w8a8" in layout or "fp8" in layout or "bitnet" in layout or layout == "llm_int8"):
            if disagreement := self.disagreement():
                return "a forward of its own", f"{named[:2]}: {disagreement}"
        return "equal", f"{named[:2]}"


PLAIN = tiny_model("llama", num_hidden_layers=1)
KINDS = [*mutations.IN_CHECKPOINT, *mutations.IN_FILES]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"))


pytestmark = pytest.mark.usefixtures("all_adopted")


def trials(count: int, first: int = 0):
    """(layout, kind, seed): every layout with every kind in turn, from seed `first` on."""
    layouts = [*FOREIGN, *OWN]
    for index in range(first, first + count):
        kind = KINDS[(index + index // len(layouts)) % len(KINDS)]
        yield layouts[index % len(layouts)], kind, index


@pytest.mark.parametrize("layout", [*FOREIGN, *OWN])
def test_the_reader_reads_what_is_not_changed(layout, bench):
    checkpoint = bench.checkpoint(layout)
    found, expected = bench.load(checkpoint.files())[0], bench.expected(layout, checkpoint)
    for name, values in expected.items():
        assert np.allclose(found[name], values, rtol=2**-7, atol=2**-9 * np.abs(values).max()), name


@pytest.mark.parametrize("layout, kind, seed", list(trials(105)))
def test_a_changed_checkpoint_is_refused_or_read_as_it_is(layout, kind, seed, bench):
    result, details = bench.trial(layout, kind, seed)
    assert result in ("refused", "equal"), f"{result}: {details}"


if __name__ == "__main__":
    hf_efficient.adopt()
    auto.logger.setLevel(logging.ERROR)
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for layout, kind, seed in trials(*map(int, sys.argv[1:])):
            result, details = bench.trial(layout, kind, seed)
            counts[result] += 1
            if result not in ("refused", "equal"):
                print(f"{result}: {layout}, {kind}, {seed}: {details}", flush=True)
    print(dict(counts))
