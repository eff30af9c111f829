"""What a model's forward reads, multiplies and allocates, traced on the meta device: shapes, no numbers."""

import types
import weakref
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface

from hf_efficient.embeddings import EfficientEmbedding
from hf_efficient.experts import EfficientExperts, is_fused_experts
from hf_efficient.integrations.transformers_compat import expert_activation
from hf_efficient.integrations.transformers_releases import cache_name, states_name
from hf_efficient.layers import CompressedModule, EfficientLinear


ATTENTION = "hf_efficient_shapes"  # the attention implementation that records shapes and computes nothing


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one call of an attention function."""

    batch: int
    heads: int  # of the queries
    queries: int  # positions
    keys: int  # positions
    key_dim: int
    value_dim: int
    window: int | None  # keys that a query sees; None for all
    before: int | None  # keys in front of the queries; None where the keys are not the whole causal text

    def flops(self, more: float) -> float:
        """2 * (key_dim + value_dim) for each pair of a query and a key that it sees, with `more` tokens in front."""
        if self.before is None:
            pairs = self.queries * self.keys
        else:
            pairs = visible_pairs(self.queries, self.before + more, self.window)
        return 2 * self.batch * self.heads * (self.key_dim + self.value_dim) * pairs


def visible_pairs(queries: int, context: float, window: int | None) -> float:
    """Pairs of a causal query and a key: query i = 1 .. `queries` sees the min(`context` + i, `window`) newest keys."""
    growing = queries if window is None else max(0, min(queries, window - context))
    return growing * context + growing * (growing + 1) / 2 + (queries - growing) * (window or 0)


@dataclass
class Trace:
    """One forward."""

    flops: int = 0  # of matrix products and convolutions; attention is apart
    rounded_flops: int = 0  # those among them whose inputs the config rounds to 8 bits
    attention: list[AttentionShape] = field(default_factory=list)
    # module whose parameters are read whole -> None, or of experts (chosen for a token, all, tokens)
    read: dict[nn.Module, tuple[int, int, int] | None] = field(default_factory=dict)
    activation_bytes: int = 0  # the most that was alive at once of what the forward allocated
    # layer of the cache -> (heads, key dim, value dim)
    keys: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    cache: dict[str, object] = field(default_factory=dict)  # {argument of the forward: the cache that it returned}
    outputs: object = None
    held: int = 0  # tokens in the cache that the forward was given


class Tracer:
    """Runs a model that lies on the meta device.

    Compressed layers and experts multiply with empty weights of their shape, each expert of a mixture its share of the
    tokens. Attention records its shape and computes nothing.

    Args:
        model: built with `attn_implementation=ATTENTION`.
        rounds_inputs: whether its compressed layers round inputs to 8 bits.
        writes_codes: whether they write the rounded inputs to memory first.
        on_cpu: whether they use the kernels of a CPU.
        one_by_one: whether compressed experts run one after another.
    """

    def __init__(self, model: nn.Module, rounds_inputs: bool, writes_codes: bool, on_cpu: bool, one_by_one: bool):
        self.one_by_one = one_by_one
        self.model, self.trace = model.eval(), Trace()
        self.rounds_inputs, self.writes_codes, self.on_cpu = rounds_inputs, writes_codes, on_cpu
        model.config.pad_token_id = None  # otherwise some models search input_ids for it, which hold no numbers
        self.owners: dict[int, list[nn.Module]] = {}  # storage -> the modules that hold it as a parameter
        self.stand_ins: list[torch.Tensor] = []
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(parameter.untyped_storage()._cdata, []).append(module)
            if isinstance(module, EfficientLinear):
                self._replace_linear(module)
            elif isinstance(module, EfficientEmbedding):
                module.look_up = types.MethodType(_look_up, module)
            elif isinstance(module, EfficientExperts) or is_fused_experts(module):
                self._replace_experts(module)

    def run(self, held: int = 0, **inputs) -> Trace:
        """The trace of one forward with the model's `inputs`; `held`: tokens in a cache among them."""
        self.trace = trace = Trace(held=held)
        counter = FlopCounterMode(display=False)
        observer = _Observer(trace, self.owners, (inputs, self.stand_ins, list(self.model.buffers())))
        _CURRENT.append(trace)
        try:
            with torch.no_grad(), counter, observer:
                trace.outputs = self.model(**inputs)
        finally:
            _CURRENT.pop()
        trace.flops = counter.get_total_flops()
        for name in (cache_name(), states_name()):
            if getattr(trace.outputs, name, None) is not None:
                trace.cache = {name: trace.outputs[name]}
        return trace

    def _replace_linear(self, module: EfficientLinear) -> None:
        weight = self._stand_in(module.out_features, module.in_features, module.weight.dtype)
        owner = getattr(module, "source", module)  # the embedding that it is tied to, if any

        def forward(module, x):
            self.trace.read[owner] = None
            return self._product(x, weight, module.bias)

        module.forward = types.MethodType(forward, module)

    def _replace_experts(self, module: nn.Module) -> None:
        """Gives fused experts a forward that notes their products with weights on the meta device, shared by all."""
        compressed = isinstance(module, CompressedModule)
        if compressed:
            sizes = [(w.experts, w.out_features, w.in_features) for w in module.compressed_weights()]
            dtype = module._parameters[module._expert_names[0]].dtype
        else:
            names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
            shapes = [getattr(module, name).shape for name in names]
            sizes = [(e, b, a) if module.is_transposed else (e, a, b) for e, a, b in shapes]
            dtype = getattr(module, names[0]).dtype
        up, down = (self._stand_in(out, width, dtype) for _, out, width in sizes)

        def forward(module, hidden_states, top_k_index, top_k_weights):
            tokens, chosen = top_k_index.shape
            self.trace.read[module] = chosen, sizes[0][0], tokens
            rows = hidden_states.repeat_interleave(chosen, 0)
            one_by_one = compressed and self.one_by_one  # then only one expert's share is alive
            parts = -(-len(rows) // sizes[0][0]) if one_by_one else len(rows)
            outputs = [expert(module, part) for part in rows.split(parts)]
            del rows
            outputs = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
            weighted = outputs * top_k_weights.flatten()[:, None].to(outputs.dtype)
            return weighted.clone().view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

        def expert(module, rows):
            hidden = self._product(rows, up, None, compressed)
            hidden = expert_activation(module, hidden)
            return self._product(hidden, down, None, compressed)

        module.forward = types.MethodType(forward, module)

    def _stand_in(self, out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        self.stand_ins.append(torch.empty(out_features, in_features, dtype=dtype, device="meta"))
        return self.stand_ins[-1]

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias, compressed: bool = True) -> torch.Tensor:
        if not (self.rounds_inputs and compressed):
            return F.linear(x, weight, bias)
        self.trace.rounded_flops += 2 * x.numel() * weight.shape[0]
        if not self.writes_codes:
            return F.linear(x, weight, bias)
        scaled = torch.empty_like(x, dtype=torch.float32) if self.on_cpu else x
        alive = [torch.empty_like(scaled, dtype=torch.int8)]  # held until the product is done, as the kernels do
        del scaled
        if self.on_cpu:  # oneDNN multiplies unsigned codes and sums in float32
            unsigned = torch.empty_like(alive[0])
            alive.append(unsigned.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32))
            del unsigned
        y = F.linear(x, weight, bias)
        alive.clear()
        return y


