"""The table of docs/formats.md that says what is read: each row is made from a random weight in that layout."""

import json
from pathlib import Path

import foreign_layouts as layouts
import pytest
import torch
from safetensors.torch import _TYPES

from hf_efficient import configs
from hf_efficient.checkpoints import adopt
from hf_efficient.checkpoints.adopt.gguf_blocks import KINDS
from hf_efficient.checkpoints.adopt.stored import Place, StoredWeight
from hf_efficient.formats.base import Format


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
SIZE = 1024
HALF, WIDE = torch.float16, torch.bfloat16
ROWS = {  # library, layout -> how it is made
    ("GPTQ", "4 bits, `gptq` and `gptq_v2`"): (layouts.gptq, HALF, dict(size=128)),
    ("GPTQ", "4 bits, activation order"): (layouts.gptq, HALF, dict(size=128, order="activation")),
    ("GPTQ", "3 bits (also 2 and 8)"): (layouts.gptq, HALF, dict(size=128, bits=3)),
    ("AWQ", "4 bits, `gemm`"): (layouts.awq, HALF, dict(size=128)),
    ("compressed-tensors", "int4 `pack-quantized` (also 2, 3, 8)"): (layouts.packed, WIDE, dict(size=128)),
    ("compressed-tensors", "int8 `int-quantized`"): (layouts.plain, WIDE, {}),
    ("compressed-tensors", "fp8 `float-quantized`"): (layouts.plain, WIDE, dict(kind="float")),
    ("compressed-tensors", "the same with codes in E5M2"): (
        *(layouts.plain, WIDE),
        dict(kind="float", float8=torch.float8_e5m2),
    ),
    ("compressed-tensors", "`nvfp4-pack-quantized`"): (layouts.fp4, WIDE, {}),
    ("compressed-tensors", "`mxfp4-pack-quantized`"): (layouts.fp4, WIDE, dict(kind="mxfp4")),
    ("compressed-tensors", "2:4 `sparse-24-bitmask`"): (layouts.bitmask, WIDE, {}),
    ("compressed-tensors", "`sparse-bitmask`"): (layouts.bitmask, WIDE, dict(pattern=None)),
    ("compressed-tensors", "2:4 in int4, `marlin-24` (also 8)"): (layouts.marlin24, HALF, {}),
    ("bitsandbytes", "NF4 and FP4"): (layouts.bitsandbytes_4bit, WIDE, {}),
    ("bitsandbytes", "NF4, scales in 8 bits, too"): (layouts.bitsandbytes_4bit, WIDE, dict(double=True)),
    ("bitsandbytes", "LLM.int8()"): (layouts.bitsandbytes_8bit, HALF, {}),
    ("HQQ", "4 bits (also 2, 3, 8), `axis=1`"): (layouts.hqq, HALF, dict(size=64)),
    ("torchao", "`Int8Tensor`"): (layouts.torchao_int8, WIDE, {}),
    ("torchao", "`IntxUnpackedToInt8Tensor`"): (layouts.torchao_int8, WIDE, dict(size=128, bits=4)),
    ("torchao", "`Int4Tensor`"): (layouts.torchao_int4, WIDE, dict(size=128)),
}


class InMemory(StoredWeight):
    """Tensors as if they stood in a file."""

    def __init__(self, parts, metadata):
        names = {dtype: name for name, dtype in _TYPES.items()}
        places = {part: Place("file", f"layer.{part}", names[t.dtype], tuple(t.shape)) for part, t in parts.items()}
        super().__init__("layer", places, metadata)
        self.tensors = parts

    def read(self, part):
        return self.tensors[part]


def row(library, layout, config, format: Format, theirs, dtype) -> str:
    ours = format.bits_per_weight(SIZE, SIZE, dtype)
    return f"| {library} | {layout} | `{call_of(type(config), config.scheme())}` | {theirs:.2f} | {ours:.2f} |"


def call_of(kind, scheme: dict) -> str:
    """`kind(field=value, ...)` with the fields that have other values than the arguments' defaults."""
    default = kind(**scheme).plain()
    values = {field: value for field, value in scheme.items() if value != default[field]}
    shown = {
        field: call_of(configs.WeightOnlyConfig, value)
        if field == "weights" and isinstance(value, dict)
        else repr(value)
        for field, value in values.items()
    }
    return f"{kind.__name__}({', '.join(f'{field}={text}' for field, text in shown.items())})"


@pytest.mark.parametrize("library, layout", ROWS)
def test_row(library, layout):
    make, dtype, options = ROWS[library, layout]
    parts, weight, saved = make(SIZE, SIZE, dtype, **options)
    metadata = {"layer.weight": json.dumps(saved.pop("metadata", None))}
    method = saved["quant_method"]
    if method == "bitsandbytes":
        method += "_8bit" if saved.get("load_in_8bit") else "_4bit"
    foreign = adopt._METHODS[method].load_reader()(saved)
    config = getattr(configs, foreign.config)(**foreign.scheme(InMemory(parts, metadata), SIZE, SIZE, dtype))
    format = config.format()
    found = foreign.convert(parts, SIZE, SIZE, format, torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == format.shapes(SIZE, SIZE)
    dense = format.dequantize(found, SIZE, dtype)
    if method == "bitsandbytes_8bit":
        torch.testing.assert_close(dense, weight.to(dtype), rtol=2**-10, atol=0)
    else:
        assert torch.equal(dense, weight.to(dtype))
    theirs = sum(tensor.nbytes for tensor in parts.values()) * 8 / SIZE**2
    assert row(library, layout, config, format, theirs, dtype) in PAGE.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_row_of_gguf(kind):
    config = configs.WeightOnlyConfig(**KINDS[kind].scheme(WIDE))
    assert row("GGUF", f"`{kind}`", config, config.format(), KINDS[kind].theirs, WIDE) in PAGE.splitlines()
