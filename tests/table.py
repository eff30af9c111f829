"""The shared test table: every registered thing has a row here, and `test_matrix.py` crosses them all.

A new method, format, attention, cache option or drafter adds one row. What an architecture cannot do stands in
`REFUSALS` with the error its users see.
"""

import hf_efficient


# name -> arguments of WeightOnlyConfig, or None for the model as it is
CONFIGS = {
    "none": None,
    "int8_channel": dict(bits=8, group_size=-1, symmetric=True),
    "int8_group": dict(bits=8, group_size=32),
    "int4_group": dict(bits=4, group_size=32),
    "int4_tensor": dict(bits=4, group_size=None, symmetric=True),
}

ATTENTIONS = ("eager", "sdpa", "flash_paged")

# name -> factory taking the model
CACHES = {
    "default": lambda model: None,
    "paged": lambda model: hf_efficient.PagedCache(model.config),
    "paged_8": lambda model: hf_efficient.PagedCache(model.config, block_size=8),
}

# name -> factory taking the model: arguments of generate()
SPECULATION = {
    "none": lambda model: {},
    "prompt_lookup": lambda model: {"prompt_lookup_num_tokens": 3},
    "assistant": lambda model: {"assistant_model": model},
}

# (architecture, attention) -> the error, as a pattern; transformers' own refusals are listed too
_NO_SDPA = "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention"
REFUSALS = {
    ("gemma2", "sdpa"): _NO_SDPA,
    ("gpt_oss", "sdpa"): _NO_SDPA,
}
