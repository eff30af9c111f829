"""How many kernels a token of Llama-3.1-8B launches: counted in captures of smaller models of its kind."""

import fake_graphs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient import PagedCache, W8A8Config, WeightOnlyConfig


LAYERS = 32
CONFIGS = {"bf16": None, "int4": WeightOnlyConfig(bits=4, group_size=32, method="rtn"), "W8A8": W8A8Config()}
# operators of ours that launch more than one kernel on a device: append and attend; round x and multiply
KERNELS = {"flash_attn_with_kvcache": 2, "quantized_linear": 2, "rounded_linear": 2}


class _Operators(TorchDispatchMode):
    """Counts operators that launch a kernel: views launch none."""

    def __init__(self):
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kernels += 0 if func.is_view else KERNELS.get(func._schema.name.split("::")[1], 1)
        return func(*args, **(kwargs or {}))


def kernels_of(weights: str, layers: int) -> tuple[int, int]:
    """Kernels of a captured token, and of one that transformers runs eagerly with its own attention and cache."""
    model = _model(weights, layers)
    cache = PagedCache(model.config, num_blocks=8)
    ids, token = torch.arange(3, 10)[None], torch.full((1, 1), 5)
    with torch.no_grad():
        model.set_attn_implementation("flash_paged")
        model(ids, past_key_values=cache)
        with cache.decode_step() as positions:
            capture = fake_graphs.FakeGraph(
                lambda: model(token, position_ids=positions, past_key_values=cache).logits.argmax(-1), None
            )
        captured = sum(
            KERNELS.get(func._schema.name.split("::")[1], 1) for func, *_ in capture._calls if hasattr(func, "_schema")
        )
        model.set_attn_implementation("sdpa")
        outputs = model(ids, use_cache=True)
        with _Operators() as operators:
            model(token, past_key_values=outputs.past_key_values).logits.argmax(-1)
    return captured, operators.kernels


def _model(weights: str, layers: int):
    import tempfile

    from helpers import tiny_model
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", num_hidden_layers=layers)
    if CONFIGS[weights] is None:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=CONFIGS[weights])


def of_llama_8b(eager_seconds: float) -> list[dict]:
    """For each kind of weights: kernels a layer, a captured token's and an eager one's."""
    rows = []
    for weights in CONFIGS:
        (few, few_eager), (more, more_eager) = kernels_of(weights, 2), kernels_of(weights, 3)
        eager = few_eager + (LAYERS - 2) * (more_eager - few_eager)
        rows.append(
            {
                "weights": weights,
                "operators_a_layer": more - few,
                "launches_a_token": few + (LAYERS - 2) * (more - few),
                "eager_operators_a_token": eager,
                "eager_host_us_at_least": eager * eager_seconds * 1e6,
                "host_launches_captured": 1,
            }
        )
    return rows
