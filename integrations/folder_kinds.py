"""What `push` publishes, recognised by its files: each kind has its own tags, and its own way to be loaded."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_efficient.integrations import folder_record, model_card


WEIGHTS = (".safetensors", ".gguf")
INSTALL = "(not on PyPI: `pip install .` in a clone of its repository)"


@dataclass(frozen=True)
class Kind:
    """One kind of output. what: what it is, after the name of the base model. usage: (where it is loaded from, the
    base model, the engines in its record or None) -> Markdown."""

    name: str
    what: str
    usage: Callable[[str, str, list[str] | None], str]
    tags: tuple[str, ...] = ("quantized",)
    library: str = "transformers"
    relation: str = "quantized"


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _shell(*lines: str) -> str:
    return "\n".join(["```bash", *lines, "```"])


def _with_transformers(place: str, *extra: str) -> str:
    load = f"model = AutoModelForCausalLM.from_pretrained({json.dumps(place)})"
    return _python(*extra, "from transformers import AutoModelForCausalLM", "", load)


def _served(place: str, base: str, engines: list[str] | None) -> str:
    parts = []
    if engines is not None and "vLLM" in engines:
        parts += ["With vLLM:", _shell(f"vllm serve {shlex.quote(place)}")]
    others = [engine for engine in engines or () if engine not in ("vLLM", "transformers")]
    if others:
        parts.append(f"{' and '.join(others)} read the folder in the same way.")
    parts += [f"With transformers and hf_efficient {INSTALL}:", _with_transformers(place, "import hf_efficient")]
    return "\n\n".join(parts)


def _adopted(place: str, base: str, engines: list[str] | None) -> str:
    parts = [
        "With transformers and bitsandbytes:",
        _with_transformers(place),
        f"Without bitsandbytes, on CPUs and GPUs, with hf_efficient {INSTALL}:",
        _with_transformers(place, "import hf_efficient"),
    ]
    return "\n\n".join(parts)


def _gguf(place: str, base: str, engines: list[str] | None) -> str:
    if place.endswith(".gguf"):
        return "With llama.cpp:\n\n" + _shell(f"llama-cli -m {shlex.quote(place)}")
    commands = _shell(f"llama-cli -hf {shlex.quote(place)}", f"ollama run hf.co/{shlex.quote(place)}")
    return f"With llama.cpp or Ollama:\n\n{commands}"


def _plain(place: str, base: str, engines: list[str] | None) -> str:
    return f"An ordinary model of transformers, without the plugin, too:\n\n{_with_transformers(place)}"


def _heads(place: str, base: str, engines: list[str] | None) -> str:
    return f"With hf_efficient {INSTALL}, beside the model they were trained for:\n\n" + _python(
        "import hf_efficient",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained({json.dumps(base)}, dtype="auto")',
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(base)})",
        "hf_efficient.enable_speculation(model)",
        f"heads = hf_efficient.DraftHeads.from_pretrained({json.dumps(place)})",
        'prompt = tokenizer("The river runs", return_tensors="pt")',
        "output = model.generate(**prompt, assistant_model=heads, max_new_tokens=20)",
    )


def _context(place: str, base: str, engines: list[str] | None) -> str:
    return f"With hf_efficient {INSTALL}, beside the model they were trained for:\n\n" + _python(
        "import hf_efficient",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained({json.dumps(base)}, dtype="auto")',
        f"hf_efficient.ContextualSparsity.from_pretrained({json.dumps(place)}).apply(model)",
        "hf_efficient.enable_speculation(model)",
    )


OURS = "hf_efficient"
_EXPORTS = {  # quant_method -> what the tensors of a compressed layer are called
    "compressed-tensors": (".weight_packed", ".weight_scale"),
    "gptq": (".qzeros",),
    "awq": (".qzeros",),
    "bitsandbytes": (".absmax", ".SCB"),
}
KINDS = {
    OURS: Kind(OURS, "compressed", _plain),  # `model_card` has a card of its own for it
    "compressed-tensors": Kind("compressed-tensors", "in the layout of compressed-tensors", _served),
    "gptq": Kind("gptq", "in the layout of GPTQ", _served),
    "awq": Kind("awq", "in the layout of AutoAWQ", _served),
    "bitsandbytes": Kind("bitsandbytes", "in the layout of bitsandbytes", _adopted),
    "gguf": Kind("gguf", "as GGUF", _gguf, library="gguf"),
    "pruned": Kind("pruned", "with fewer weights", _plain, ("pruned",), relation="finetune"),
    "draft heads": Kind("draft heads", "guessed ahead by small heads that were trained for it", _heads,
                        ("speculative-decoding", "draft-heads"), OURS, "adapter"),
    "context predictors": Kind("context predictors", "with predictors of the neurons that each token needs", _context,
                               ("contextual-sparsity",), OURS, "adapter"),
}  # fmt: skip
ALLOWED = (
    "models that quantize, prune, prune-structure and recover write, their exports (compressed-tensors, gptq, awq, "
    "bitsandbytes, .gguf), draft heads and context predictors"
)


def recognise(output: Path) -> Kind:
    """The kind of `output`, a folder or a .gguf file.

    Raises:
        ValueError: it is none; names what is allowed.
    """
    if output.is_file() and output.suffix == ".gguf":
        return KINDS["gguf"]
    if (output / "config.json").is_file():
        return _of_model(output)
    for file, kind in (("draft_heads.json", "draft heads"), ("contextual_sparsity.json", "context predictors")):
        if (output / file).is_file():
            return KINDS[kind]
    if any(output.glob("*.gguf")):
        return KINDS["gguf"]
    raise ValueError(f"{output}: the folder holds no config.json and nothing else that is published: {ALLOWED}")


def _of_model(folder: Path) -> Kind:
    path = folder / "config.json"
    try:
        quantization = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
        method = None if quantization is None else quantization["quant_method"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no config of a model: {type(error).__name__} {error}") from None
    if isinstance(method, str) and method in model_card.CONFIGS:
        return KINDS[OURS]
    if isinstance(method, str) and method in _EXPORTS:
        endings = _EXPORTS[method]
        if not any(name.endswith(endings) for name in _tensor_names(folder)):
            raise ValueError(f"{path} says quant_method={method!r}, and no tensor is called *{' or *'.join(endings)}")
        return KINDS[method]
    record = folder_record.read(folder)
    if method is None and record is not None and record["kind"] in ("pruned", "recovered"):
        return KINDS["pruned"]
    raise ValueError(f"{path} has quant_method={method!r} and is nothing that is published: allowed are {ALLOWED}")


def _tensor_names(folder: Path) -> list[str]:
    names = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names += file.keys()
        except SafetensorError as error:
            raise ValueError(f"{folder}: {path.name!r} is not whole: {error}") from None
    return names
