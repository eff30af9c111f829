"""Experts modules whose weights are not on their device: mixed into the class that a module has."""

import functools
import weakref

import torch
from torch import nn

from hf_efficient.expert_offload.residents import Residents
from hf_efficient.experts import EfficientExperts, expert_weight_names
from hf_efficient.integrations.transformers_compat import experts_implementation, grouped_linear
from hf_efficient.integrations.transformers_releases import post_expert_norm
from hf_efficient.kernels.linear.grouped_cpu import NativeExperts
from hf_efficient.kernels.replay.recorder import as_one_step


IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
# module -> its experts on the device. Not an attribute: it changes in every forward, and captured forwards stay valid
_RESIDENTS: "weakref.WeakKeyDictionary[nn.Module, Residents]" = weakref.WeakKeyDictionary()
_PREDICTORS: "weakref.WeakKeyDictionary[nn.Module, tuple]" = weakref.WeakKeyDictionary()


class OffloadedExperts:
    """What dense and compressed experts share. Their weights stay Parameters of all experts, on the host or mapped, so
    that the module is saved as before.

    _offloaded_names: of those Parameters; none where compressed experts lie there as the device reads them.
    """

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        """hidden_states [T, H], top_k_index int [T, k] and top_k_weights [T, k] -> [T, H], with the bits of the module
        that holds all weights.

        Raises:
            RuntimeError: a gradient would pass.
        """
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise RuntimeError(
                "offloaded experts compute no gradients: call the model inside torch.no_grad(), or detach() the "
                "ExpertOffload before training"
            )
        adapters = getattr(self, "adapters", None)

        def run(hidden_states, top_k_index, top_k_weights):
            self._prefetch_next(hidden_states)
            with (residents := _RESIDENTS[self]).lock:
                if names := self._offloaded_names:
                    residents.read_from({name: self._parameters[name] for name in names})
                order = residents.begin(top_k_index.unique().tolist())
                return self._offloaded(residents, order, adapters, hidden_states, top_k_index, top_k_weights)

        return as_one_step(run, hidden_states, top_k_index, top_k_weights)

    def _prefetch_next(self, hidden_states: torch.Tensor) -> None:
        """Brings the experts of the next layer that its router chooses for the inputs of this one."""
        if self not in _PREDICTORS:
            return
        router, following = (reference() for reference in _PREDICTORS[self])
        if router is not None and following in _RESIDENTS:
            chosen, counts = router(hidden_states)[-1].unique(return_counts=True)
            _RESIDENTS[following].prefetch(chosen[counts.argsort(descending=True, stable=True)].tolist())

    def _apply(self, fn, recurse=True):
        """Moves everything but the offloaded weights."""
        dtype = next(self.parameters(recurse=False)).dtype
        if fn(torch.empty(0, dtype=dtype)).dtype is not dtype:
            raise ValueError("offloaded experts cannot be cast: detach() the ExpertOffload before")
        _RESIDENTS[self].clear()
        kept = {name: self._parameters.pop(name) for name in self._offloaded_names}, self._buffers
        self._buffers = {}  # experts have none but those of layouts
        try:
            return nn.Module._apply(self, fn, recurse)
        finally:
            self._parameters.update(kept[0])
            self._buffers = kept[1]

    def __reduce_ex__(self, protocol):
        raise ValueError("offloaded experts are neither copied nor pickled: detach() the ExpertOffload before")


