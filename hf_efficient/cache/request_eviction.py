"""Eviction for requests whose blocks are allocated by the caller. Heads keep different tokens, but equally many, so
that one block table serves all heads and layers."""

from dataclasses import dataclass, field

import torch

from hf_efficient.cache.eviction.base import EvictionPolicy, Scorer, View
from hf_efficient.cache.eviction.rotary import Rotary
from hf_efficient.kernels.attention import api
from hf_efficient.kernels.attention.pages import Pages


def check(policy, kv_format: str) -> None:
    """Raises ValueError for what is no policy, and for what cannot be evicted in continuous batching."""
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(
            f"eviction={policy!r}: must be an EvictionPolicy, such as EvictionPolicy(KeyNorm(), budget=512)"
        )
    scorer, name = policy.scorer, type(policy.scorer).__name__
    if scorer.window or scorer.accumulates or type(scorer).counts is not Scorer.counts:
        raise ValueError(
            f"eviction with {name} in continuous batching: forwards keep no queries there, and all heads share a block "
            "table; allowed are scorers that look at the stored tokens and keep equally many of each head, such as "
            "KeyNorm() and SinkWindow()"
        )
    if kv_format in ("int4", "int2"):
        raise ValueError(
            f'kv_format={kv_format!r} with eviction: its tokens share scales and cannot leave one by one; use "int8", '
            '"fp8" or "auto"'
        )


@dataclass
class _Evicted:
    """What is left of a request. dropped: tokens that are gone. positions: of the tokens that stayed, in each layer
    [Hk, n]; those behind them are consecutive. sinks: keys and values of the first ones as they were, by layer."""

    dropped: int = 0
    positions: dict[int, torch.Tensor] = field(default_factory=dict)
    sinks: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class RequestEviction:
    """Applies `policy` to the requests of a `PageGroup` without windows. config: of the model.

    Raises ValueError where the policy moves keys and the model's rotary embedding does not allow it.
    """

    def __init__(self, policy: EvictionPolicy, group, config):
        self.policy, self.group = policy, group
        self.rotary = Rotary(config.get_text_config(decoder=True)) if policy.scorer.needs_rotary else None
        self._requests: dict[str, _Evicted] = {}

    def dropped(self, request: str) -> int:
        """Tokens of a request that are gone."""
        return self._requests[request].dropped if request in self._requests else 0

    def forget(self, request: str) -> None:
        self._requests.pop(request, None)

    def fork(self, source: str, request: str) -> None:
        """`request` begins as `source`."""
        if source in self._requests:
            one = self._requests[source]
            self._requests[request] = _Evicted(one.dropped, dict(one.positions), dict(one.sinks))

    def after(self, request: str, seen: int, new: int, is_prompt: bool, table: list[int]) -> int:
        """Evicts what is beyond the budget when the last `new` of `seen` tokens were stored in the blocks `table`.

        is_prompt: whether they belong to its prompt. Returns how many tokens are left.
        """
        policy, held = self.policy, seen - self.dropped(request)
        target = policy.target(seen)
        if held <= target or (policy.when == "prefill" and not is_prompt):
            return held
        size = next(iter(self.group.layers.values()))[0].shape[1]
        left = policy.left(target, size, is_prompt)
        one = self._requests.setdefault(request, _Evicted())
        pages = torch.tensor(table) * self.group.stride
        for layer in self.group.layers:
            self._evict(one, layer, seen, held, left, 0 if is_prompt else new, pages)
        one.dropped = seen - left
        return left

    def _evict(self, one: _Evicted, layer: int, seen: int, held: int, left: int, last: int, table) -> None:
        """Leaves `left` of `held` tokens in a layer, the `last` ones among them."""
        scorer, options = self.policy.scorer, self.group.scales.get(layer, {})
        stored = Pages.of_cache(*self.group.layers[layer], **options)
        used = table[: -(-held // stored[0].data.shape[1])]
        keys, values = (each.read(used).flatten(0, 1)[:held].transpose(0, 1) for each in stored)
        heads, count = len(keys), torch.arange(held)
        positions = (count + seen - held).repeat(heads, 1)
        if (known := one.positions.get(layer)) is not None:
            positions[:, : known.shape[1]] = known
        view = View(
            keys=keys[None], values=values[None], key_positions=positions[None],
            present=torch.ones(1, heads, held, dtype=torch.bool), queries=keys[None, :, :0],
            query_positions=positions[:1, :0], softmax_scale=keys.shape[2] ** -0.5, softcap=0.0, budgets=[left],
            accumulated=None, rotate=self.rotary,
        )  # fmt: skip
        recent = max(scorer.recent_tokens(left), min(last, left - scorer.sinks))
        stay = (count < scorer.sinks) | (count >= held - recent)
        scores = scorer.score(view)[0].float().masked_fill(stay, float("inf"))
        kept = scores.topk(left, sorted=False).indices.sort().values
        one.positions[layer] = positions.gather(1, kept)
        head = torch.arange(heads)[:, None]
        for tensor in (*self.group.layers[layer], *options.values()):
            raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            size = raw.shape[1]
            moved = raw[used[kept // size], kept % size, head]
            raw[used[count[:left] // size], count[:left] % size, head] = moved
        if scorer.reindexes:
            sinks = min(scorer.sinks, held)
            first = one.sinks.setdefault(layer, (keys[:, :sinks].clone(), values[:, :sinks].clone()))
            rotated = self.rotary(first[0], torch.tensor(seen - left)).to(first[0].dtype)
            size = stored[0].data.shape[1]
            slots = used[count[:sinks] // size] * size + count[:sinks] % size
            rotated, same = (x.transpose(0, 1).contiguous() for x in (rotated, first[1]))
            api.reshape_and_cache(rotated, same, *self.group.layers[layer], slots, **options)
