"""Tensors of checkpoints that are no weight of one layer: tied ones, several in one, and others called as codes are."""

import pytest
import torch
import transformers
from helpers import assert_same_tensors

from hf_efficient import BitNetConfig, WeightOnlyConfig
from hf_efficient.integrations.transformers_compat import key_renamer


SIZES = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
BART = dict(
    vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=96,
    decoder_attention_heads=4, decoder_ffn_dim=96, max_position_embeddings=64,
)  # fmt: skip
IDS = torch.arange(5, 14)[None]


def random(cls, config):
    torch.manual_seed(0)
    model = cls(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def load(cls, path, **options):
    config = WeightOnlyConfig(bits=4, group_size=32, method="rtn", int8_on_cpu=False, **options)
    return cls.from_pretrained(path, dtype=torch.float32, quantization_config=config)


def output(model):
    with torch.no_grad():
        return model(IDS)[0]


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_the_bias_of_a_compressed_head_is_untied_with_its_weight(name, tmp_path):
    """Else a saved checkpoint, whose config ties nothing, would lack it."""
    cls, config = getattr(transformers, f"{name}ForMaskedLM"), getattr(transformers, f"{name}Config")(**SIZES)
    plain = random(cls, config)
    plain.save_pretrained(tmp_path / "plain")
    small = load(cls, tmp_path / "plain", quantize_lm_head=True)
    assert torch.equal(small.get_output_embeddings().bias, plain.get_output_embeddings().bias)
    small.save_pretrained(tmp_path / "small")
    again = cls.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert torch.equal(output(again), output(small))
    again.dequantize().save_pretrained(tmp_path / "dense")
    dense = cls.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    torch.testing.assert_close(output(dense), output(small), rtol=1e-4, atol=1e-4)


def test_a_head_that_is_tied_to_more_than_one_embedding_is_not_compressed_alone(tmp_path):
    cls = transformers.BartForConditionalGeneration
    random(cls, transformers.BartConfig(**BART)).save_pretrained(tmp_path / "plain")
    refusal = "quantize_lm_head=True is not supported for BartFor.*encoder.embed_tokens.weight would be untied"
    with pytest.raises(ValueError, match=refusal + ".*embeddings=True"):
        load(cls, tmp_path / "plain", quantize_lm_head=True)
    with pytest.raises(ValueError, match=refusal + "; it must be False$"):
        cls.from_pretrained(tmp_path / "plain", quantization_config=BitNetConfig(quantize_lm_head=True))
    small = load(cls, tmp_path / "plain", embeddings=True)
    small.save_pretrained(tmp_path / "small")
    assert torch.equal(output(cls.from_pretrained(tmp_path / "small", dtype=torch.float32)), output(small))


def test_a_tensor_that_is_split_is_that_of_every_part():
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    parts = [".q_proj.bias", ".k_proj.bias", ".v_proj.bias"]
    conversions = [WeightRenaming("resblocks", "layers"), WeightConverter([r"\.in_proj_bias"], parts, [Chunk(dim=0)])]
    rename = key_renamer(transformers.BertModel(transformers.BertConfig(**SIZES)), conversions, {})
    assert rename("resblocks.0.in_proj_bias") == [f"layers.0{part}" for part in parts]
    assert rename("resblocks.0.out_proj.bias") == ["layers.0.out_proj.bias"]


@pytest.mark.skipif(not hasattr(transformers, "Tipsv2TextModel"), reason="this transformers has no TIPSv2")
def test_biases_that_are_saved_in_one_tensor(tmp_path):
    cls, config = transformers.Tipsv2TextModel, transformers.Tipsv2TextConfig(**SIZES, max_position_embeddings=32)
    random(cls, config).save_pretrained(tmp_path / "plain")
    small = load(cls, tmp_path / "plain")
    small.save_pretrained(tmp_path / "small")
    again = cls.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert torch.equal(output(again), output(small))


def test_parameters_called_as_parts_of_codes_keep_their_values(tmp_path):
    """The layer scales of Mimi; Gemma 4 has a scale in each router."""
    sizes = dict(SIZES, num_hidden_layers=1, num_key_value_heads=4, head_dim=16, num_filters=2, upsample_groups=64)
    codes = dict(codebook_size=16, codebook_dim=16, vector_quantization_hidden_dimension=16, num_quantizers=2)
    random(transformers.MimiModel, transformers.MimiConfig(**sizes, **codes)).save_pretrained(tmp_path / "plain")
    small = load(transformers.MimiModel, tmp_path / "plain")
    small.save_pretrained(tmp_path / "small")
    expected = small.dequantize().state_dict()
    assert sum(name.endswith("layer_scale.scale") for name in expected) == 4
    dense = load(transformers.MimiModel, tmp_path / "small", dequantize=True)
    assert_same_tensors(dense.state_dict(), expected)
