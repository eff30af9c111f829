"""The `config_groups` of a compressed-tensors checkpoint, checked field by field before anything is read from them."""

from hf_efficient.checkpoints.adopt.foreign import one_of, text, typed


_NULL = type(None)
_FIELDS = {  # of weights and activations: types, and how they are called in an error
    "num_bits": ((int, _NULL), "an integer"),
    "type": ((str, _NULL), "a string"),
    "strategy": ((str, _NULL), "a string or null"),
    "symmetric": ((bool,), "true or false"),
    "group_size": ((int, _NULL), "an integer or null"),
    "block_structure": ((list, tuple, str, _NULL), "a list of two integers or null"),
    "actorder": ((str, bool, _NULL), "a string, true, false or null"),
    "dynamic": ((bool, str), "true, false or 'local'"),
}
_SIDES = ("weights", "input_activations", "output_activations")


def quantized_groups(saved: dict) -> list[dict]:
    """The groups that have quantized weights. Raises ValueError, naming the field, for a value of another type than
    it has."""
    where = "config_groups"
    groups = typed(where, saved.get(where), (dict, _NULL), "an object of groups or null") or {}
    for name, group in groups.items():
        where = f"config_groups.{name}"
        typed(where, group, (dict,), "an object with weights and targets")
        targets = typed(f"{where}.targets", group.get("targets"), (list, tuple, _NULL), "a list of strings or null")
        for target in targets or ():
            typed(f"{where}.targets", target, (str,), "a list of strings or null")
        for side in _SIDES:
            scheme = typed(f"{where}.{side}", group.get(side), (dict, _NULL), "an object or null") or {}
            for field, (kinds, allowed) in _FIELDS.items():
                if field in scheme:
                    value = scheme[field]
                    typed(
                        f"{where}.{side}.{field}", value if isinstance(value, kinds) else _plain(value), kinds, allowed
                    )
            if scheme and side != "weights" and not group.get("weights"):
                raise ValueError(
                    f"quantization_config: {where}.{side} without weights are not read by hf_efficient, expected null"
                )
        typed(f"{where}.format", _plain(group.get("format")), (str, _NULL), "a string or null")
    _refuse_rotated_inputs(saved)
    return [group for group in groups.values() if group.get("weights")]


def _refuse_rotated_inputs(saved: dict) -> None:
    """Raises ValueError where `transform_config` has inputs or outputs multiplied by a matrix in each forward. Those of
    weights alone are in the stored weights."""
    kinds, allowed = (dict, _NULL), "an object or null"
    config = typed("transform_config", saved.get("transform_config"), kinds, allowed) or {}
    schemes = typed("transform_config.config_groups", config.get("config_groups"), kinds, allowed) or {}
    for name, scheme in schemes.items():
        where = f"transform_config.config_groups.{name}"
        applied = typed(where, scheme, (dict,), "an object with apply").get("apply")
        for each in typed(f"{where}.apply", applied, (list, tuple, _NULL), "a list of objects or null") or ():
            place = typed(f"{where}.apply", each, (dict,), "a list of objects or null").get("location")
            one_of(f"{where}.apply.location", text(place), ("weight_input", "weight_output"))


def _plain(value):
    """A value that may be of an enum of the library's."""
    return text(value) if hasattr(value, "value") else value
