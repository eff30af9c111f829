"""Drafts from the target's own weights: with layers skipped, an early exit, or in few bits."""

import torch

from hf_efficient.cache.bookkeeping.model_key import version_of
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.generation import model_state
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.drafters.draft_model import check_decoder_only, check_tree, draft_settings
from hf_efficient.generation.drafters.layer_skip import skippable_layers, with_layers
from hf_efficient.generation.drafters.low_precision import low_precision_modules, with_modules
from hf_efficient.generation.model_traits import has_states
from hf_efficient.generation.replay.pool import ReplayPool


GROUP_SIZE = 32  # weights that share a scale: the kernels of all devices read it, and 2 bits need so small a group


class SelfSpeculation(AssistantDrafter):
    """Drafts with the target itself in a cheaper form; the target does not change. Give `bits`, one of `skip_layers`
    and `exit_layer`, or both.

    A draft without layers takes no memory but its cache. Copies of the linear layers in few bits take `bits` + 0.75
    bits a weight in 16-bit models. They are made in the first call with a model, and again after its weights change.

    >>> model.generate(**inputs, assistant_model=SelfSpeculation(bits=4))

    Args:
        skip_layers: indices of decoder layers to leave out (Zhang et al. 2023, "Draft & Verify"; see `search`).
        exit_layer: run only this many first layers, then the model's own norm and output head, >= 1 (Elhoushi et al.
            2024, "LayerSkip": good drafts need a model trained for it).
        bits: 2, 3, 4 or 8: copies rounded to nearest in groups of 32, as `WeightOnlyConfig` makes them.
        num_tokens: the most tokens of a draft; None: `num_assistant_tokens` of the model's generation config, or 8. A
            draft ends early as in `AssistantDrafter`.
        tree: as in `AssistantDrafter`.

    Raises ValueError for other arguments, and in `check` for layers that the model does not have.
    """

    def __init__(
        self,
        *,
        skip_layers: list[int] | None = None,
        exit_layer: int | None = None,
        bits: int | None = None,
        num_tokens: int | None = None,
        tree: int | None = None,
    ):
        if skip_layers is not None and exit_layer is not None:
            raise ValueError(f"skip_layers={skip_layers} and exit_layer={exit_layer}: give one of them")
        if skip_layers is None and exit_layer is None and bits is None:
            raise ValueError("nothing makes the draft cheaper than the model: give skip_layers, exit_layer or bits")
        if skip_layers is not None and not _is_list_of_int(skip_layers):
            raise ValueError(f"skip_layers={skip_layers!r}: must be a list of at least one layer index")
        for name, value in (("exit_layer", exit_layer), ("num_tokens", num_tokens)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
        self.config = None if bits is None else WeightOnlyConfig(bits=bits, group_size=GROUP_SIZE, method="rtn")
        self.skip_layers, self.exit_layer = skip_layers, exit_layer
        check_tree(tree)
        self.num_tokens, self.tokenizers, self.tree, self.draws = num_tokens, (None, None), tree, tree is None

    def check(self, model) -> None:
        check_decoder_only(model, "SelfSpeculation")
        if has_states(model):
            raise ValueError(
                f"SelfSpeculation: {type(model).__name__} has layers with a recurrent state, and a draft must be a "
                "model without: take another drafter, such as PromptLookup()"
            )
        draft, layers = model, self._draft_layers(len(skippable_layers(model)[1]))
        if self.config is not None:
            draft = with_modules(draft, self._few_bit_layers(model))
        self.model = with_layers(draft, layers)
        max_tokens, self.threshold = draft_settings(model, 8)
        self.max_tokens = self.num_tokens or max_tokens
        self._target_pool = model_state.current(model).pool
        super().check(model)
        self.relative_cost = _bytes(self.model) / _bytes(model)

    def _replay_pool(self) -> tuple[ReplayPool, bool]:
        # forwards of the draft can be captured where the target's can; but each call makes a new view of the target as
        # its draft, so captures of it are of no use to later calls
        return self._target_pool, False

    def _few_bit_layers(self, model) -> dict[str, torch.nn.Module]:
        """The layers of `model` in few bits, by name: made anew where its weights have changed, merged adapters among
        them. Changes through `Tensor.data` are not noticed."""
        state, layers = model_state.state_of(model).drafter(self), skippable_layers(model)[1]
        # PEFT merges through `data`
        merged = [list(getattr(module, "merged_adapters", ())) for module in layers.modules()]
        key = model.device, model.dtype, merged, [version_of(weight) for weight in layers.parameters()]
        if state.few_bit_layers is None or state.few_bit_layers[0] != key:
            state.few_bit_layers = None  # before others take memory
            state.few_bit_layers = key, low_precision_modules(model, self.config)
        return state.few_bit_layers[1]

    def _draft_layers(self, count: int) -> list[int]:
        """The indices of the target's `count` layers that the draft has. Raises ValueError out of range."""
        if self.exit_layer is not None and self.exit_layer > count:
            raise ValueError(f"exit_layer={self.exit_layer}: the model has {count} layers")
        skipped = set(range(self.exit_layer or count, count)) if self.skip_layers is None else set(self.skip_layers)
        unknown = sorted(index for index in skipped if not 0 <= index < count)
        if unknown:
            raise ValueError(f"skip_layers={self.skip_layers}: the model has layers 0 to {count - 1}, not {unknown[0]}")
        if len(skipped) == count:
            raise ValueError(
                f"skip_layers={self.skip_layers}: these are all layers of the model; at least one must stay"
            )
        return [index for index in range(count) if index not in skipped]

    @classmethod
    @torch.no_grad()
    def search(cls, model, input_ids: torch.Tensor, number: int, **options) -> "SelfSpeculation":
        """A drafter that skips `number` layers, 1 to all but one, chosen greedily on a text.

        Each step leaves out the layer without which the draft's most probable token equals the whole model's at the
        most positions. Takes about `number` times as many forwards of the text as the model has layers.

        Args:
            input_ids: the text, int64 [batch, length], without padding.
            options: further arguments of `SelfSpeculation`.

        Raises ValueError for another `number`.
        """
        kept = list(range(len(skippable_layers(model)[1])))
        if type(number) is not int or not 1 <= number < len(kept):
            raise ValueError(f"number={number!r}: must be an integer from 1 to {len(kept) - 1}")
        skipped, expected = [], model(input_ids, use_cache=False).logits.argmax(-1)

        def agreement(without: int) -> float:
            draft = with_layers(model, [index for index in kept if index != without])
            return (draft(input_ids, use_cache=False).logits.argmax(-1) == expected).float().mean().item()

        for _ in range(number):
            skipped.append(max(kept, key=agreement))
            kept.remove(skipped[-1])
        return cls(skip_layers=sorted(skipped), **options)


def _bytes(model) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _is_list_of_int(value) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(index) is int for index in value)
