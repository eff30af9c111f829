"""A model followed block by block gives what its own forward gives."""

import pytest
import torch
import transformers
from helpers import TINY_MODELS, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration import blocks, model_chains
from hf_efficient.experts import is_fused_experts
from hf_efficient.observers.hooks import watching_outputs


SMALL = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, vocab_size=128)
ENCODER_DECODER = dict(
    **dict(d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=128, encoder_layers=2, decoder_layers=2),
    **dict(encoder_attention_heads=2, decoder_attention_heads=2),
)


def random_model(cls: type, config_class: str, **arguments):
    torch.manual_seed(0)
    return cls(getattr(transformers, config_class)(**arguments)).eval()


def bert():
    return random_model(transformers.BertForSequenceClassification, "BertConfig", **SMALL)


def t5():
    small = dict(d_model=32, d_kv=16, num_heads=2, d_ff=48, num_layers=3, num_decoder_layers=2, vocab_size=128)
    return random_model(transformers.T5ForConditionalGeneration, "T5Config", **small, decoder_start_token_id=0)


def bart():
    return random_model(transformers.BartForConditionalGeneration, "BartConfig", **ENCODER_DECODER)


def whisper():
    audio = dict(num_mel_bins=8, max_source_positions=20)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = {**ENCODER_DECODER, **audio, **tokens}
    return random_model(transformers.WhisperForConditionalGeneration, "WhisperConfig", **config)


OTHERS = {"bert": bert, "t5": t5, "bart": bart, "whisper": whisper}


def make(name: str):
    """(model, two batches of arguments)."""
    model = OTHERS[name]() if name in OTHERS else tiny_model(name)
    tokens = torch.randint(3, 128, (2, 3, 24))
    if name == "whisper":
        return model, [dict(input_features=torch.randn(3, 8, 40), decoder_input_ids=batch) for batch in tokens]
    if name in ("t5", "bart"):
        return model, [dict(input_ids=batch, decoder_input_ids=batch.flip(1)) for batch in tokens]
    return model, [dict(input_ids=batch) for batch in tokens]


def targets_of(model) -> list[str]:
    return [n for n, m in model.named_modules() if type(m) in (nn.Linear, Conv1D) or is_fused_experts(m)]


def own_hidden_states(model, batch, names) -> dict[str, torch.Tensor]:
    found = {}

    def see(name, args, kwargs, output):
        found[name] = blocks.first_tensor(output)

    with torch.no_grad(), watching_outputs({"output": model, **{n: model.get_submodule(n) for n in names}}, see):
        model(**batch)
    return found


@pytest.mark.parametrize("name", [*TINY_MODELS, *OTHERS])
def test_blocks_one_by_one_give_the_models_own_hidden_states(name):
    model, batches = make(name)
    targets = targets_of(model)
    followed = model_chains.BlockwiseModel(model, batches, targets)
    assert len(followed.chains) == (2 if name in ("t5", "bart", "whisper") else 1)
    held = [target for chain in followed.chains for names in chain.linears for target in names]
    assert sorted(held + followed.outside) == sorted(targets)
    assert all(t.split(".")[-1] in ("lm_head", "classifier", "dense", "proj_out") for t in followed.outside)
    names = [name for chain in followed.chains for name in chain.names]
    expected = [own_hidden_states(model, batch, names) for batch in batches]
    for chain in followed.chains:
        hidden = followed.record(chain)
        for index, block in enumerate(chain.names):
            with torch.no_grad():
                hidden = [chain.advance(index, batch, states) for batch, states in enumerate(hidden)]
            for batch, states in enumerate(hidden):
                torch.testing.assert_close(states, expected[batch][block], rtol=0, atol=0)
        chain.outputs = hidden
        chain.release()
    for batch in range(2):  # what is left of the model, on the outputs of its chains
        output = blocks.first_tensor(followed.forward(batch))
        torch.testing.assert_close(output, expected[batch]["output"], rtol=0, atol=0)
    assert not any("forward" in vars(module) for module in model.modules())


def test_arguments_that_blocks_and_batches_share_are_kept_once():
    model, batches = make("gemma2")
    followed = model_chains.BlockwiseModel(model, batches, targets_of(model))
    (chain,) = followed.chains
    followed.record(chain)
    calls = [call for batch in chain.arguments for call in batch]
    kept = {id(leaf): leaf for call in calls for leaf in blocks.leaves(call) if isinstance(leaf, torch.Tensor)}
    forms = [(tensor.shape, tensor.dtype) for tensor in kept.values()]
    assert len(calls) == 4 and len(kept) <= 5, forms  # cos, sin, positions, and a mask for each kind of attention


def test_a_model_that_calls_a_block_again_is_left_to_passes_of_the_whole():
    model = random_model(transformers.AlbertModel, "AlbertConfig", **SMALL, embedding_size=16)
    batch = dict(input_ids=torch.ones(1, 8, dtype=torch.long))
    followed = model_chains.BlockwiseModel(model, [batch], targets_of(model))
    assert followed.chains == [] and set(followed.outside) == set(targets_of(model))
