"""The table of docs/gpus.md: every defect of the GPU path, and tests that are there."""

import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def test_every_mended_defect_names_its_tests():
    page = (ROOT / "docs" / "gpus.md").read_text()
    rows = re.findall(r"^\| (\d+)\. .* \| (.*) \| (.*) ?\|$", page, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, 12))
    for number, now, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert bool(named) != ("not mended" in now), f"defect {number}"
        for path, name in named:
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"defect {number}: {path} has no {name}"
