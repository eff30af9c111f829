"""Python processes that start in half a second: forks of one that has imported torch and transformers, and nothing of
ours. Importing both takes ten seconds of a slow core.

    done = fresh_processes.run(["-c", "import hf_efficient; ..."])     # as subprocess.run([sys.executable, "-c", ...])

What is about imports, threads of torch or variables that a library reads when it is imported (`READ_AT_IMPORT`) needs a
process from its start, which `run` then takes; unless many have the same variables, those in `SERVED`.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path


# how names of such variables begin
READ_AT_IMPORT = ("ATEN", "CUDA", "GOMP", "HF_", "KMP", "LD_", "MKL", "OMP", "PYTHON", "TORCH", "TRANSFORM", "TRITON")
# of these: ours, which no import before the fork reads, and what inductor sets in a process that has compiled something
LEFT_OUT = ("HF_EFFICIENT", "TORCHINDUCTOR_CACHE_DIR")
SERVED = ({}, {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})  # what the variables of servers differ in
FROM = dict(os.environ)  # these variables

_servers: dict[int, subprocess.Popen] = {}  # by place in `SERVED`
_lock = threading.Lock()


def run(
    arguments: list, *, cwd: Path | None = None, env: dict | None = None, timeout: float = 280, check: bool = False
) -> subprocess.CompletedProcess:
    """What `python ARGUMENTS` prints (text) and its exit status. `arguments`: ["-c", code, ...], ["-m", module, ...] or
    [script, ...]. Ends the process with TimeoutExpired after `timeout` seconds."""
    env = dict(os.environ if env is None else env)
    arguments = [str(argument) for argument in arguments]
    servers = [place for place, more in enumerate(SERVED) if _at_import(env) == _at_import({**FROM, **more})]
    if not hasattr(os, "fork") or not servers:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, check=check, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        *written, status = (os.path.join(folder, name) for name in ("out", "err", "status"))
        os.mkfifo(status)
        answer = os.open(status, os.O_RDWR)  # so that it can be waited for without a writer
        request = {"arguments": arguments, "cwd": str(cwd or os.getcwd()), "env": env, "written": written}
        server = _ask(servers[0], {**request, "status": status, "timeout": timeout})
        while not select.select([answer], [], [], 1)[0]:
            assert server.poll() is None, "the process that forks has ended: its error is printed"
        status = json.loads(os.read(answer, 100))
        os.close(answer)
        out, err = (Path(path).read_text() for path in written)
    if status is None:
        raise subprocess.TimeoutExpired(arguments, timeout, out, err)
    done = subprocess.CompletedProcess([sys.executable, *arguments], status, out, err)
    if check:
        done.check_returncode()
    return done


def _at_import(env: dict) -> dict:
    return {key: env[key] for key in env if key.startswith(READ_AT_IMPORT) and not key.startswith(LEFT_OUT)}


def _ask(place: int, request: dict) -> subprocess.Popen:
    with _lock:
        server = _servers.get(place)
        if server is None or server.poll() is not None:
            command, env = [sys.executable, __file__], {**FROM, **SERVED[place]}
            _servers[place] = server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=env)
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
    return server


def _serve() -> dict:
    """Takes requests until its input ends. Returns in the process that a request asks for, with the request. The fork
    between them waits for the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request = json.loads(line)
        if not (child := os.fork()):
            return request
        deadline, ended = time.monotonic() + request["timeout"], 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            ended or time.sleep(0.01)
        if not ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        Path(request["status"]).write_text(json.dumps(os.waitstatus_to_exitcode(status) if ended else None))
        os._exit(0)
    sys.exit()


def _become(request: dict) -> None:
    """Runs what `python ARGUMENTS` runs, in this process."""
    os.setpgid(0, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for descriptor, path in enumerate((os.devnull, *request["written"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    how, *rest = request["arguments"]
    if how == "-c":
        sys.argv[:], sys.path[0] = ["-c", *rest[1:]], ""
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif how == "-m":
        sys.argv[:], sys.path[0] = rest, request["cwd"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = [how, *rest], os.path.dirname(os.path.abspath(how))
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    import gc

    import torch._inductor  # noqa: F401
    import transformers
    import transformers.generation.continuous_batching  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer  # noqa: F401

    with contextlib.suppress(ImportError):
        import peft  # noqa: F401
    assert "hf_efficient" not in sys.modules
    gc.collect()
    gc.freeze()
    _become(_serve())
