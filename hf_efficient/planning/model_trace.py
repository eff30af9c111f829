"""What a model's forward reads, multiplies and allocates, found by running it on the meta device: shapes, no numbers."""

import types
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from hf_efficient.experts import EfficientExperts, is_fused_experts
from hf_efficient.layers import CompressedModule, EfficientLinear


ATTENTION = "hf_efficient_shapes"


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function: `queries` positions of each of `batch` rows and `heads` heads over `keys`
    positions; `window`: how many of them a query sees, None for all. before: tokens of the text so far among the keys, in
    front of the queries; None where the keys are not that text, or not all of it."""

    batch: int
    heads: int
    queries: int
    keys: int
    key_dim: int
    value_dim: int
    window: int | None
    before: int | None

    def flops(self, more: float) -> float:
        """2 * (key_dim + value_dim) for each pair of a query and a key that it sees, when `more` tokens come before."""
        if self.before is None:
            pairs = self.queries * self.keys
        else:
            pairs = sum_of_seen(self.queries, self.before + more, self.window)
        return 2 * self.batch * self.heads * (self.key_dim + self.value_dim) * pairs


def sum_of_seen(queries: int, context: float, window: int | None) -> float:
    """Keys that causal queries see, summed: query i = 1 .. `queries` sees the min(`context` + i, `window`) newest."""
    growing = queries if window is None else max(0, min(queries, window - context))
    return growing * context + growing * (growing + 1) / 2 + (queries - growing) * (window or 0)


@dataclass
class Trace:
    """One forward.

    flops: of matrix products and convolutions besides `attention`; rounded_flops: those among them whose inputs the config
    rounds to 8 bits. read: modules whose parameters were read whole, of experts with (chosen, all of them, tokens).
    activation_bytes: the most that was alive at once of what it allocated. keys: (heads, key dim, value dim) of every layer
    of the cache. cache: what the forward returned as its cache, under the name that it takes it by; empty for none. held:
    tokens in the cache that it was given.
    """

    flops: int = 0
    rounded_flops: int = 0
    attention: list[AttentionCall] = field(default_factory=list)
    read: dict[nn.Module, tuple[int, int, int] | None] = field(default_factory=dict)
    activation_bytes: int = 0
    keys: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    cache: dict[str, object] = field(default_factory=dict)
    outputs: object = None
    held: int = 0


class Tracer:
    """Runs a model that lies on the meta device. Compressed layers and experts multiply with stand-ins of their shape (each
    expert of a mixture with its share of the tokens), attention is noted and not computed.

    model: built with `attn_implementation=ATTENTION`. rounds_inputs: whether its compressed layers round inputs to 8 bits.
    writes_codes: whether they write these to memory first. on_cpu: whether they are those of a CPU.
    """

    def __init__(self, model: nn.Module, rounds_inputs: bool, writes_codes: bool, on_cpu: bool):
        self.model, self.trace = model.eval(), Trace()
        self.rounds_inputs, self.writes_codes, self.on_cpu = rounds_inputs, writes_codes, on_cpu
        model.config.pad_token_id = None  # else some models look for it in input_ids
        self.owners: dict[int, list[nn.Module]] = {}  # storage -> the modules that hold it as a parameter
        self.stand_ins: list[torch.Tensor] = []
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(parameter.untyped_storage()._cdata, []).append(module)
            if isinstance(module, EfficientLinear):
                self._replace_linear(module)
            elif isinstance(module, EfficientExperts) or is_fused_experts(module):
                self._replace_experts(module)

    def run(self, held: int = 0, **inputs) -> Trace:
        """The trace of one forward; inputs as the model's own. held: tokens in a cache among them that transformers made."""
        self.trace = trace = Trace(held=held)
        counter = FlopCounterMode(display=False)
        with (
            torch.no_grad(),
            _noting(trace),
            counter,
            _Observer(trace, self.owners, (inputs, self.stand_ins, list(self.model.buffers()))),
        ):
            trace.outputs = self.model(**inputs)
        trace.flops = counter.get_total_flops()
        for name in ("past_key_values", "cache_params"):
            if getattr(trace.outputs, name, None) is not None:
                trace.cache = {name: trace.outputs[name]}
        return trace

    def _replace_linear(self, module: EfficientLinear) -> None:
        weight = self._stand_in(module.out_features, module.in_features, module.weight.dtype)

        def forward(module, x):
            self.trace.read[module] = None
            return self._product(x, weight, module.bias)

        module.forward = types.MethodType(forward, module)

    def _replace_experts(self, module: nn.Module) -> None:
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
            parts = -(-len(rows) // sizes[0][0]) if compressed and self.on_cpu else len(rows)  # there one after another
            outputs = [expert(module, part) for part in rows.split(parts)]
            del rows
            outputs = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
            weighted = outputs * top_k_weights.flatten()[:, None].to(outputs.dtype)
            return weighted.clone().view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

        def expert(module, rows):
            hidden = self._product(rows, up, None, compressed)
            hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
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
        alive = [torch.empty_like(scaled, dtype=torch.int8)]
        del scaled
        if self.on_cpu:  # oneDNN multiplies unsigned codes and sums in float32
            unsigned = torch.empty_like(alive[0])
            alive.append(unsigned.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32))
            del unsigned
        y = F.linear(x, weight, bias)
        alive.clear()
        return y


