"""Starts `hf-efficient serve` with a quantized model, asks it one question over HTTP, and stops it.

pip install 'transformers[serving]'
python examples/serve_and_call.py --folder smollm2-int4
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", required=True, help="a folder that save_pretrained wrote, with its tokenizer")
parser.add_argument("--port", type=int, default=8765)
parser.add_argument("--max-tokens", type=int, default=32)
options = parser.parse_args()

command = [str(Path(sys.executable).with_name("hf-efficient")), "serve", options.folder, "--sequences", "4"]
server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(options.port)])
body = {"model": options.folder, "max_tokens": options.max_tokens}
body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
request = urllib.request.Request(
    f"http://127.0.0.1:{options.port}/v1/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
try:
    for _ in range(120):  # seconds until the server answers
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                print(json.loads(reply.read())["choices"][0]["message"]["content"])
            break
        except urllib.error.URLError:
            if server.poll() is not None:
                sys.exit("the server has stopped; its messages stand above")
            time.sleep(1)
finally:
    server.terminate()
    server.wait()
