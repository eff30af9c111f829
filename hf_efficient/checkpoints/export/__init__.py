"""Leaving for other engines: models compressed here, written in the layouts that vLLM, SGLang, TGI, llama.cpp and
Ollama read. One file a target; a target says what it cannot hold before anything is written."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from hf_efficient.checkpoints.export.source import open_source
from hf_efficient.files import why_not_new, why_not_writable


logger = logging.get_logger(__name__)
FORMATS = ("compressed-tensors", "gptq", "awq", "bitnet", "gguf")


@dataclass(frozen=True)
class ExportReport:
    """What `export` wrote: a folder, or a file (gguf), of `nbytes` bytes.

    `rounding`: a target that keeps scales in float16 rounds those that were not: the largest change of a weight, as a
    part of the largest weight that its layer can hold. 0.0: every weight is the same number as before. `engines`: the
    engines that read it.
    """

    path: Path
    format: str
    quantized_layers: int
    nbytes: int
    rounding: float
    engines: tuple[str, ...]


def export(
    model,
    output,
    format: str = "compressed-tensors",
    tokenizer=None,
    *,
    describe: Callable[[Path, tuple[str, ...]], None] = lambda path, engines: None,
) -> ExportReport:
    """Writes a model of `from_pretrained(quantization_config=...)` or `hf-efficient quantize` for another engine. The
    codes stay the same: nothing is quantized again.

    Args:
        model: the model, or the folder where it was saved, which is read one layer at a time.
        output: "gguf": a file whose name ends in .gguf, replaced when the new one is complete. Else a folder that does
            not exist or is empty. A failed or interrupted export leaves what was there.
        format: "compressed-tensors" (vLLM, SGLang, TGI, transformers; int4, int8 and int2 weights, int8 and fp8
            activations), "gptq" (the same number of bits in all layers; vLLM reads symmetric 4 and 8 bits only, and a
            warning says so), "awq" (4 bits), "bitnet" (ternary weights; transformers) or "gguf" (llama.cpp, Ollama;
            the Llama family and Qwen 2 and 3; 4 bits and symmetric 8 bits in groups of multiples of 32, and dense
            models).
        tokenizer: saved beside the weights; by default the one in the folder, if any.
        describe: called with (the folder that is being written, or the path of the file before it is there; the engines
            that read it) to add files.

    Returns:
        an `ExportReport`: `path`, `format`, `quantized_layers`, `nbytes`, `rounding` and `engines`.

    Raises:
        ValueError: an argument is not allowed, or the format cannot store a layer; names it and says what to do
            instead. Nothing is written then.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not supported: it must be one of {FORMATS}")
    output = Path(os.fspath(output)).absolute()
    if format == "gguf":
        if output.suffix != ".gguf" or output.is_dir():
            raise ValueError(
                f"output={str(output)!r} is not supported: for format='gguf' it must be a file name in .gguf"
            )
        if importlib.util.find_spec("gguf") is None:
            raise ValueError("format='gguf' needs the package gguf: pip install gguf")
    if reason := why_not_writable(output) if format == "gguf" else why_not_new(output):
        raise ValueError(f"output={str(output)!r} {reason}")
    with open_source(model, tokenizer) as source:
        if format == "gguf":
            from hf_efficient.checkpoints.export import gguf

            engines = ("llama.cpp", "Ollama")
            rounding = gguf.write(source, output, lambda: describe(output, engines))
        else:
            from hf_efficient.checkpoints.export import awq, bitnet, compressed_tensors, folder, gptq

            source = source.with_dense_embedding()
            targets = {"compressed-tensors": compressed_tensors.CompressedTensors, "gptq": gptq.Gptq, "awq": awq.Awq}
            targets["bitnet"] = bitnet.BitNet
            target = targets[format](source)
            engines = target.engines()
            if "vLLM" not in engines and format != "bitnet":
                logger.warning(_not_served(source, format, engines, targets["compressed-tensors"]))
            rounding = folder.write(source, target, output, lambda new: describe(new, engines))
        files = [output] if output.is_file() else output.iterdir()
        nbytes = sum(file.stat().st_size for file in files)
        return ExportReport(output, format, len(source.layers), nbytes, rounding, engines)


def _not_served(source, format: str, engines: tuple[str, ...], alternative) -> str:
    """Who reads a folder that vLLM does not read, and what to write for vLLM instead."""
    try:
        is_better = "vLLM" in alternative(source).engines()
    except ValueError:  # it cannot hold the model
        is_better = False
    advice = (
        "format='compressed-tensors' is read by vLLM, too"
        if is_better
        else "for vLLM quantize to 4 bits, or to symmetric 8 bits, in groups of 32, 64 or 128 or per channel (-1) and "
        "export to 'compressed-tensors'"
    )
    return f"as {format} this model is read by {' and '.join(engines)}, and not by vLLM: {advice}"
