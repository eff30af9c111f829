"""Compression that needs to see activations: runs when `from_pretrained` has loaded the model, block by block."""

import copy
import importlib.util
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration import own_text
from hf_efficient.calibration.allocation import MOST
from hf_efficient.calibration.asked_gradients import asked_gradients, check_memory
from hf_efficient.calibration.data import load_tokenizer, load_tokens
from hf_efficient.calibration.steps import refinement, transforms
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.integrations.transformers_compat import block_classes


SENSITIVITY_WINDOWS = 16  # windows of the calibration text that bits and sparsities of single layers are chosen with
_LINEARS = (nn.Linear, Conv1D)
_OF_THE_LOSS = {"gradient", "fisher", "output_hessian", "token_weights"}  # fields of `LinearGradients`


def can_run(model, device_map) -> bool:
    """Whether `model`, without weights yet, can be run on random tokens of its own once it is loaded: they reach all
    of it, and it fits. Where a device_map such as "auto" spreads it is not known before."""
    places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
    if isinstance(device_map, str) or len(places) > 1 or "disk" in places:
        return False
    return own_text.reaches_all(model) and own_text.fits(model, device_map)


def prepare(config, schemes: dict, device_map, model, files=None) -> None:
    """Refuses what cannot be calibrated and reads the text, before weights are loaded.

    Args:
        config: its `calibration` is replaced by a copy, which holds the tokens where they come from elsewhere.
        schemes: module name -> its config, of the modules to calibrate.
        model: on the meta device.
        files: paths of its weights, or None. The tokenizer is that of their folder and revision, reached with the
            arguments of the call of `from_pretrained` in which this runs.

    Raises:
        ValueError: a model without text of its own where none is given; too little calibration text, no tokenizer for
            it, weights that would be offloaded while blocks run, fused experts with a method that reads gradients, or a
            sparsity that OWL cannot raise.
        ImportError: a dataset of the Hub without the package `datasets`.
    """
    config.calibration = copy.copy(config.calibration or CalibrationConfig())
    if config.calibration.source is None:
        config.calibration.own_text = config.calibration.own_text or "sampled"
        own_text.check(model, config.calibration)
    for is_asked, argument in (
        (_is_mixed, "mixed_precision=True"),
        (_is_owl, "allocation='owl'"),
        (_reads_loss, "method"),
    ):
        own = next(filter(is_asked, schemes.values()), None)
        if config.calibration.source == "inputs" and own is not None:
            argument = f"method={own.method!r}" if argument == "method" else argument
            raise ValueError(f"{argument} needs text: give calibration texts, a dataset or tokens instead of inputs")
    if isinstance(device_map, dict):
        _check_one_device(device_map)
    for name, own in schemes.items():
        if _reads_loss(own) and not isinstance(model.get_submodule(name), _LINEARS):
            raise ValueError(f"{name}: method={own.method!r} is not supported for fused experts")
        if _is_owl(own) and own.sparsity >= MOST:
            raise ValueError(
                f"{name}: sparsity={own.sparsity!r} is not supported with allocation='owl', which changes it by "
                f"block: it must be below {MOST}, or take allocation='uniform'"
            )
    check_memory(model, schemes, device_map)
    if config.calibration.source in ("texts", "dataset"):
        with torch.device("cpu"):  # transformers calls this where new tensors are meta tensors
            config.calibration.tokens = load_tokens(config.calibration, load_tokenizer(model.name_or_path, files))


