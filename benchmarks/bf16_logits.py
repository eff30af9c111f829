"""How far are logits in bfloat16 from those in float32, by torch and by the C++ kernels? Writes
benchmarks/results/bf16_logits.json.

    python benchmarks/bf16_logits.py [--output FILE]

SmolLM2-135M writes four tokens behind each of 24 prompts of 40 to 63 tokens. A distance is the norm of the difference
by the norm of the logits in float32; only steps whose earlier tokens are those of float32 count.
"""

import harness
import torch

import hf_efficient
from hf_efficient.evaluation import environment, samples


PROMPTS, NEW = 24, 4


def logits(model, text: torch.Tensor) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Of each prompt: its new tokens, and the logits [1, vocabulary] of every step in float32."""
    found = []
    for prompt in range(PROMPTS):
        ids = text[prompt * 100 : prompt * 100 + 40 + prompt][None]
        options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
        options |= dict(attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True)
        result = model.generate(ids, **options)
        found.append((result.sequences[0, -NEW:].tolist(), [step.float() for step in result.logits]))
    return found


def distances(exact, found) -> dict[str, float]:
    """The mean and the largest distance, and how many steps they are of."""
    each = [
        ((own - right).norm() / right.norm()).item()
        for (right_tokens, rights), (tokens, owns) in zip(exact, found)
        for step, (right, own) in enumerate(zip(rights, owns))
        if right_tokens[:step] == tokens[:step]
    ]
    return {"mean": sum(each) / len(each), "largest": max(each), "steps": len(each)}


def main() -> None:
    """Measures torch's two attentions and ours."""
    options = harness.parser(__doc__, "bf16_logits.json").parse_args()
    text = harness.tokenizer()(samples.sample_text()[:20000], return_tensors="pt")["input_ids"][0]
    exact, model, ways = logits(harness.load(dtype=torch.float32), text), harness.load(), {}
    for name, implementation in (("torch, fused attention", "sdpa"), ("torch, plain attention", "eager")):
        model.set_attn_implementation(implementation)
        ways[name] = distances(exact, logits(model, text))
    model.set_attn_implementation("sdpa")
    hf_efficient.optimize(model)
    logits(model, text)  # the first forwards are those that are captured
    ways["hf_efficient"] = distances(exact, logits(model, text))
    harness.write(options.output, harness.rounded({"environment": environment.describe(), "ways": ways}))


if __name__ == "__main__":
    main()
