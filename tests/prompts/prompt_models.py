"""Tokenizers and classifiers for the tests of prompt compression."""

import torch


SENTENCES = (
    "The river runs past the old mill, past the bridge and into the sea. "
    "Ships wait for the tide. A lantern burns in the tower, and the keeper reads. "
    "At noon the market opens: apples, candles, ribbons. Nobody hurries here. "
)


def byte_tokenizer(size: int = 300):
    """Byte-level BPE, as GPT-2's: characters past ASCII are several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([SENTENCES], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def roberta_tokenizer(size: int = 150):
    """As XLM-RoBERTa's: pieces that begin words with a mark, between <s> and </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator([SENTENCES] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        cls_token="<s>", sep_token="</s>",
    )  # fmt: skip


def classifier(name: str = "XLMRoberta", positions: int = 514, labels: int = 2):
    """A random token classifier in the layout of LLMLingua-2's checkpoints."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=160, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=positions, type_vocab_size=2, num_labels=labels, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForTokenClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.5)
    return model


CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
