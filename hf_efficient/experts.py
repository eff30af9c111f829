"""Fused expert weights of mixture-of-experts models, compressed."""

import functools

import torch
from torch import nn

from hf_efficient.formats import Format
from hf_efficient.integrations.transformers_releases import post_expert_norm
from hf_efficient.kernels.linear.grouped_cpu import ExpertLayouts
from hf_efficient.kernels.replay.recorder import as_one_step
from hf_efficient.layers import CompressedModule, CompressedWeight, apply_layout, placeholder


def is_fused_experts(module: nn.Module) -> bool:
    """Whether `module` is one of transformers' experts modules (`use_experts_implementation`) with 3-D weights."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and len(expert_weight_names(module)) == 2


def is_sorted_experts(module: nn.Module) -> bool:
    """Whether `module` is one of transformers' experts modules whose input repeats the hidden states for each expert
    (Llama 4)."""
    return type(module).__name__ == "Llama4TextExperts" and len(expert_weight_names(module)) == 2


def is_transposed(module: nn.Module) -> bool:
    """Whether the weights of an experts module are [experts, in_features, out_features]."""
    return is_sorted_experts(module) or module.is_transposed


def expert_weight_names(module: nn.Module) -> list[str]:
    """The names of the 3-D weights, up projection first."""
    names = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    return [name for name in names if getattr(getattr(module, name, None), "ndim", 0) == 3]


class EfficientExperts(CompressedModule):
    """Experts with compressed weights. `compress_experts` mixes it into an experts class of transformers, whose gate,
    activation and biases stay.

    For `<name>` in gate_up_proj (or up_proj) and down_proj, Parameters are the canonical tensors `<name>_qweight` [E,
    N, ...], `<name>_scale`, ..., with the output width N, whether or not the original is transposed. `<name>` itself is
    a `placeholder`, as `EfficientLinear.weight` is.

    adapters: `<name>` -> low-rank adapters (A [E * r, K], B [N, r * E], scaling) of the forwards that begin now, laid
    out as in PEFT: column j * E + e of B belongs to expert e.
    """

    adapters: dict[str, list] = {}  # replaced, never changed in place

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        """hidden_states [T, H], top_k_index int [T, k] and top_k_weights [T, k] -> [T, H].

        On a GPU the product of all experts is one launch; only the backward pass and adapters read numbers back. On a
        CPU it is one call of C++, for formats that have a C++ product. Others, and forwards that keep gradients, run
        the experts that have tokens one after the other.
        """
        forward = functools.partial(self._forward, self.adapters)
        return as_one_step(forward, hidden_states, top_k_index, top_k_weights)

    def _forward(self, adapters, hidden_states, top_k_index, top_k_weights):
        tokens, chosen = top_k_index.shape
        index = top_k_index.flatten().long()
        order = index.argsort(stable=True)
        if getattr(self, "_is_expert_parallel", False):
            return self._of_own_experts(adapters, hidden_states, index, order, top_k_weights)
        counts = torch.zeros(self.num_experts, dtype=torch.long, device=index.device)
        counts.scatter_add_(0, index, torch.ones_like(index))
        outputs = self._run(hidden_states[order // chosen], counts, adapters)
        weighted = outputs * top_k_weights.flatten()[order, None].to(outputs.dtype)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return weighted[back].view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _of_own_experts(self, adapters, hidden_states, index, order, top_k_weights):
        """The part of the output that the experts of this process make. Larger numbers in `index` than it has experts
        stand for those of the others."""
        counts = torch.bincount(index, minlength=self.num_experts + 1)[: self.num_experts]
        order = order[: int(counts.sum())]
        result = torch.zeros_like(hidden_states)
        if len(order):
            places = order // top_k_weights.shape[1]
            outputs = self._run(hidden_states[places], counts, adapters)
            outputs = outputs * top_k_weights.flatten()[order, None].to(outputs.dtype)
            result = result.index_add(0, places, outputs.to(result.dtype))
        return result

    def _run(self, rows: torch.Tensor, counts: torch.Tensor, adapters: dict) -> torch.Tensor:
        """rows [R, H] sorted by expert, counts int64 [E] -> [R, H]."""
        up_name, down_name = self._expert_names
        norm = post_expert_norm(self)
        each = [self.layouts(name + "_", rows.dtype) for name in self._expert_names]
        together = [self._together(layouts, rows, name, adapters) for layouts, name in zip(each, self._expert_names)]
        if None not in together:
            return self._run_together(*together, rows, counts, adapters)
        up, down = (getattr(layouts, "experts", layouts) for layouts in each)
        outputs, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            x = rows[start : start + count]
            h = apply_layout(up[expert], x, self._expert_bias(up_name, expert))
            h = self._activate(_adapt(h, x, adapters.get(up_name), expert, len(counts)))
            out = apply_layout(down[expert], h, self._expert_bias(down_name, expert))
            out = _adapt(out, h, adapters.get(down_name), expert, len(counts))
            outputs.append(out if norm is None else norm(out))
            start += count
            del h, out  # freed before the next expert needs as much
        return torch.cat(outputs)

    def _run_together(self, up, down, rows, counts, adapters: dict, experts=slice(None)) -> torch.Tensor:
        """`_run` by one product up and one down. experts: those that `up`, `down` and counts are of."""
        up_name, down_name = self._expert_names
        norm = post_expert_norm(self)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        sizes = counts.tolist() if adapters else None
        h = up.matmul(rows, offsets, self._expert_bias(up_name, experts))
        h = self._activate(_adapt_all(h, rows, adapters.get(up_name), sizes))
        out = down.matmul(h, offsets, self._expert_bias(down_name, experts))
        out = _adapt_all(out, h, adapters.get(down_name), sizes)
        return out if norm is None else norm(out)

    def _together(self, layouts, rows: torch.Tensor, name: str, adapters: dict):
        """What multiplies rows of all experts at once; None where each expert has to be called."""
        if not isinstance(layouts, ExpertLayouts):
            return layouts if getattr(layouts, "dtype", None) is rows.dtype else None
        learns = torch.is_grad_enabled() and bool(adapters)
        grouped = None if learns else layouts.grouped
        return grouped if grouped is not None and grouped.serves(rows, self._expert_bias(name)) else None

    def _activate(self, h: torch.Tensor) -> torch.Tensor:
        return self._apply_gate(h) if self.has_gate else self.act_fn(h)

    def __reduce_ex__(self, protocol):
        return _blank_experts, (type(self).__bases__[1],), self.__getstate__()

    def _expert_bias(self, name: str, expert: int | slice | torch.Tensor = slice(None)) -> torch.Tensor | None:
        return getattr(self, name + "_bias")[expert] if self.has_bias else None

    def extra_repr(self) -> str:
        described = (
            f"{w.prefix[:-1]}: {w.experts}x[{w.out_features}, {w.in_features}], {w.format}"
            for w in self.compressed_weights()
        )
        return "\n".join(described)


def _adapt(y: torch.Tensor, x: torch.Tensor, adapters: list | None, expert: int, experts: int) -> torch.Tensor:
    """y [R, N] plus the output of `adapters` (see `EfficientExperts`) for x [R, K] of one expert, in the dtype of y."""
    for a, b, scaling in adapters or ():
        a, b = a.view(experts, -1, a.shape[1])[expert], b.view(len(b), -1, experts)[..., expert]
        y = (y + (x.to(a.dtype) @ a.t() @ b.t()) * scaling).to(y.dtype)
    return y


def _adapt_all(y: torch.Tensor, x: torch.Tensor, adapters: list | None, sizes: list[int] | None) -> torch.Tensor:
    """`_adapt` of y and x, whose rows are sorted by expert; sizes: rows of each."""
    if not adapters:
        return y
    parts = zip(y.split(sizes), x.split(sizes), strict=True)
    return torch.cat([_adapt(*part, adapters, expert, len(sizes)) for expert, part in enumerate(parts)])


class EfficientSortedExperts(EfficientExperts):
    """As `EfficientExperts`, for a class whose input repeats the hidden states for each expert (see
    `is_sorted_experts`)."""

    is_transposed = has_gate = True
    has_bias = False

    def forward(self, hidden_states: torch.Tensor):
        """hidden_states [E * T, H], those of the first expert first -> [E * T, H]. A row of zeros is a token that the
        router keeps from the expert, and gives zeros; a CPU does not compute it."""
        return as_one_step(functools.partial(self._forward, self.adapters), hidden_states)

    def _forward(self, adapters, hidden_states):
        if hidden_states.is_cuda:
            tokens = len(hidden_states) // self.num_experts
            counts = torch.full((self.num_experts,), tokens, dtype=torch.long, device=hidden_states.device)
            return self._run(hidden_states, counts, adapters)
        routed = (hidden_states != 0).any(-1)
        out = torch.zeros_like(hidden_states)
        if routed.any():
            out[routed] = self._run(hidden_states[routed], routed.view(self.num_experts, -1).sum(1), adapters)
        return out

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return up * self.act_fn(gate)


@functools.cache
def _efficient_class(original: type) -> type:
    base = EfficientSortedExperts if original.__name__ == "Llama4TextExperts" else EfficientExperts
    return type(f"Efficient{original.__name__}", (base, original), {"__module__": original.__module__})


def _blank_experts(original: type) -> EfficientExperts:
    """An empty instance of the class that `compress_experts` makes of `original`, for copying and unpickling."""
    cls = _efficient_class(original)
    return cls.__new__(cls)


def compress_experts(module: nn.Module, format: Format) -> None:
    """Turns `module` into an `EfficientExperts` with uninitialized weights, in place. `is_fused_experts` or
    `is_sorted_experts` must hold for it."""
    module._expert_names = expert_weight_names(module)
    module.__class__ = _efficient_class(type(module))
    weights = []
    for name in module._expert_names:
        original = getattr(module, name)
        experts, out_features, in_features = original.transpose(1, 2).shape if module.is_transposed else original.shape
        weights.append(CompressedWeight(name + "_", out_features, in_features, format, experts))
        setattr(module, name, placeholder(original.dtype, original.device))
        dtype, device = original.dtype, original.device
    module._declare(weights, dtype, device)


def decompress_experts(module: EfficientExperts, dtype: torch.dtype) -> None:
    """Turns `module` back into its original class with ordinary weights in `dtype`, in place."""
    module.restore_canonical()
    for weight in module.compressed_weights():
        dense = module.dequantized(weight.prefix, dtype)
        dense = dense.transpose(1, 2).contiguous() if module.is_transposed else dense
        for parameter in weight.names().values():
            delattr(module, parameter)
        setattr(module, weight.prefix[:-1], nn.Parameter(dense))
    module.__class__ = type(module).__bases__[1]
    for attribute in ("_compressed", "_layouts", "_expert_names"):
        delattr(module, attribute)
