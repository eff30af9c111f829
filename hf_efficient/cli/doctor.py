"""`hf-efficient doctor`: what this machine can do, and why something is off."""

import argparse
import dataclasses
import json


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient doctor`."""
    command.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints every finding; returns 1 when something is broken, else 0."""
    from hf_efficient.planning import doctor

    findings = doctor.examine()
    print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2) if options.json else listing(findings))
    return int(any(each.status == "broken" for each in findings))


def listing(findings: list) -> str:
    """One line a finding, and below it why it matters and what to do."""
    lines = []
    for each in findings:
        lines.append(f"{each.status:>6}  {each.name}: {each.what}")
        lines += [f"        {label}: {text}" for label, text in (("why", each.why), ("do", each.do)) if text]
    counts = {status: sum(each.status == status for each in findings) for status in ("ok", "off", "broken")}
    return "\n".join([*lines, "", ", ".join(f"{number} {status}" for status, number in counts.items())])
