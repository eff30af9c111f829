"""The two processes of test_tensor_parallel.py, forks of one: `tensor_parallel_worker.py CASES.json RESULTS` with
torchrun's variables but for the rank.

Each case is {"name", "path", "quantization" or None, "train"}; process r writes RESULTS/r.safetensors and
RESULTS/r.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_efficient  # noqa: F401
from hf_efficient.layers import CompressedModule


def held_bytes(module: torch.nn.Module) -> int:
    """Bytes of a compressed module's tensors in this process."""
    tensors = (getattr(tensor, "_local_tensor", tensor) for tensor in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in tensors)


def main(cases: list[dict], folder: Path) -> None:
    tensors, facts = {}, {}
    for case in cases:
        name = case["name"]
        options = {"quantization_config": case["quantization"]} if case["quantization"] else {}
        distributed = DistributedConfig(tp_size=2, tp_plan=case.get("tp_plan", "auto"), ep_size=case.get("ep_size", 1))
        try:
            model = AutoModelForCausalLM.from_pretrained(
                case["path"], dtype=torch.float32, distributed_config=distributed, **options
            )
        except ValueError as error:
            facts[name] = {"error": str(error)}
            continue
        ids = torch.arange(3, 20)[None]
        with torch.no_grad():
            tensors[f"{name}.logits"] = model(ids).logits.contiguous()
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
        tensors[f"{name}.tokens"] = tokens.contiguous()
        compressed = [module for module in model.modules() if isinstance(module, CompressedModule)]
        facts[name] = {"bytes": sum(map(held_bytes, compressed))}
        if case.get("train"):
            embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
            model(inputs_embeds=embeddings).logits.float().square().mean().backward()
            tensors[f"{name}.gradient"] = embeddings.grad.contiguous()
        try:
            model.save_pretrained(folder / "saved")
        except ValueError as error:
            facts[name]["saving"] = str(error)
    rank = torch.distributed.get_rank()
    save_file(tensors, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    other = os.fork()
    rank = "0" if other else "1"
    os.environ.update(RANK=rank, LOCAL_RANK=rank, CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    torch.distributed.destroy_process_group()
    assert not other or os.waitpid(other, 0)[1] == 0
