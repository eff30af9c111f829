"""Measures one variant of a model. Run as a process of its own, so that its peak memory and its speed are its own:

python -m hf_efficient.cli.measure RESULT.json < variant.json
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_efficient.cli import catch_errors, progress
from hf_efficient.evaluation import latency, memory, perplexity
from hf_efficient.integrations.transformers_compat import cache_name


DRAFT_TOKENS = 3  # by prompt lookup, per step and sequence


def measure(variant: dict, progress: bool) -> dict:
    """Loads `variant["model"]` and measures it.

    Args:
        variant: a dict of
            `name`: of the result;
            `model`, optional `assistant` (draft model): folders or Hub ids, loaded in `model_dtype`;
            optional `arguments` of a quantization config with `quant_method`, or optional `checkpoint`: a compressed
            folder, loaded instead of `model`;
            `efficient`: True for flash_paged, PagedCache and speculation, False for stock transformers;
            `prompts` (list of str), `new_tokens` for each, `repeats` (timed runs);
            `tokens`: a safetensors file with int64 `windows` [count, length] for the perplexity.
        progress: whether to show progress bars.

    Returns:
        Numbers ready for JSON: bytes, seconds, tokens per second, perplexity, and the text of the first prompt.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(variant["model"], padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"dtype": variant.get("model_dtype", "auto"), "device_map": device.type if device.type != "cpu" else None}
    if variant["efficient"]:
        options["attn_implementation"] = "flash_paged"
    checkpoint = variant.get("checkpoint")
    if variant.get("arguments"):
        options["quantization_config"] = variant["arguments"]
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(checkpoint or variant["model"], **options)
    load_seconds = time.perf_counter() - start
    result = {"name": variant["name"], "load_s": load_seconds, "dtype": str(model.dtype).removeprefix("torch.")}

    chosen = {"one_prompt": variant["prompts"][:1], "batch": variant["prompts"]}
    padded = {"return_tensors": "pt", "padding": True}
    batches = {name: encode(tokenizer, prompts, **padded).to(device) for name, prompts in chosen.items()}
    plain = {}
    for name, inputs in batches.items():
        speed = _speed(model, inputs, variant, progress)
        plain[name] = speed.pop("result")
        result[name] = {"batch_size": len(plain[name]), **speed}
    result["weight_bytes"] = memory.weight_bytes(model)  # after the first forward: device layouts have been derived

    if variant["efficient"]:
        from hf_efficient import enable_speculation

        enable_speculation(model)
        drafting = {"prompt_lookup_num_tokens": DRAFT_TOKENS}
        if variant.get("assistant"):
            drafting = {"assistant_model": AutoModelForCausalLM.from_pretrained(variant["assistant"], **options)}
        for name, inputs in batches.items():
            speed = _speed(model, inputs, variant, progress, return_dict_in_generate=True, **drafting)
            output = speed.pop("result")
            same = (output.sequences == plain[name]).all(dim=1)
            result[name]["speculation"] = {
                "tokens_per_second": speed["tokens_per_second"],
                "tokens_per_step": output.tokens_per_step,
                "rows_equal_to_plain_generation": int(same.sum()),
            }
    result["peak_memory_bytes"] = memory.peak_memory_bytes(device)
    new_tokens = plain["one_prompt"][0, batches["one_prompt"]["input_ids"].shape[1] :]
    result["answer"] = tokenizer.decode(new_tokens, skip_special_tokens=True)

    windows = load_file(variant["tokens"])["windows"]
    result["nll"] = perplexity.negative_log_likelihood(model, windows, progress).tolist()
    return result


def _speed(model, inputs: dict, variant: dict, progress: bool, **options) -> dict:
    from hf_efficient import PagedCache

    def generate(tokens: int):
        cache = {}
        if variant["efficient"] and not options and model.device.type != "cpu":  # on a CPU generate() brings its own
            cache[cache_name()] = PagedCache(model.config)
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return model.generate(**inputs, **options, **cache, **lengths, do_sample=False)

    return latency.generation_speed(
        generate, len(inputs["input_ids"]), variant["new_tokens"], variant["repeats"], progress
    )


def encode(tokenizer, prompts: list[str], **options):
    """`input_ids` and `attention_mask` of prompts, each the message of a user where the tokenizer has a chat template.
    options: of the tokenizer."""
    has_template = tokenizer.chat_template is not None
    if has_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    options |= {"add_special_tokens": not has_template, "return_token_type_ids": False}
    return tokenizer(prompts, **options)


if __name__ == "__main__":
    import transformers

    spec = json.load(sys.stdin)
    if not spec["progress"]:
        transformers.logging.disable_progress_bar()
    with progress.shown():
        status, message = catch_errors(
            lambda: Path(sys.argv[1]).write_text(json.dumps(measure(spec, spec["progress"]))) and 0
        )
    if message is not None:
        print(message, file=sys.stderr)
    sys.exit(status)
