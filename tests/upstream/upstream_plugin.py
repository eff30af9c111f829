"""A pytest plugin for transformers' own tests: it notes the outcome of every test, and in its modes changes what they
run on.

Environment:
    UPSTREAM_MODE: "plain" (without hf_efficient), "import", "loop", "attention", "forced" (both of these) or "twins".
    UPSTREAM_RECORD: the file to which one JSON object a line is appended: {"start": id}, {"test": id, "when",
        "outcome", "message"} and, in the mode "twins", {"call": id, ...} as `upstream_twins` says.
    UPSTREAM_TESTS: the folder that holds transformers' `tests`.

Every test starts from the same random state, so that two runs of it compare. What the tests import from transformers
and the installed release lacks is replaced by something that skips the test that uses it.
"""

import os


MODE = os.environ["UPSTREAM_MODE"]
if MODE != "plain":
    import hf_efficient  # noqa: F401

import ast  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import unittest  # noqa: E402

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402


def record(entry: dict) -> None:
    """Appends a line at once: what crashes the process leaves what came before it."""
    with open(os.environ["UPSTREAM_RECORD"], "a") as file:
        file.write(json.dumps(entry) + "\n")


def pytest_configure(config):
    _stand_in_for_missing_names(pathlib.Path(os.environ["UPSTREAM_TESTS"]))
    if MODE in ("loop", "forced"):
        import upstream_forced

        upstream_forced.force_loop()
    if MODE in ("attention", "forced"):
        import upstream_forced

        upstream_forced.force_attention()
    if MODE == "twins":
        import upstream_twins

        upstream_twins.install(record)


def _stand_in_for_missing_names(tests: pathlib.Path) -> None:
    """For the modules that many tests share: a name that the installed transformers lacks becomes one that skips."""
    for path in sorted(tests.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name):
                        setattr(module, name, _skipping(f"{node.module}.{name}"))


def _skipping(name: str):
    def missing(*args, **kwargs):
        raise unittest.SkipTest(f"the installed transformers has no {name}")

    return missing


def pytest_collection_modifyitems(items):
    """With another default attention, a test of which one is the default says nothing."""
    if MODE in ("attention", "forced"):
        for item in items:
            if "sdpa_can_dispatch" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="asks for transformers' default attention"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    record({"start": item.nodeid})
    os.environ["UPSTREAM_CURRENT"] = item.nodeid
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    for module in list(sys.modules.values()):  # the generators of transformers' test helpers
        generator = vars(module).get("global_rng") if module is not None else None
        if isinstance(generator, random.Random):
            generator.seed(0)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        record({"test": report.nodeid, "when": report.when, "outcome": _outcome(report), "message": _message(report)})


def pytest_collectreport(report):
    if report.failed:
        record({"test": report.nodeid, "when": "collect", "outcome": "error", "message": _message(report)})


def pytest_sessionfinish(session):
    record({"finished": True})


def _outcome(report) -> str:
    return "error" if report.failed and report.when != "call" else report.outcome


def _message(report) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr)[-500:] if crash is None else f"{crash.message[:1500]} [{crash.path}:{crash.lineno}]"
