"""The table of docs/formats.md that says what other engines read, made from round trips of tiny models."""

from pathlib import Path

import pytest
import torch
import unpackers
from exported import TOKENS, compressed, largest_difference, weights

import hf_efficient
from hf_efficient.checkpoints.export import FORMATS


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
W8A8 = dict(quant_method="efficient_w8a8")
EXPORTED = {
    "4 bits": dict(bits=4, group_size=32),
    "4 bits, symmetric": dict(bits=4, group_size=32, symmetric=True),
    "8 bits": dict(bits=8, group_size=-1),
    "8 bits, symmetric": dict(bits=8, group_size=-1, symmetric=True),
    "6 bits": dict(bits=6, group_size=32),
    "3 bits": dict(bits=3, group_size=32),
    "2 bits": dict(bits=2, group_size=32),
    "int8 activations": W8A8,
    "int8 activations, static": dict(W8A8, activations="static", calibration=TOKENS),
    "fp8 activations": dict(W8A8, dtype="fp8"),
    "LLM.int8()": dict(W8A8, method="llm_int8"),
    "MXFP4": dict(bits=4, group_size=32, codebook="mxfp4"),
    "NVFP4": dict(bits=4, group_size=16, codebook="nvfp4"),
    "NF4, FP4, k-means": dict(bits=4, group_size=-1, codebook="kmeans"),
    "trellis": dict(bits=2, group_size=-1, codebook="trellis", rotate=False),
    "rotated (`rotate=True`)": dict(bits=4, group_size=32, rotate=True),
    "BitNet": dict(quant_method="efficient_bitnet"),
}
GENERAL = [name for name in FORMATS if name != "bitnet"]  # which holds ternary weights alone, as the page says
HALF_ULP = 2**-11  # of float16, relative


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown, the first column to the left and the others centred."""
    lines = [header, ["---", *[":-:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def round_trip(model, path, format) -> str:
    """ "=": the same weights are read back, "≈": they differ by the rounding of scales to float16, "–": refused; "*":
    not by vLLM."""
    output = path / f"{format}.gguf"
    try:
        report = hf_efficient.export(model, output, format)
    except ValueError as error:
        assert "dequantize()" in str(error), "it says what to do instead"
        return "–"
    ours = weights(model)
    if format == "gguf":
        stored = unpackers.gguf(output, {"attn_q": 4, "attn_k": 2})
        theirs = {name: stored[place] for name, place in zip(ours, unpackers.gguf_names(ours))}
    else:
        theirs = getattr(unpackers, format.replace("-", "_"))(output)
    difference = largest_difference(ours, theirs)
    assert difference <= 2 * HALF_ULP
    return ("≈" if difference else "=") + ("" if {"vLLM", "llama.cpp"} & {*report.engines} else "\\*")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tmp_path_factory.mktemp("table")


def test_what_export_writes(plain):
    rows = []
    for name, config in EXPORTED.items():
        model = compressed(plain, model_dtype=torch.bfloat16, **config)
        folder = plain / f"{len(rows)}"
        folder.mkdir()
        rows.append([name, *(round_trip(model, folder, format) for format in GENERAL)])
    assert table(["", *(f'`"{format}"`' for format in GENERAL)], rows) in PAGE
