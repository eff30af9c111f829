"""A model's own rotary position embedding, by which stored keys and queries are moved to other positions."""

import ast
import importlib
import inspect
import textwrap

import torch


_VARYING = ("dynamic", "longrope")  # rope types whose frequencies change with the length of the text


class Rotary:
    """The rotary embedding of the model that a config belongs to, found in the modeling module beside the config's.

    Raises ValueError where stored keys cannot be moved by it: where the module has no such functions, frequencies
    change with the length, some layers do not rotate or change the keys afterwards, or rotations do not add up.
    """

    def __init__(self, config):
        self._name = type(config).__name__
        parameters = getattr(config, "rope_parameters", None) or {}
        layer_type = "full_attention"  # the only one that evicts
        parameters = parameters.get(layer_type, parameters)
        if parameters.get("rope_type") in _VARYING or "mrope_section" in parameters:
            raise self._refusal(f"its rotary embedding ({parameters}) is not one rotation for all texts")
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        classes = [
            value
            for name, value in vars(module).items()
            if name.endswith("RotaryEmbedding") and inspect.isclass(value) and value.__module__ == module.__name__
        ]
        self._apply = getattr(module, "apply_rotary_pos_emb", None)
        if len(classes) != 1 or self._apply is None or not parameters:
            raise self._refusal(f"{module.__name__} has no rotary embedding of the usual form")
        for name, value in vars(module).items():
            if name.endswith("Attention") and inspect.isclass(value) and not _stores_rotated_keys(value):
                raise self._refusal(f"{name} does not rotate the keys of all layers, or changes them afterwards")
        self._embedding = classes[0](config)
        by_type = "layer_type" in inspect.signature(self._embedding.forward).parameters
        self._arguments = (layer_type,) if by_type else ()
        self._means: dict[tuple, torch.Tensor] = {}
        self._check()

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"eviction of a model of {self._name}: {reason}. Use a scorer that does not move keys, such as KeyNorm()."
        )

    def _check(self) -> None:
        """Raises ValueError unless rotating by 3 and then by 40 is rotating by 43."""
        cos, _ = self._embedding(
            torch.zeros(1, dtype=torch.float32), torch.zeros(1, 1, dtype=torch.long), *self._arguments
        )
        states = torch.randn(2, cos.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        try:
            first, second, both = (self(states, torch.tensor([n])) for n in (3, 40, 43))
            twice = self(first, torch.tensor([40]))
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._refusal(f"its rotary embedding cannot be applied ({error})") from error
        if not torch.allclose(twice, both, atol=1e-4) or torch.allclose(second, states):
            raise self._refusal("its rotary embedding is not a rotation by the distance")

    def __call__(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`states` [..., n, D] moved on by `positions`, float32; dimensions beyond the rotary ones stay.

        positions: int64, expands to [..., n], may be negative.
        """
        self._embedding.to(states.device)
        positions = positions.expand(states.shape[:-1]).reshape(1, -1)
        flat = states.float().reshape(1, 1, -1, states.shape[-1])
        cos, sin = self._embedding(flat, positions, *self._arguments)
        scaling = torch.hypot(cos, sin).clamp_min(1e-30)  # the factor of YaRN and others, already in the states
        rotated, kept = flat[..., : cos.shape[-1]], flat[..., cos.shape[-1] :]
        rotated, _ = self._apply(rotated, rotated, cos / scaling, sin / scaling)
        return torch.cat([rotated, kept], -1).view(states.shape)

    def mean_ahead(self, future: int, dim: int, device) -> torch.Tensor:
        """float32 [D, D], the mean of the matrices M such that x @ M is x [D] moved on by 1 to `future` positions."""
        key = future, dim, device
        if key not in self._means:
            ahead = torch.arange(1, future + 1, device=device)[:, None]
            self._means[key] = self(
                torch.eye(dim, device=device, dtype=torch.float32).expand(future, -1, -1), ahead
            ).mean(0)
        return self._means[key]


def _stores_rotated_keys(attention: type) -> bool:
    """False when this class rotates only under a condition (some layers of Cohere2 and SmolLM3 have no positions), or
    normalizes the keys after that (Hunyuan)."""
    keys = None
    for statement in ast.parse(textwrap.dedent(inspect.getsource(attention.forward))).body[0].body:
        text = ast.unparse(statement)
        if "apply_rotary_pos_emb(" in text:
            if not isinstance(statement, ast.Assign):
                return False
            keys = ast.unparse(statement.targets[0].elts[1])
        elif keys is not None and text.startswith(f"{keys} = ") and "norm" in text:
            return False
    return True