def check_text(calibration, config, name_or_path: str) -> None:
    """Reads the text of `calibration`, where it is a file, as calibration will, so that what is wrong shows before a
    model is loaded. config: of the model `name_or_path`, where its tokenizer is.

    Raises ValueError for no such file, no text, too little of it, or windows longer than the model has positions;
    ImportError for a dataset of the Hub without the package `datasets`.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and calibration.sequence_length > positions:
        raise ValueError(
            f"sequence_length={calibration.sequence_length} is more than the {positions} positions of the model"
        )
    if Path(calibration.dataset).expanduser().exists() or importlib.util.find_spec("datasets") is None:
        load_tokens(calibration, load_tokenizer(name_or_path))


def _check_one_device(device_map: dict) -> None:
    devices = set(map(str, device_map.values()))
    if "disk" in devices or len(devices) > 1:
        raise ValueError(
            f"device_map spreads the model over {sorted(devices)}, but calibration needs it whole on one device: "
            "load on the cpu (CalibrationConfig(device='cuda') computes one block at a time there), save, and reload"
        )


def run(model, config, schemes: dict, residence=None) -> None:
    """Compresses the modules of `schemes` in place. Writes what was decided for single modules into
    `config.overrides`. residence: where the weights are; see `calibrate`."""
    from hf_efficient.calibration.run import calibrate

    if residence is not None:
        _check_block_by_block(config.calibration, schemes)
    _check_one_device(getattr(model, "hf_device_map", None) or {})  # "auto" is known only now
    source = config.calibration
    described = source.to_dict()
    if source.source is None:
        source.tokens = own_text.own_tokens(model, source)
    for differs, allocate in ((_is_mixed, _with_bits), (_is_owl, _with_sparsities)):
        chosen = {name: own for name, own in schemes.items() if differs(own)}
        if chosen:
            schemes = {**schemes, **allocate(model, chosen, source.tokens[:SENSITIVITY_WINDOWS])}
    gradients = _gradients(model, schemes, source)
    decided = calibrate(model, schemes, source, None, transforms(schemes), refinement(schemes), gradients, residence)
    own = {}
    for name, scheme in decided.items():
        before, top = config.for_module(name).scheme(), config.scheme()
        if any(before[field] != value for field, value in scheme.items()):
            own[name] = {field: value for field, value in scheme.items() if top[field] != value}
    config.overrides = {**own, **config.overrides}  # full names come first: the first match counts
    config.calibration = type(source)(**described)  # what describes the text, not the text


def _check_block_by_block(calibration, schemes: dict) -> None:
    """Raises ValueError where more than one block would have to be in memory."""
    for is_asked, argument in (
        (_is_mixed, "mixed_precision=True"),
        (_is_owl, "allocation='owl'"),
        (_reads_loss, "a method that reads gradients"),
    ):
        if any(map(is_asked, schemes.values())):
            raise ValueError(f"{argument} needs the whole model in memory, and memory=... reads it block by block")
    if calibration.source is None and calibration.own_text == "sampled":
        raise ValueError(
            "a model that is read block by block cannot write its own calibration text: give texts, a dataset or "
            "tokens (CalibrationConfig, --calibration)"
        )


def _with_bits(model, schemes: dict, tokens) -> dict:
    """The configs of `schemes` with the bits that each layer is to have."""
    from hf_efficient.calibration.sensitivity import choose_bits

    formats = {name: own.format() for name, own in schemes.items()}
    bits = choose_bits(model, formats, tokens, _blocks(model))
    return {name: type(own)(**{**own.scheme(), "bits": bits[name]}) for name, own in schemes.items()}


def _with_sparsities(model, schemes: dict, tokens) -> dict:
    """The configs of `schemes` with the sparsity that each layer is to have."""
    from hf_efficient.calibration.allocation import choose_sparsity

    linears = {name: own.sparsity for name, own in schemes.items() if isinstance(model.get_submodule(name), _LINEARS)}
    sparsity = choose_sparsity(model, linears, tokens, _blocks(model))
    return {name: type(schemes[name])(**{**schemes[name].scheme(), "sparsity": own}) for name, own in sparsity.items()}


def _gradients(model, schemes: dict, calibration) -> dict:
    """Module name -> the `LinearGradients` that its method asks for."""
    asked = {name: fields for name, own in schemes.items() if (fields := _reads_loss(own))}
    if not asked:
        return {}
    return asked_gradients(model, asked, calibration, _blocks(model))


def _blocks(model) -> list:
    return [module for module in model.modules() if type(module).__name__ in block_classes(model)]


def _is_mixed(own) -> bool:
    return getattr(own, "mixed_precision", False)


def _is_owl(own) -> bool:
    return getattr(own, "allocation", "uniform") == "owl"


def _reads_loss(own) -> set[str]:
    """What the method of a config asks for of the gradients of the whole model's loss."""
    return _OF_THE_LOSS.intersection(own.observed())
