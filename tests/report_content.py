"""The report of a run of `hf-efficient run`, for what reads reports."""

from hf_efficient.evaluation import environment, report


def content() -> dict:
    def variant(name, weight_bytes, speed, nll):
        timing = {"median": speed, "min": speed, "max": speed, "runs": 1}
        part = {"batch_size": 1, "time_to_first_token_s": timing, "tokens_per_second": timing}
        return {
            "name": name,
            "weight_bytes": weight_bytes,
            "peak_memory_bytes": 10**9,
            "one_prompt": dict(part),
            "batch": dict(part),
            "answer": "An answer.",
            "nll": nll,
        }

    results = [variant("transformers", 200, 10.0, [3.0, 3.2]), variant("int4 group 64", 80, 25.0, [3.25, 3.45])]
    results[1]["one_prompt"]["speculation"] = results[1]["batch"]["speculation"] = {
        "tokens_per_second": {"median": 31.0},
        "tokens_per_step": 1.5,
        "rows_equal_to_plain_generation": 1,
    }
    quantization = {"bits": 4, "group_size": 64, "symmetric": False, "method": "rtn"}
    quantization["quant_method"] = "efficient_weight_only"
    return {
        "model": "org/model",
        "model_source": "rounded before",
        "text": "a text",
        "windows": [2, 1024],
        "prompts": 4,
        "new_tokens": 8,
        "environment": environment.describe(),
        "variants": report.compare(results, [{"quantization": None}, {"quantization": quantization}]),
    }
