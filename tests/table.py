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

# name -> quant_method and arguments of every quantization method and format; test_methods_matrix.py crosses them with
# loading, generating, saving, dequantizing and training adapters over decoders, encoders and encoder-decoders
_WEIGHT_ONLY = {"quant_method": "efficient_weight_only", "group_size": 32}
_SPARSE = {"quant_method": "efficient_sparse"}
METHODS = {
    "rtn_2": dict(_WEIGHT_ONLY, bits=2),
    "mse_3": dict(_WEIGHT_ONLY, bits=3, method="mse"),
    "mse_4_symmetric": dict(_WEIGHT_ONLY, bits=4, method="mse", symmetric=True),
    "hqq_4": dict(_WEIGHT_ONLY, bits=4, method="hqq"),
    "hqq_4_float": dict(_WEIGHT_ONLY, bits=4, method="hqq", zero_point="float"),
    "gptq_3": dict(_WEIGHT_ONLY, bits=3, method="gptq"),
    "gptq_4_channel": dict(_WEIGHT_ONLY, bits=4, group_size=-1, method="gptq"),
    "gptq_rotated_4": dict(_WEIGHT_ONLY, bits=4, method="gptq", rotate=True),
    "rtn_rotated_4": dict(_WEIGHT_ONLY, bits=4, rotate=True),
    "awq_4": dict(_WEIGHT_ONLY, bits=4, method="awq"),
    "gptq_refined_3": dict(_WEIGHT_ONLY, bits=3, method="gptq", refine=True),
    "mixed_4": dict(_WEIGHT_ONLY, bits=4, method="gptq", mixed_precision=True),
    "nf4": dict(_WEIGHT_ONLY, bits=4, codebook="nf4"),
    "nf4_double": dict(_WEIGHT_ONLY, bits=4, codebook="nf4", double_quantization=True),
    "fp4": dict(_WEIGHT_ONLY, bits=4, codebook="fp4"),
    "mxfp4": dict(_WEIGHT_ONLY, bits=4, group_size=32, codebook="mxfp4"),
    "nvfp4_refined": dict(_WEIGHT_ONLY, bits=4, group_size=16, codebook="nvfp4", method="gptq", refine=True),
    "kmeans_4": dict(_WEIGHT_ONLY, bits=4, group_size=-1, codebook="kmeans"),
    "kmeans_3": dict(_WEIGHT_ONLY, bits=3, group_size=-1, codebook="kmeans"),
    "trellis_2": dict(_WEIGHT_ONLY, bits=2, group_size=-1, codebook="trellis", method="gptq"),
    "trellis_refined_3": dict(_WEIGHT_ONLY, bits=3, group_size=-1, codebook="trellis", method="gptq", refine=True),
    "trellis_2.5": dict(
        _WEIGHT_ONLY, bits=2.5, group_size=-1, codebook="trellis", method="gptq", rotate=False, mixed_precision=True
    ),
    "trellis_4": dict(_WEIGHT_ONLY, bits=4, group_size=-1, codebook="trellis"),
    "billm": dict(_WEIGHT_ONLY, bits=2, method="billm"),
    "db_llm_refined": dict(_WEIGHT_ONLY, bits=2, method="db_llm", refine=True),
    "pb_llm": dict(_WEIGHT_ONLY, bits=1, group_size=-1, method="pb_llm"),
    "slim_llm_refined": dict(_WEIGHT_ONLY, bits=3, method="slim_llm", refine=True),
    "yaqa_4": dict(_WEIGHT_ONLY, bits=4, method="yaqa"),
    "yaqa_trellis_2": dict(_WEIGHT_ONLY, bits=2, group_size=-1, codebook="trellis", method="yaqa"),
    "w4a4_refined": dict(_WEIGHT_ONLY, bits=4, method="gptq", activation_bits=4, refine=True),
    "w6a6": dict(_WEIGHT_ONLY, bits=6, method="gptq", activation_bits=6),
    "int6": dict(_WEIGHT_ONLY, bits=6, group_size=-1, symmetric=True),
    "w8a8": dict(quant_method="efficient_w8a8"),
    "w8a8_zeropoint": dict(quant_method="efficient_w8a8", method="zeropoint"),
    "w8a8_static": dict(quant_method="efficient_w8a8", activations="static"),
    "w8a8_smoothquant": dict(quant_method="efficient_w8a8", method="smoothquant"),
    "llm_int8": dict(quant_method="efficient_w8a8", method="llm_int8"),
    "fp8": dict(quant_method="efficient_w8a8", dtype="fp8"),
    "fp8_e5m2": dict(quant_method="efficient_w8a8", dtype="fp8_e5m2"),
    "fp8_columns": dict(quant_method="efficient_w8a8", dtype="fp8", method="llm_int8", outlier_columns=4),
    "bitnet": dict(quant_method="efficient_bitnet"),
    "magnitude_layer": dict(_SPARSE, sparsity=0.3, method="magnitude", group="layer"),
    "magnitude_2:4": dict(_SPARSE, pattern="2:4", method="magnitude"),
    "wanda": dict(_SPARSE, sparsity=0.5),
    "wanda_int4": dict(_SPARSE, pattern="4:8", weights={"bits": 4, "group_size": 32}),
    "sparsegpt": dict(_SPARSE, sparsity=0.5, method="sparsegpt"),
    "alps_refined": dict(_SPARSE, sparsity=0.5, method="alps", refine=True),
    "alps_refined_int4": dict(
        _SPARSE, pattern="2:4", method="alps", refine=True, weights={"bits": 4, "group_size": 32, "method": "gptq"}
    ),
    "gradient_owl": dict(_SPARSE, sparsity=0.5, method="gradient", allocation="owl"),
    "obd": dict(_SPARSE, pattern="2:4", method="obd"),
    "obs": dict(_SPARSE, pattern="4:8", method="obs"),
    "sparsegpt_int4": dict(
        _SPARSE, pattern="2:4", method="sparsegpt", weights={"bits": 4, "group_size": 32, "method": "gptq"}
    ),
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
    "token_recycling": lambda model: {"assistant_model": hf_efficient.TokenRecycling()},
    "assistant": lambda model: {"assistant_model": model},
    "self_speculation": lambda model: {"assistant_model": hf_efficient.SelfSpeculation(skip_layers=[0])},
}

# name -> Scorer for eviction, of small models; those whose names begin with "AdaKV " have their definition in
# test_eviction_scorers.py by that name, Distinctive in a file of its own
SCORERS = {
    "SinkWindow": hf_efficient.SinkWindow(),
    "KeyNorm": hf_efficient.KeyNorm(recent=16),
    "HeavyHitter": hf_efficient.HeavyHitter(recent=16),
    "TOVA": hf_efficient.TOVA(recent=16),
    "SnapKV": hf_efficient.SnapKV(window=8),
    "ExpectedAttention": hf_efficient.ExpectedAttention(window=32, future=16, recent=16),
    "AdaKV SnapKV": hf_efficient.AdaKV(hf_efficient.SnapKV(window=8)),
    "Distinctive": hf_efficient.AdaKV(hf_efficient.Distinctive(window=32, future=16, recent=16), floor=0.5),
}

# (architecture, attention) -> the error, as a pattern; transformers' own refusals are listed too
_NO_SDPA = "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention"
REFUSALS = {("gemma2", "sdpa"): _NO_SDPA, ("gpt_oss", "sdpa"): _NO_SDPA}
