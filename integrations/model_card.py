"""The card of a compressed model: where it comes from, the recipe, how to load it, and what was measured of it, if
anything."""

import importlib.resources
import json
import math
import re
from pathlib import Path
from typing import Any

from hf_efficient.configs import BitNetConfig, CompressionConfig, SparseConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.evaluation import report


CONFIGS = {config.name: config for config in (WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig)}
_ALWAYS = ("bits", "group_size", "symmetric", "method", "dtype")  # of a recipe, also where they are the defaults
NO_ORIGIN = "A model whose origin is not recorded"
FOLDER_FIELD = "base_model_folder"  # of a card's metadata, where the base model has no id of the Hub
_PLAIN_NAME = re.compile(r"\w([\w .+\-]{0,94}\w)?")
_DERIVED = ("version", "input_scale", "dequantize", "calibration")  # not what a user passes


def check_form(name: str, architectures: Any, quantization: Any) -> None:
    """Raises ValueError where these fields of the config.json of `name` have another form than transformers gives
    them, or describe a compression of this package that there is not."""
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(each, str) for each in architectures)
    ):
        raise ValueError(f"{name}: architectures={architectures!r} in its config.json is no list of names")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization is not None and not isinstance(method, str):
        raise ValueError(f"{name}: quantization_config in its config.json names no quant_method")
    if method in CONFIGS:
        try:
            read_config(quantization)
        except ValueError as error:
            raise ValueError(f"{name}: quantization_config in its config.json: {error}") from None


def read_config(quantization: Any) -> CompressionConfig:
    """The config that a checkpoint's `quantization_config` describes.

    Raises:
        ValueError: it is none of this package, or holds what the config class refuses.
    """
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str) or method not in CONFIGS:
        raise ValueError(f"quantization_config has quant_method={method!r}: it must be one of {sorted(CONFIGS)}")
    return CONFIGS[method](**quantization)


def origin(name: str, base_model: str, licence: str | None) -> str | None:
    """The card of a folder that holds a compressed model and was not published yet: what was compressed, for `push`.

    Args:
        name: what the model is called.
        base_model: Hub id, or a local folder, whose name alone is published.
        licence: identifier of the Hub; None: not known.

    Returns None for a base model whose name is not plain.
    """
    from huggingface_hub import ModelCardData

    if is_hub_id(base_model):
        base, shown = {"base_model": base_model, "base_model_relation": "quantized"}, base_model
    else:
        shown = Path(base_model).resolve().name
        if not _PLAIN_NAME.fullmatch(shown):
            return None
        base = {FOLDER_FIELD: shown}
    data = ModelCardData(library_name="transformers", license=licence, tags=["hf_efficient", "quantized"], **base)
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {code_span(name)}\n\nMade from {code_span(shown)} with hf_efficient. "
        "`hf-efficient push` writes the whole card.\n"
    )


def check_report(content: Any) -> None:
    """Raises ValueError unless `content` has the form of the report.json that `hf-efficient run` writes, so that no
    text stands where a card shows a number."""
    try:
        described, hardware = content["environment"], content["environment"]["hardware"]
        texts = [content["model"], content["text"], described["date"], described["command"], hardware["cpu"]]
        numbers = [*content["windows"], content["prompts"], content["new_tokens"], hardware["threads"]]
        for variant in content["variants"]:
            texts.append(variant["name"])
            numbers += [variant[k] for k in ("weight_bytes", "weights_ratio", "peak_memory_bytes", "perplexity")]
            numbers += [variant["nll_difference"], variant["nll_difference_standard_error"]]
            for key in ("one_prompt", "batch"):
                numbers += [variant["speed_ratio"][key]]
                numbers += [variant[key][k]["median"] for k in ("tokens_per_second", "time_to_first_token_s")]
                if speculation := variant[key].get("speculation"):
                    numbers += [speculation["tokens_per_second"]["median"], speculation["tokens_per_step"]]
        assert len(content["windows"]) == 2 and content["variants"] and isinstance(described["versions"], dict)
        assert all(isinstance(value, str) for value in texts)
        assert all(type(value) in (int, float) and math.isfinite(value) for value in numbers)
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the report is not one that `hf-efficient run` wrote ({type(error).__name__} {error})"
        ) from None


