"""transformers' pipelines over compressed models, with flash_paged where the model allows: the same answers as the
model's own forward, and close to the plain model's."""

import numpy as np
import pytest
import torch
import transformers
from helpers import rms_error_ratio, tiny_config, tiny_model, tiny_tokenizer
from transformers import pipeline

from hf_efficient import W8A8Config, WeightOnlyConfig
from hf_efficient.layers import EfficientLinear


INT8 = WeightOnlyConfig(bits=8, group_size=32)
TEXT = "The river runs past the mill"


def compressed(folder, auto_class, config=INT8, **options):
    """(the model in `folder` as it is, compressed)"""
    plain = auto_class.from_pretrained(folder, dtype=torch.float32, **options)
    small = auto_class.from_pretrained(folder, dtype=torch.float32, quantization_config=config, **options)
    assert any(isinstance(module, EfficientLinear) for module in small.modules())
    return plain, small


def without_spaces(text: str) -> str:
    """Pipelines of older releases take spaces before punctuation out."""
    return text.replace(" ", "")


@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_text_generation(attention, tmp_path):
    tiny_model("llama", eos_token_id=None).save_pretrained(tmp_path)
    _, model = compressed(tmp_path, transformers.AutoModelForCausalLM, attn_implementation=attention)
    tokenizer = tiny_tokenizer()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    answers = pipe([TEXT, "abc"], batch_size=2, max_new_tokens=5, do_sample=False, return_full_text=False)
    for prompt, answer in zip((TEXT, "abc"), answers):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert without_spaces(answer[0]["generated_text"]) == without_spaces(
            tokenizer.decode(alone, skip_special_tokens=True)
        )


@pytest.mark.parametrize("config", [INT8, W8A8Config()], ids=["int8", "w8a8"])
@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_encoders(config, attention, tmp_path):
    sizes = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=3))
    bert.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    options = {"config": config, "attn_implementation": attention}
    plain, small = compressed(tmp_path, transformers.AutoModelForSequenceClassification, **options)
    scores = [
        [entry["score"] for entry in sorted(pipe([TEXT])[0], key=lambda entry: entry["label"])]
        for pipe in (pipeline("text-classification", model=m, tokenizer=tokenizer, top_k=None) for m in (plain, small))
    ]
    assert sum(scores[1]) == pytest.approx(1, abs=1e-5) and np.allclose(scores[0], scores[1], atol=0.02)
    plain, small = compressed(tmp_path, transformers.AutoModel, **options)
    features = [
        torch.tensor(pipeline("feature-extraction", model=m, tokenizer=tokenizer)(TEXT)) for m in (plain, small)
    ]
    assert features[1].shape == (1, len(TEXT), 64)
    assert 0 < rms_error_ratio(features[1], features[0]) < 0.05, "8 bits"


def test_speech_recognition(tmp_path):
    """A Whisper of tiny's kind (two halves, a convolution before them) and of its inputs; weights at random."""
    letters = {chr(code): code - 29 for code in range(32, 127)}  # what follows the special tokens are timestamps
    vocabulary = transformers.WhisperTokenizer({**letters, "<|endoftext|>": 127}, [])
    others = [0, 1, 2, *range(98, 128)]
    config = transformers.WhisperConfig(
        vocab_size=128,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=80,
        max_source_positions=150,
        max_target_positions=64,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=127,
        pad_token_id=0,
        suppress_tokens=others,
        begin_suppress_tokens=[],
    )
    torch.manual_seed(0)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    plain, small = compressed(tmp_path, transformers.AutoModelForSpeechSeq2Seq)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=3)
    sound = np.sin(np.arange(16000) / 9).astype(np.float32)
    features = extractor(sound, sampling_rate=16000, return_tensors="pt").input_features
    start = torch.tensor([[1]])
    with torch.no_grad():
        logits = [m(input_features=features, decoder_input_ids=start).logits for m in (plain, small)]
    assert 0 < rms_error_ratio(logits[1], logits[0]) < 0.05, "8 bits"
    options = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": others}
    pipe = pipeline("automatic-speech-recognition", model=small, tokenizer=vocabulary, feature_extractor=extractor)
    given = next(iter(pipe.preprocess({"raw": sound, "sampling_rate": 16000})))
    assert torch.equal(given["input_features"], features)
    heard = pipe({"raw": sound, "sampling_rate": 16000}, generate_kwargs=options)["text"]
    assert len(heard) == 8, "one letter a token"


@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_image_and_text(attention, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=64),
        text_config=tiny_config("llama", eos_token_id=None),
        image_token_index=image_token,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    options = {"attn_implementation": attention}
    plain, small = compressed(tmp_path, transformers.AutoModelForImageTextToText, **options)
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    from PIL import Image

    image = Image.fromarray((np.arange(28 * 28 * 3) % 251).astype(np.uint8).reshape(28, 28, 3))
    inputs = processor(images=image, text="<image>What is it?", return_tensors="pt")
    with torch.no_grad():
        logits = [m(**inputs).logits for m in (plain, small)]
    assert 0 < rms_error_ratio(logits[1], logits[0]) < 0.05, "8 bits"
    pipe = pipeline("image-text-to-text", model=small, processor=processor)
    answer = pipe(images=image, text="<image>What is it?", max_new_tokens=5, do_sample=False, return_full_text=False)
    alone = small.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert without_spaces(answer[0]["generated_text"]) == without_spaces(
        tokenizer.decode(alone, skip_special_tokens=True)
    )
