"""Does training adapters over 4-bit weights learn? SmolLM2 in int4 and NF4, LoRA on every linear, 50 steps on a CPU.

python benchmarks/qlora.py [--only NAME] [--output FILE]
"""

import statistics
import tempfile
import time

import harness
import peft
import torch

import hf_efficient
from hf_efficient.evaluation import environment, memory, perplexity, samples


CONFIGS = {
    "int4 group 64": dict(bits=4, group_size=64),
    "NF4 group 64, double quantization": dict(codebook="nf4", double_quantization=True),
}
STEPS, BATCH, LENGTH, RATE, RANK, HELD_OUT = 50, 2, 256, 5e-4, 16, 8


def measure(name: str, text: torch.Tensor, held_out: torch.Tensor) -> dict:
    """Trains on `text` [STEPS * BATCH, LENGTH] and scores `held_out` [windows, length] before, after, and with the
    adapter saved and reloaded; both int64."""
    torch.manual_seed(0)
    model = load(name)
    before = perplexity.negative_log_likelihood(model, held_out, False).mean().item()
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses, seconds = [], []
    model.train()
    for ids in text.split(BATCH):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    model.eval()
    after = perplexity.negative_log_likelihood(model, held_out, False).mean().item()
    with tempfile.TemporaryDirectory() as adapter, torch.no_grad():
        model.save_pretrained(adapter)
        again = peft.PeftModel.from_pretrained(peft.prepare_model_for_kbit_training(load(name)), adapter)
        same = torch.equal(again.eval()(held_out[:1]).logits, model(held_out[:1]).logits)
    return {
        "name": name,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "losses": losses,
        "mean_of_the_first_and_last_10": [statistics.mean(losses[:10]), statistics.mean(losses[-10:])],
        "held_out_nll_before": before,
        "held_out_nll_after": after,
        "seconds_per_step_median": statistics.median(seconds),
        "peak_memory_bytes": memory.peak_memory_bytes(torch.device("cpu")),
        "reloaded_adapter_gives_the_same_logits": same,
    }


def load(name: str):
    """The compressed model."""
    config = hf_efficient.WeightOnlyConfig(**CONFIGS[name])
    return harness.load(quantization_config=config)


def main() -> None:
    """Measures every config in turn and writes the result."""
    parser = harness.parser(__doc__, "qlora_cpu.json")
    parser.add_argument("--only", choices=CONFIGS, help="one config instead of all")
    options = parser.parse_args()
    windows = harness.windows(None, "news", STEPS * BATCH + HELD_OUT, LENGTH)
    names = [options.only] if options.only else list(CONFIGS)
    content = {
        "model": samples.SAMPLE_MODEL,
        "text": "news stories of gensim's test data; the windows of the last ones are held out",
        "steps": STEPS,
        "batch": [BATCH, LENGTH],
        "rank": RANK,
        "learning_rate": RATE,
        "environment": environment.describe(),
        "results": [measure(name, windows[:-HELD_OUT], windows[-HELD_OUT:]) for name in names],
    }
    harness.write(options.output, content)


if __name__ == "__main__":
    main()
