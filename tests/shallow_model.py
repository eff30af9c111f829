"""The first two blocks of the sample model with a quarter of their channels between the products of an MLP and the
first 4,096 tokens of the vocabulary, for the examples of docs and `examples/`: they run the same way, in less time."""

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_efficient.evaluation import samples


TOKENS, CHANNELS = 4096, 384
_SCRATCH = tempfile.TemporaryDirectory()


@functools.cache
def folder() -> Path:
    """Where it is saved with its tokenizer; not to be changed."""
    source, path = samples.sample_model(), Path(_SCRATCH.name) / "shallow"
    config = AutoConfig.from_pretrained(source, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype="auto")
    model.resize_token_embeddings(TOKENS)
    for block in model.model.layers:
        for product in (block.mlp.gate_proj, block.mlp.up_proj):
            product.weight = nn.Parameter(product.weight[:CHANNELS].clone())
        block.mlp.down_proj.weight = nn.Parameter(block.mlp.down_proj.weight[:, :CHANNELS].clone())
    model.config.intermediate_size = CHANNELS
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(source)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = {token: number for token, number in parts["model"]["vocab"].items() if number < TOKENS}
    merges = [pair for pair in parts["model"]["merges"] if {*pair, "".join(pair)} <= vocabulary.keys()]
    parts["model"] |= {"vocab": vocabulary, "merges": merges}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.save_pretrained(path)
    return path