class _Observer(TorchDispatchMode):
    """Notes which parameters are read and how many bytes are alive of what the operators allocate."""

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


_CURRENT: list[Trace] = []


@contextmanager
def _noting(trace: Trace):
    """The attention function tells `trace` what it is called with."""
    _CURRENT.append(trace)
    try:
        yield
    finally:
        _CURRENT.pop()


def _attention(module, query, key, value, attention_mask, **options):
    """query [B, Hq, S, D], key [B, Hk, T, D], value [B, Hk, T, Dv] -> [B, S, Hq, Dv], of which nothing is computed."""
    batch, heads, queries, key_dim = query.shape
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    trace, keys = _CURRENT[-1], key.shape[2]
    window = options.get("sliding_window") if causal else None
    before = trace.held if causal and keys == trace.held + queries else None
    trace.attention.append(AttentionCall(batch, heads, queries, keys, key_dim, value.shape[3], window, before))
    return query.new_empty(batch, queries, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class ShapeCache(Cache):
    """A cache that says it holds `context` tokens, stores none and tells `trace` the shapes that it is given."""

    def __init__(self, context: int, layers: int):
        super().__init__(layers=[_ShapeLayer(context, index) for index in range(layers)])


class _ShapeLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, context: int, index: int):
        super().__init__()
        self.context, self.index = context, index

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        heads, key_dim = key_states.shape[1], key_states.shape[3]
        _CURRENT[-1].keys[self.index] = heads, key_dim, value_states.shape[3]
        return key_states, value_states

    def get_mask_sizes(self, query_length):
        return self.context + query_length, 0

    def get_seq_length(self):
        return self.context

    def get_max_length(self):
        return -1


def cache_bytes(cache, more_tokens: float) -> float:
    """Bytes of the tensors of a cache that transformers made, when `more_tokens` are appended to what it holds; states of
    fixed size and the keys and values of an encoder's output stay as they are."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache, more_tokens) + cache_bytes(cache.cross_attention_cache, 0)
    total = 0.0
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        growing = {id(getattr(layer, name, None)) for name in ("keys", "values")}
        for tensor in tree_leaves(vars(layer)):
            if not isinstance(tensor, torch.Tensor):
                continue
            length = tensor.shape[2] if id(tensor) in growing else 0
            if length:
                longer = length + more_tokens if window is None else min(length + more_tokens, max(window - 1, 1))
                total += tensor.nbytes * longer / length
            else:
                total += tensor.nbytes
    return total
