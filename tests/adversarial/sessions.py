"""Sessions: a tiny model, then changes and calls in turn. The same session runs here and in a process without the
plugin.

python sessions.py REQUESTS ANSWERS     reads pickled sessions from the first pipe and writes to the second what each
                                        gave, with transformers alone
"""

import os
import pickle
import sys
import tempfile
import threading
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import fresh_processes  # noqa: E402
import torch  # noqa: E402
from adapter_changes import CHANGES  # noqa: E402
from helpers import tiny_model  # noqa: E402


ERROR_CHARACTERS = 200


def run(session: dict, prepare=lambda model: model, generate=None) -> list[dict]:
    """session: model (a name of `TINY_MODELS`), steps: ("change", name, number) or ("call", options). prepare(model)
    before the first step; generate(model, **options) in place of `model.generate`. Returns what each call gave."""
    model, given, undo = prepare(tiny_model(session["model"], **session.get("config", {}))), [], []
    try:
        for kind, *step in session["steps"]:
            if kind == "change":
                back = CHANGES[step[0]](model, step[1])
                undo += [back] if callable(back) else []
            else:
                given.append(call(model, step[0], generate))
    finally:
        for back in reversed(undo):
            back()
    return given


def call(model, options: dict, generate) -> dict:
    """options: of `generate()`, and `seed`. Returns its sequences, and the scores of every step to judge ties by."""
    options = dict(options)
    torch.manual_seed(options.pop("seed", 0))
    if generate is None:
        options.update(return_dict_in_generate=True, output_scores=True)
        generate = type(model).generate
    try:
        output = generate(model, **options)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)[:ERROR_CHARACTERS]}
    scores = getattr(output, "scores", None)
    result = {"sequences": output if torch.is_tensor(output) else output.sequences}
    if scores is not None:
        result["scores"] = [step.float() for step in scores]
    return result


class Reference:
    """Another process that runs sessions with transformers alone."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        pipes = [os.path.join(self.folder.name, name) for name in ("requests", "answers")]
        for pipe in pipes:
            os.mkfifo(pipe)
        serving = dict(args=([__file__, *pipes],), kwargs=dict(timeout=3600, check=True))
        self.thread = threading.Thread(target=fresh_processes.run, **serving, daemon=True)
        self.thread.start()
        self.requests, self.answers = open(pipes[0], "wb"), open(pipes[1], "rb")

    def run(self, session: dict) -> list[dict]:
        pickle.dump(session, self.requests)
        self.requests.flush()
        return pickle.load(self.answers)

    def close(self) -> None:
        self.requests.close()
        self.thread.join()
        self.answers.close()
        self.folder.cleanup()


def serve(requests: str, answers: str) -> None:
    torch.set_num_threads(1)
    with open(requests, "rb") as sessions, open(answers, "wb") as output:
        while True:
            try:
                session = pickle.load(sessions)
            except EOFError:
                return
            given = run(session)
            assert not any(name.startswith("hf_efficient") for name in sys.modules)
            pickle.dump(given, output)
            output.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
