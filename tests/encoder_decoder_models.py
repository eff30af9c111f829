"""Tiny random encoder-decoders, and inputs for them."""

import torch
import transformers


_SIZES = dict(
    vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=3,
)  # fmt: skip
_T5 = dict(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=2, num_heads=4,
    relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=3, eos_token_id=2,
)  # fmt: skip
_WHISPER = dict(
    num_mel_bins=8, max_source_positions=20, max_target_positions=64, suppress_tokens=[5], begin_suppress_tokens=[6]
)
_TEXT = dict(max_position_embeddings=64, forced_eos_token_id=None)
MODELS = {
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**_SIZES, **_TEXT}),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", _T5),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", {**_SIZES, **_TEXT}),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", {**_SIZES, **_TEXT}),
    "marian": ("MarianMTModel", "MarianConfig", {**_SIZES, **_TEXT}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**_SIZES, **_WHISPER}),
}


def random_weights(model, scale: float = 1.5):
    """Weights large enough that greedy decoding does not settle on one token, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape) * scale / parameter.shape[-1] ** 0.5)
    return model.eval()


def encoder_decoder(name: str, seed: int = 0, attention: str = "sdpa"):
    """A random model, and the arguments of `generate()` for three sources, padded where they are text."""
    kind, config, arguments = MODELS[name]
    torch.manual_seed(seed)
    model = random_weights(getattr(transformers, kind)(getattr(transformers, config)(**arguments)))
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return model, dict(input_features=torch.randn(3, 8, 40, generator=generator))
    ids = torch.randint(4, 64, (3, 9), generator=generator)
    mask = torch.arange(9) < torch.tensor([[9], [6], [8]])
    return model, dict(input_ids=ids * mask, attention_mask=mask.long())
