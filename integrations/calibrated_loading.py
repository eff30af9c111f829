"""Compression that needs to see activations: runs when `from_pretrained` has loaded the model, block by block."""


def check(config, plan: dict, device_map) -> None:
    """Refuses what cannot be calibrated, before weights are loaded. plan: module name -> its config.

    Raises:
        ValueError: no calibration text, or weights that would be offloaded while blocks run.
    """
    if config.calibration is None:
        name, own = next(iter(plan.items()))
        fields = [f"method={own.method!r}"]
        fields += [f"{field}=True" for field in ("refine", "mixed_precision") if getattr(own, field, False)]
        raise ValueError(
            f"calibration=None is not supported with {', '.join(fields)} ({name}): it must be "
            "CalibrationConfig(texts=[...]), CalibrationConfig(dataset='file.txt'), or another source of text"
        )
    devices = set((device_map or {}).values()) if isinstance(device_map, dict) else set()
    if "disk" in devices or len(devices) > 1:
        raise ValueError(
            f"device_map spreads the model over {sorted(map(str, devices))}, but calibration needs it whole on one device: "
            "load on the cpu (CalibrationConfig(device='cuda') computes one block at a time there), save, and reload"
        )


def run(model, config, plan: dict) -> None:
    """Compresses the modules of `plan` in place, and writes what was decided for single modules into `config.overrides`."""
    from transformers import AutoTokenizer

    from hf_efficient.calibration.run import calibrate

    tokenizer = None if config.calibration.tokens is not None else AutoTokenizer.from_pretrained(model.name_or_path)
    decided = calibrate(model, plan, config.calibration, tokenizer)
    own = {}
    for name, scheme in decided.items():
        before = config.for_module(name).scheme()
        if changed := {field: value for field, value in scheme.items() if before[field] != value}:
            own[name] = changed
    # Full names come first: the first match counts, and they carry every field of what they stand before
    config.overrides = {
        **{name: {**_override(config, name), **changed} for name, changed in own.items()},
        **config.overrides,
    }


def _override(config, name: str) -> dict:
    """The fields that the user's overrides set for the module."""
    top, own = config.scheme(), config.for_module(name).scheme()
    return {field: value for field, value in own.items() if top[field] != value}
