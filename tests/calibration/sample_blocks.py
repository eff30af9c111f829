"""First blocks of tiny models, as calibration hands them to transforms and refinements."""

import torch
import transformers
from helpers import TINY_MODELS, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.blocks import Block
from hf_efficient.calibration.collect import collect
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.calibration.tuning import mean_loss, quantized_forward
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.observers.hooks import replaced_forwards


SMALL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
MLP = dict(intermediate_size=128)
FALCON = dict(new_decoder_architecture=True, num_kv_heads=2)
MLA = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, v_head_dim=16, qk_nope_head_dim=8, first_k_dense_replace=2
)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
OTHERS = {
    "bert": ("BertModel", dict(**SMALL, **MLP)),
    "phi3": ("Phi3Model", dict(**SMALL, **MLP, num_key_value_heads=2, pad_token_id=0)),
    "gpt_neox": ("GPTNeoXModel", dict(**SMALL, **MLP)),
    "falcon": ("FalconModel", dict(**SMALL, **FALCON)),
    "deepseek_v3": ("DeepseekV3Model", dict(**SMALL, **MLP, **MLA)),
    "qwen3_next": ("Qwen3NextModel", dict(**SMALL, **MLP, **DELTA, num_key_value_heads=2, mlp_only_layers=[0, 1])),
    "t5": ("T5EncoderModel", dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=128)),
}


def make(name: str, dtype=torch.float64, **overrides):
    """A tiny model whose norms are not all ones and whose biases are not all zeros."""
    if name in TINY_MODELS:
        model = tiny_model(name, dtype, **overrides)
        if "num_local_experts" in TINY_MODELS[name][1]:
            model.set_experts_implementation("eager")  # the others know no float64
    else:
        class_name, arguments = OTHERS[name]
        cls = getattr(transformers, class_name)
        torch.manual_seed(0)
        model = cls(cls.config_class(**{**arguments, **overrides})).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def first_block(model, config=None, batches: int = 2, statistics: bool = True) -> Block:
    """The first block, every linear with `config`, and its statistics."""
    tokens = torch.randint(3, 128, (batches, 2, 24), generator=torch.Generator().manual_seed(2))
    names = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    followed = BlockwiseModel(model.requires_grad_(False), [dict(input_ids=batch) for batch in tokens], names)
    chain = followed.chains[0]
    linears = {name: model.get_submodule(name) for name in chain.linears[0]}
    block = Block(chain.names[0], chain.modules[0], linears, {}, chain, 0, followed.record(chain))
    block.schemes = dict.fromkeys(linears, config or WeightOnlyConfig(group_size=32))
    block.formats = {name: scheme.format() for name, scheme in block.schemes.items()}
    block.statistics = collect(block.run, batches, linears) if statistics else {}
    return block


@torch.no_grad()
def outputs(block: Block) -> torch.Tensor:
    return torch.cat([block.run(batch) for batch in range(len(block.inputs))])


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def stored(block: Block) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of the canonical tensors."""
    return {name: dict(tensors) for name, tensors in block.tensors.items()}


def stored_error(block: Block, targets: list) -> float:
    """The loss of refinement for the block as it will be stored."""

    def forward(index):
        name, module = list(block.linears.items())[index]
        return quantized_forward(module, block.formats[name], block.tensors[name])

    with replaced_forwards(block.linears.values(), forward):
        return mean_loss(block, targets)
