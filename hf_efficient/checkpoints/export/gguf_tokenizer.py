"""Tokenizers in a GGUF file: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and BPE with a byte fallback (Llama 2,
Mistral)."""

import json
import re
import tempfile
from pathlib import Path

import gguf


# llama.cpp's name for how text is split before bytes are merged -> the regular expression in tokenizers' files
_SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_IGNORE_MERGES = {"llama-bpe": True, "tekken": True, "qwen2": False}  # what llama.cpp does for a split called so
_DO_INSTEAD = "leave the tokenizer out of the file by exporting the model without one"


def add_tokenizer(writer: "gguf.GGUFWriter", tokenizer, vocab_size: int) -> None:
    """Writes vocabulary, merges, special tokens, chat template and the name of the pre-tokenizer; without a
    tokenizer, the file says that it has none.

    Raises:
        ValueError: llama.cpp has no tokenizer that splits text in the same way.
    """
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"a {type(tokenizer).__name__} has no tokenizer.json, which gguf is made from: {_DO_INSTEAD}"
            )
        saved = json.loads(file.read_text(encoding="utf-8"))
        model = saved["model"]
        if model["type"] != "BPE":
            raise ValueError(
                f"a tokenizer of type {model['type']} has no place in a gguf file, only BPE: {_DO_INSTEAD}"
            )
        is_byte_level = not model.get("byte_fallback")
        special = gguf.SpecialVocab(folder, load_merges=is_byte_level, n_vocab=vocab_size)
    if is_byte_level:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(saved))
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_prepends_space(saved))
    tokens, kinds = _vocabulary(saved, vocab_size)
    writer.add_token_list(tokens)
    if not is_byte_level:
        writer.add_token_scores(_scores(tokens, model["merges"]))
    writer.add_token_types(kinds)
    encoded = tokenizer("a")["input_ids"]
    special.add_special_token = {
        "bos": encoded[0] == tokenizer.bos_token_id,
        "eos": encoded[-1] == tokenizer.eos_token_id,
    }
    special.add_to_gguf(writer, quiet=True)


def _vocabulary(saved: dict, vocab_size: int) -> tuple[list[str], list["gguf.TokenType"]]:
    """Every token and its kind, in the order of their ids."""
    found = {index: (token, gguf.TokenType.NORMAL) for token, index in saved["model"]["vocab"].items()}
    if saved["model"].get("byte_fallback"):
        for index, (token, _) in found.items():
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                found[index] = token, gguf.TokenType.BYTE
    for token in saved["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        found[token["id"]] = token["content"], kind
    unknown = saved["model"].get("unk_token")
    for index, (token, _) in found.items():
        if unknown is not None and token == unknown:
            found[index] = token, gguf.TokenType.UNKNOWN
    if max(found) >= vocab_size:
        raise ValueError(
            f"the tokenizer has tokens up to {max(found)}, the model a vocabulary of {vocab_size}: it is another "
            "model's"
        )
    every = [found.get(index, (f"[PAD{index}]", gguf.TokenType.UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in every], [kind for _, kind in every]


def _scores(tokens: list[str], merges: list) -> list[float]:
    """llama.cpp joins the pair whose result has the highest score first: the order of the merges."""
    rank = {}
    for merge in merges:
        rank.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), -float(len(rank)))
    return [rank.get(token, -1e6) for token in tokens]


def _pre_tokenizer(saved: dict) -> str:
    """llama.cpp's name for how the text is split before bytes are merged."""
    pre, model = saved["pre_tokenizer"] or {}, saved["model"]
    normalizer = (saved["normalizer"] or {}).get("type")
    steps = pre.get("pretokenizers", [pre])
    known = {split: name for name, split in _SPLITS.items()}
    found = None
    if steps[-1].get("type") == "ByteLevel" and not steps[-1]["add_prefix_space"] and normalizer in (None, "NFC"):
        before, by_regex = steps[:-1], steps[-1]["use_regex"]
        if by_regex and not before:
            found = "gpt-2"
        elif by_regex and [(s["type"], s.get("individual_digits")) for s in before] == [("Digits", True)]:
            found = "smollm"
        elif not by_regex and [(s["type"], s.get("behavior"), s.get("invert")) for s in before] == [
            ("Split", "Isolated", False)
        ]:
            found = known.get(before[0]["pattern"].get("Regex"))
    if found is None or bool(model.get("ignore_merges")) != _IGNORE_MERGES.get(found, False):
        raise ValueError(
            f"llama.cpp has no name for how this tokenizer splits text (pre_tokenizer={json.dumps(pre)[:200]}, "
            f"normalizer={normalizer}, ignore_merges={model.get('ignore_merges')}): {_DO_INSTEAD}"
        )
    return found


def _prepends_space(saved: dict) -> bool:
    """Whether text gets a space in front, by a `Metaspace` or a `Prepend`."""
    pre, normalizer = saved["pre_tokenizer"] or {}, saved["normalizer"] or {}
    steps = [*pre.get("pretokenizers", [pre]), *normalizer.get("normalizers", [normalizer])]
    return any(s.get("type") == "Prepend" or s.get("prepend_scheme") in ("first", "always") for s in steps)
