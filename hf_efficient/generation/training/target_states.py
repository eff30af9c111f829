"""The hidden states that draft heads learn from: kept with the text, or computed again from it."""

from collections.abc import Sequence

import torch

from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.generation.model_traits import decoder_layers, first_position, sees_ahead
from hf_efficient.generation.training.rows import Row
from hf_efficient.observers.hooks import frozen


def are_kept(model) -> bool:
    """Whether the text is saved with the hidden states that predicted it. An accelerator computes them again in less
    time than a disk takes, but not those of a model whose prompts see ahead."""
    return model.device.type == "cpu" or sees_ahead(model) or first_position(model) != 0


def hidden_of(model, rows: Sequence[Row]) -> list[torch.Tensor]:
    """`Row.hidden` of each of the rows, computed where it was not kept."""
    if all(row.hidden is not None for row in rows):
        return [row.hidden for row in rows]
    if sees_ahead(model) or first_position(model) != 0:
        raise ValueError("the cache holds text without hidden states, and this model's prompts see ahead: give another")
    tokens = torch.nn.utils.rnn.pad_sequence([row.tokens[:-1] for row in rows], batch_first=True)
    states = computed(model, tokens.to(model.device))
    return [states[i, : len(row.tokens) - 1] for i, row in enumerate(rows)]


@torch.no_grad()
def computed(model, tokens: torch.Tensor) -> torch.Tensor:
    """What the output head reads, with the outputs of the inner layers that heads read: [rows, length, hidden_size *
    (1 + layers)] of tokens int64 [rows, length], which may be padded on the right: no token sees a later one."""
    _, layers = decoder_layers(model)
    outputs = {}

    def keep(index: int):
        def hook(module, inputs, output):
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return layers[index].register_forward_hook(hook)

    handles = [keep(i) for i in DraftHeads.layers_read(len(layers))]
    try:
        with frozen(model):
            last = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([last, *(outputs[i] for i in sorted(outputs))], -1)
