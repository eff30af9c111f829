"""`hf-efficient doctor`: what this machine can do, and why something is slow or missing."""

import argparse
import dataclasses

from hf_efficient.cli.result import Result


KEYS = {  # of each object in a list
    "name": "what was looked at",
    "status": "ok, off or broken",
    "what": "what was found",
    "why": "why it matters, where it is not ok",
    "do": "what to do about it",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient doctor`."""


def run(options: argparse.Namespace) -> Result:
    """Every finding, with status 1 when something is broken."""
    from hf_efficient.planning import doctor

    findings = doctor.examine()
    status = int(any(each.status == "broken" for each in findings))
    return Result(listing(findings), [dataclasses.asdict(each) for each in findings], status)


def listing(findings: list) -> str:
    """One line a finding, and below it why it matters and what to do."""
    lines = []
    for each in findings:
        lines.append(f"{each.status:>6}  {each.name}: {each.what}")
        lines += [f"        {label}: {text}" for label, text in (("why", each.why), ("do", each.do)) if text]
    counts = {status: sum(each.status == status for each in findings) for status in ("ok", "off", "broken")}
    return "\n".join([*lines, "", ", ".join(f"{number} {status}" for status, number in counts.items())])
