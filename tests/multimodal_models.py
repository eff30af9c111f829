"""Tiny random models of text beside images or sound, and prompts for them."""

import torch
import transformers
from encoder_decoder_models import random_weights


_TEXT = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
_CLIP = dict(
    model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    image_size=16, patch_size=8,
)  # fmt: skip
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_ROTARY = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
_PATCHES = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
_QWEN = dict(
    text_config={**_TEXT, **_ROTARY}, image_token_id=4, video_token_id=5, vision_start_token_id=6, vision_end_token_id=7
)
_SOUND = dict(
    hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_mel_bins=8,
    max_source_positions=16,
)  # fmt: skip
_MISTRAL = {**_TEXT, "model_type": "mistral", "sliding_window": None}
_PIXTRAL = dict(
    model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
    image_size=32, patch_size=4,
)  # fmt: skip
_PALIGEMMA = dict(vision_config=_SIGLIP, projection_dim=64, image_token_index=4, tie_word_embeddings=False)
_DEEPSTACK = dict(
    **_PATCHES, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_position_embeddings=16,
    deepstack_visual_indexes=[0, 1],
)  # fmt: skip
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_PALIGEMMA_2 = (  # has no "sdpa", so forwards are not captured
    "PaliGemmaForConditionalGeneration",
    "PaliGemmaConfig",
    dict(**_PALIGEMMA, text_config={**_TEXT, "model_type": "gemma2", "sliding_window": 40}),
)
# name -> (model class, config class, its arguments)
MODELS = {
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        dict(text_config={**_TEXT, "model_type": "llama"}, vision_config=_CLIP, image_token_index=4),
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        dict(**_QWEN, vision_config=dict(**_PATCHES, embed_dim=32, hidden_size=64)),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        dict(
            **_QWEN,
            vision_config=dict(
                **_PATCHES, hidden_size=32, out_hidden_size=64, intermediate_size=48, fullatt_block_indexes=[1],
                window_size=16,
            ),
        ),
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", dict(**_QWEN, vision_config=_DEEPSTACK)
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            **_QWEN, "text_config": {**_QWEN["text_config"], **_EXPERTS}, "vision_config": _DEEPSTACK,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        dict(
            text_config=_MISTRAL, vision_config=_PIXTRAL, image_token_index=4, vision_feature_layer=-1,
            tie_word_embeddings=False,
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        dict(
            text_config={**_TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=4, boi_token_index=6, eoi_token_index=7,
            tie_word_embeddings=False,
        ),
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        dict(**_PALIGEMMA, text_config={**_TEXT, "model_type": "gemma"}),
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        "VoxtralConfig",
        dict(text_config=_MISTRAL, audio_config=_SOUND, audio_token_id=4),
    ),
}  # fmt: skip


def multimodal_model(name: str, attention: str = "sdpa"):
    """A random model, large enough in its weights that greedy decoding does not settle on one token."""
    kind, config, arguments = {**MODELS, "paligemma2": _PALIGEMMA_2}[name]
    torch.manual_seed(0)
    model = random_weights(getattr(transformers, kind)(getattr(transformers, config)(**arguments)), 2.0)
    model.set_attn_implementation({"text_config": attention})
    return model


def multimodal_inputs(name: str, rows: int) -> dict[str, torch.Tensor]:
    """The arguments of `generate()` for `rows` prompts of different length, padded on the left: in each an image of
    four tokens (of Qwen's and Mistral's two or four), or a sound of four."""
    generator = torch.Generator().manual_seed(3)
    prompts = []
    for row in range(rows):
        before, after = (
            torch.randint(8, 96, (n,), generator=generator).tolist() for n in (1 + row % 3, 9 - 2 * (row % 4))
        )
        media = [6, *[4] * (2 * (1 + row % 2) if name.startswith(("qwen", "mistral")) else 4), 7]
        prompts.append([*before, *media, *after])
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    inputs = dict(input_ids=ids, attention_mask=(ids != 0).long())
    if name == "voxtral":
        return dict(**inputs, input_features=torch.randn(rows, 8, 32, generator=generator))
    if name.startswith("qwen"):
        grids = torch.tensor([[1, 2 + 2 * (row % 2), 4] for row in range(rows)])
        patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator)
        return dict(**inputs, mm_token_type_ids=(ids == 4).long(), pixel_values=patches, image_grid_thw=grids)
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    if name == "mistral3":
        sizes = torch.tensor([[8 + 8 * (row % 2), 16] for row in range(rows)])
        return dict(**inputs, pixel_values=pixels, image_sizes=sizes)
    if name.startswith("paligemma"):  # whose prompts are all prefix
        return dict(**inputs, pixel_values=pixels, token_type_ids=torch.zeros_like(ids))
    return dict(**inputs, pixel_values=pixels, **({"token_type_ids": (ids == 4).long()} if name == "gemma3" else {}))