def render(
    name: str,
    config: CompressionConfig,
    *,
    repo_id: str | None = None,
    architecture: str = "AutoModelForCausalLM",
    base_model: str | None = None,
    licence: str | None = None,
    content: dict | None = None,
    variant: dict | None = None,
    commands: list[str] | None = None,
    evaluated: bool = False,
) -> str:
    """The card as Markdown with YAML metadata. Values are data: what Jinja, YAML or Markdown would read in them is
    escaped or refused, and every figure is one of `variant`.

    Args:
        name: what the model is called.
        config: its recipe.
        repo_id: where it will be loaded from; None: a folder of the reader's.
        architecture: class of transformers.
        base_model: Hub id, or a local folder, whose name alone is published.
        licence: identifier of the Hub, such as "apache-2.0"; None: not known.
        content: a report (see `check_report`) and, of its variants, the one that measured this model.
        commands: of `hf-efficient`, that made it; None: not known.
        evaluated: whether `evaluation_card.add_to` will add figures.

    Raises:
        ValueError: a name, class or licence that is not one.
    """
    from huggingface_hub import ModelCard, ModelCardData

    check_name("name", name)
    if not (isinstance(architecture, str) and architecture.isidentifier() and architecture.isascii()):
        raise ValueError(f"architecture={architecture!r} is not a class of transformers")
    check_licence(licence)
    on_hub = base_model is not None and is_hub_id(base_model)
    if base_model is not None and not on_hub:
        base_model = base_name(base_model)
    data = ModelCardData(
        base_model=base_model if on_hub else None,
        base_model_relation="quantized" if on_hub else None,
        library_name="transformers",
        license=licence,
        tags=["hf_efficient", "quantized"],
        model_name=name,
        eval_results=None if variant is None else _eval_results(content, variant),
    )
    base = NO_ORIGIN
    if base_model is not None:
        base = f"[{base_model}](https://huggingface.co/{base_model})" if on_hub else f"`{base_model}`"
    causal = architecture.endswith("ForCausalLM") or architecture == "AutoModelForCausalLM"
    measured = {} if variant is None else _measured(content)
    template = importlib.resources.files("hf_efficient.model_cards") / "TEMPLATE.md"
    card = ModelCard.from_template(
        data,
        template_str=template.read_text(),
        name=name,
        base=base,
        stored=_stored(config),
        auto_class="AutoModelForCausalLM" if causal else architecture,
        recipe=recipe(config),
        made_with=None if commands is None else code_block(commands, "bash"),
        source=json.dumps(base_model if on_hub else f"path/to/{base_model or 'the base model'}"),
        saved=json.dumps(repo_id or "path/to/this folder"),
        calibrated=_calibrated(config),
        report=content,
        evaluated=evaluated,
        variant=variant,
        **measured,
    )
    return str(card)


def recipe(config: CompressionConfig) -> str:
    """The Python expression that makes `config`, without the calibration text itself."""
    arguments = {
        field: getattr(config, field)
        for field, default in config.plain().items()
        if field in config._fields() and field not in _DERIVED
        if field in _ALWAYS or getattr(config, field) not in (default, {})
    }
    parts = [
        f"{field}={f'hf_efficient.{recipe(value)}' if isinstance(value, CompressionConfig) else _literal(value)}"
        for field, value in arguments.items()
    ]
    if config.calibration is not None:
        described = config.calibration.to_dict()
        shown = {k: described[k] for k in ("num_samples", "sequence_length", "seed")}
        source = {"dataset": described["dataset"]} if described["dataset"] else {"texts": ["..."]}
        source = {"own_text": described["own_text"]} if described["own_text"] else source
        values = ", ".join(f"{k}={_literal(v)}" for k, v in {**source, **shown}.items())
        parts.append(f"calibration=hf_efficient.CalibrationConfig({values})")
    return f"{type(config).__name__}({', '.join(parts)})"