def _look_up(module: EfficientEmbedding, ids: torch.Tensor) -> torch.Tensor:
    return torch.empty(*ids.shape, module.embedding_dim, dtype=module.weight.dtype, device="meta")


class _Observer(TorchDispatchMode):
    """Records which parameters operators read, and how many bytes of what they allocate are alive."""

    def __init__(self, trace: Trace, owners: dict[int, list[nn.Module]], inputs):
        super().__init__()
        self.trace, self.owners, self.alive = trace, owners, 0
        self.known = {t.untyped_storage()._cdata for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.embedding.default:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    for module in self.owners.get(tensor.untyped_storage()._cdata, ()):
                        self.trace.read.setdefault(module, None)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.known and key not in self.owners:
                    self.known.add(key)
                    self.alive += size
                    weakref.finalize(storage, self._freed, key, size)
        self.trace.activation_bytes = max(self.trace.activation_bytes, self.alive)
        return outputs

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


_CURRENT: list[Trace] = []  # of the forwards that run, the innermost last


def current_trace() -> Trace:
    """The trace of the forward that runs."""
    return _CURRENT[-1]


def _attention(module, query, key, value, attention_mask, **options):
    """query [B, Hq, S, D], key [B, Hk, T, D], value [B, Hk, T, Dv] -> an empty [B, S, Hq, Dv]."""
    batch, heads, queries, key_dim = query.shape
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if _CURRENT:  # else a forward runs that is not traced
        trace, keys = current_trace(), key.shape[2]
        window = options.get("sliding_window") if causal else None
        before = trace.held if causal and keys == trace.held + queries else None
        trace.attention.append(AttentionShape(batch, heads, queries, keys, key_dim, value.shape[3], window, before))
    return query.new_empty(batch, queries, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