class OffloadedDense(OffloadedExperts):
    """Experts of transformers."""

    def _offloaded(self, residents, order, adapters, *inputs):
        implementation = experts_implementation(self)
        if implementation == "grouped_mm":
            return self._grouped(residents, order, *inputs)
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"experts_implementation={implementation!r} of offloaded experts: must be one of "
                f"{', '.join(IMPLEMENTATIONS)}"
            )
        return type(self).__bases__[1].forward(_WithLookups(self, residents), *inputs)

    def _grouped(self, residents, order, hidden_states, top_k_index, top_k_weights):
        """As transformers' `grouped_mm_experts_forward`, one expert after the other."""
        (tokens, chosen), (up_name, down_name) = top_k_index.shape, expert_weight_names(self)
        ids, permutation = torch.sort(top_k_index.reshape(-1))
        counts = torch.bincount(ids, minlength=self.num_experts)
        stops = counts.cumsum(0).tolist()
        rows, outputs = hidden_states[permutation // chosen], {}
        norm = post_expert_norm(self)
        for expert in order:
            weights = residents.get(expert)
            start, stop = stops[expert - 1] if expert else 0, stops[expert]
            h = self._product(up_name, weights, expert, rows[start:stop])
            h = self._product(down_name, weights, expert, self._apply_gate(h) if self.has_gate else self.act_fn(h))
            outputs[expert] = h if norm is None else norm(h)
        outputs = torch.cat([outputs[expert] for expert in sorted(outputs)])
        weighted = outputs * top_k_weights.reshape(-1)[permutation].unsqueeze(-1)
        back = torch.empty_like(permutation)
        back[permutation] = torch.arange(len(permutation), device=permutation.device)
        return weighted[back].view(tokens, chosen, -1).sum(dim=1).to(hidden_states.dtype)

    def _product(self, name, weights, expert, x):
        bias = getattr(self, name + "_bias")[expert] if self.has_bias else None
        offsets = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
        return grouped_linear(x, weights[name][None], offsets, bias, self.is_transposed)


class _WithLookups:
    """Stands for the module in a forward of transformers: its offloaded weights are looked up by expert."""

    def __init__(self, module: nn.Module, residents: Residents):
        self._module, self._lookups = module, {n: _Lookup(residents, n) for n in module._offloaded_names}

    def __getattr__(self, name):
        return self._lookups.get(name) if name in self._lookups else getattr(self._module, name)


class _Lookup:
    """`weights[expert]` is on the device; `weights[ids]` are several, stacked."""

    dtype = None  # of no layout of all experts together (see `EfficientExperts`)

    def __init__(self, residents: Residents, name: str):
        self._residents, self._name = residents, name

    def __getitem__(self, index):
        if not isinstance(index, torch.Tensor) or index.ndim == 0:
            return self._residents.get(int(index))[self._name]
        return torch.stack([self._residents.get(expert)[self._name] for expert in index.tolist()])


class OffloadedCompressed(OffloadedExperts):
    """`EfficientExperts`."""

    is_offloaded = True  # no layouts of all experts are derived

    def _offloaded(self, residents, order, adapters, *inputs):
        return self._forward(adapters, *inputs)

    def _run(self, rows, counts, adapters):
        """On a CPU, which reads experts where they lie, those that have rows are one product."""
        residents = _RESIDENTS[self]
        if not residents.frees and not adapters and rows.device.type == "cpu":
            residents.compute_in(rows.dtype)
            active = counts.nonzero()[:, 0]
            each = [residents.get(expert) for expert in active.tolist()]
            products = [NativeExperts.of([own[f"{name}_"] for own in each]) for name in self._expert_names]
            biases = [self._expert_bias(name, active) for name in self._expert_names]
            if all(own is not None and own.serves(rows, bias) for own, bias in zip(products, biases)):
                return self._run_together(*products, rows, counts[active], adapters, active)
        return super()._run(rows, counts, adapters)

    def _load_from_state_dict(self, *arguments):
        if not self._offloaded_names:
            raise ValueError("compressed experts are offloaded and cannot be loaded: detach() the ExpertOffload before")
        super()._load_from_state_dict(*arguments)

    def layouts(self, prefix: str, dtype: torch.dtype) -> _Lookup:
        residents = _RESIDENTS[self]
        residents.compute_in(dtype)
        return _Lookup(residents, prefix)


def layouts_over(layouts: dict[str, object], tensors: dict[str, torch.Tensor], dtype=None) -> dict[str, object]:
    """Prefix -> what the device multiplies, over the tensors of one expert, which lie as it reads them. layouts: of
    another expert."""
    return {
        prefix: layout.over({name: tensors[prefix + name] for name in layout.tensors})
        for prefix, layout in layouts.items()
    }


def layouts_of(weights: list, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, object]:
    """Prefix -> what the device multiplies, of the canonical tensors of one expert. weights: `CompressedWeight`s."""
    return {
        weight.prefix: weight.format.layout(
            {name: tensors[parameter] for name, parameter in weight.names().items()}, weight.in_features, dtype
        )
        for weight in weights
    }


@functools.cache
def _offloaded_class(original: type) -> type:
    base = OffloadedCompressed if issubclass(original, EfficientExperts) else OffloadedDense
    return type(original.__name__, (base, original), {"__module__": original.__module__})


def offload(module: nn.Module, residents: Residents, names: list[str]) -> None:
    """Has `module` read its weights through `residents`, in place. names: of the Parameters that are offloaded."""
    _RESIDENTS[module], module._offloaded_names = residents, tuple(names)
    module.__class__ = _offloaded_class(type(module))


def predict(module: nn.Module, router: nn.Module, following: nn.Module) -> None:
    """Has `module` prefetch the experts of `following` that its `router` chooses."""
    _PREDICTORS[module] = weakref.ref(router), weakref.ref(following)


def bring_back(module: nn.Module) -> None:
    """Undoes `offload` and `predict`."""
    _RESIDENTS.pop(module).clear()
    _PREDICTORS.pop(module, None)
    del module._offloaded_names
    module.__class__ = type(module).__bases__[1]
