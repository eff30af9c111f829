"""Systems other than Linux: no /proc, no /sys, no modules of POSIX. Models load, are quantized and generate there."""

import json
import os

import fresh_processes
import pytest
from helpers import save_tiny


AS_ON = """
import builtins, io, mmap, os, sys
import torch, transformers, psutil
import subprocess, asyncio, multiprocessing.connection, ctypes
system, folder = sys.argv[1:]
transformers.LlamaForCausalLM  # what transformers itself imports later, it imports on this system

if system != "linux":
    memory = psutil.virtual_memory()
    psutil.virtual_memory, psutil.cpu_count = lambda: memory, lambda logical=True: 2  # this psutil is Linux's
    sys.platform = system
    opened = io.open
    def open_elsewhere(file, *arguments, **options):
        if str(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(file)
        return opened(file, *arguments, **options)
    builtins.open = io.open = open_elsewhere
    for name in [name for name in dir(os) if name.startswith(("sched_", "posix_"))]:
        delattr(os, name)
if system == "win32":
    sys.modules.update(fcntl=None, resource=None)
    for name in [name for name in dir(mmap) if name.startswith(("MAP_", "MADV_"))]:
        delattr(mmap, name)
    delattr(os, "O_DIRECTORY")

import hf_efficient
from hf_efficient.kernels.native import tiers
if system != "linux":
    assert tiers.tier() is tiers.TORCH
torch.manual_seed(0)
prompt = torch.tensor([[1, 2, 3, 4, 5, 6]])
config = hf_efficient.WeightOnlyConfig(method="rtn", group_size=32)
load = transformers.AutoModelForCausalLM.from_pretrained
model = load(folder, quantization_config=config, dtype=torch.float32)
with torch.no_grad():
    model(prompt)
cache = hf_efficient.PagedCache(model.config)
tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=12, do_sample=False)
model.save_pretrained(folder + "-" + system)
again = load(folder + "-" + system, attn_implementation="flash_paged", dtype=torch.float32)
assert again.generate(prompt, max_new_tokens=12, do_sample=False).tolist() == tokens.tolist()
print(tokens.tolist())
"""


def tokens_on(system: str, folder, environment) -> list:
    done = fresh_processes.run(["-c", AS_ON, system, folder], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_models_run_without_what_only_linux_has(tmp_path):
    save_tiny(tmp_path / "model")
    environment = {**os.environ, "HF_EFFICIENT_CPU": ""}
    linux, darwin, win32 = (tokens_on(name, tmp_path / "model", environment) for name in ("linux", "darwin", "win32"))
    assert darwin == linux and win32 == linux