def _literal(value: Any) -> str:
    """`value` in Python, with double quotes where that is only a matter of taste."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a model's id on the Hub and is no folder here."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def is_licence(licence: str) -> bool:
    """Whether `licence` has the form of an identifier of the Hub, such as "apache-2.0"."""
    return re.fullmatch(r"[a-z0-9][a-z0-9.\-]{0,60}", licence) is not None


def check_licence(licence: str | None) -> None:
    """Raises ValueError where `licence` is given and no identifier of the Hub."""
    if licence is not None and not is_licence(licence):
        raise ValueError(f"licence={licence!r} is not an identifier of the Hub such as 'apache-2.0'")


def base_name(folder: str) -> str:
    """The name of the folder of a base model, for a card. Raises ValueError where it is not plain."""
    return check_name("base_model", Path(folder).name)


def check_name(argument: str, name: str) -> str:
    """`name`, if it is a plain one: letters, digits, `_`, `-`, `+`, `.` and spaces inside.

    Raises ValueError otherwise, so that no name carries markup or leads to another folder.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise ValueError(f"{argument}={name!r} is not a plain name: letters, digits, '_', '-', '+', '.' and spaces")
    return name


def code_span(text: str) -> str:
    """`text` as one line of Markdown code, whatever it holds."""
    line = " ".join(str(text).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def code_block(lines: list[str], language: str) -> str:
    """A block of Markdown code with one line for each of `lines`, whatever they hold."""
    text = "\n".join(" ".join(line.split()) for line in lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _stored(config: CompressionConfig) -> str:
    if isinstance(config, BitNetConfig):
        return "stored as -1, 0 and 1 with a scale, their inputs rounded to int8"
    if isinstance(config, W8A8Config):
        return f"and their inputs rounded to {config.dtype}"
    if isinstance(config, SparseConfig):
        kept = "" if config.weights is None else f", the others stored in {config.weights.bits} bits"
        share = config.pattern or f"{config.sparsity:.0%}"
        return f"pruned ({share} with {config.method}){kept}"
    return f"stored in {config.bits} bits{' on average' if config.mixed_precision else ''}"


def _calibrated(config: CompressionConfig) -> str | None:
    dataset = None if config.calibration is None else config.calibration.dataset
    return None if dataset is None else code_span(Path(dataset).name if Path(dataset).is_absolute() else dataset)


def _eval_results(content: dict, variant: dict) -> list:
    from huggingface_hub import EvalResult

    where = {"task_type": "text-generation", "dataset_type": "text", "dataset_name": _text(content)}
    error = {"standard_error": variant["nll_difference_standard_error"]}
    return [
        EvalResult(metric_type="perplexity", metric_value=variant["perplexity"], **where),
        EvalResult(
            metric_type="nll_difference",
            metric_name="mean negative log-likelihood minus that of the base model, nat",
            metric_value=variant["nll_difference"],
            metric_args=error,
            **where,
        ),
        EvalResult(
            metric_type="tokens_per_second",
            metric_name="generated tokens a second, one prompt",
            metric_value=variant["one_prompt"]["tokens_per_second"]["median"],
            **where,
        ),
    ]


def _measured(content: dict) -> dict[str, Any]:
    """What the template shows of a report, as text that is safe in Markdown."""
    environment = content["environment"]
    hardware = environment["hardware"]
    versions = (f"{package} {version}" for package, version in environment["versions"].items())
    source = content.get("model_source")
    return {
        "first": content["variants"][0],
        "table": report.table(content),
        "text": code_span(_text(content)),
        "model_source": source and code_span(source),
        "hardware": code_span(hardware.get("gpu") or hardware["cpu"]),
        "versions": code_span(", ".join(versions)),
        "commit": code_span(environment.get("commit")),
        "date": code_span(environment["date"]),
        "command": code_span(environment["command"]),
    }


def _text(content: dict) -> str:
    """What perplexity was measured on; of a file only its name."""
    return Path(content["text"]).name if Path(content["text"]).is_absolute() else content["text"]
