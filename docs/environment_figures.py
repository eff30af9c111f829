"""The tables of environments: what was installed, what its tests did, how long an import takes."""

import json
import textwrap

from result_files import RESULTS, load, markdown


# in every environment, or tools of the tests
COMMON = set(
    "accelerate huggingface_hub ipykernel matplotlib nbclient optimum peft psutil rich safetensors shtab tokenizers "
    "torch transformers triton".split()
)


def environments() -> str:
    """What the contract suite did in each environment of `tests/environments`."""
    rows, later, absent = [], {}, []
    defined = {path.stem for path in (RESULTS.parents[1] / "tests" / "environments").glob("*.txt")}
    not_run = sorted(defined - {path.stem for path in (RESULTS / "environments").glob("*.json")})
    for path in sorted((RESULTS / "environments").glob("*.json")):
        found = json.loads(path.read_text())
        if "conflict" in found:
            absent.append(f"- {path.stem}: not installed, because {found['conflict']}.")
            continue
        versions = [found["versions"].get(name, "") for name in ("transformers", "torch")]
        for feature in found["needs_later"]:
            later.setdefault(feature, []).append(path.stem)
        counts = [
            found["passed"],
            sum(found["needs_later"].values()),
            len(found["failed"]),
            sum(found["skipped"].values()),
        ]
        beside = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name not in COMMON)
        rows.append([path.stem, *versions, found["python"], beside, *map(str, counts)])
    if not_run:
        absent.append(f"- {', '.join(not_run)}: defined, not run yet.")
    header = "environment | transformers | torch | Python | beside | passed | refused by name | failed | skipped"
    features = [
        textwrap.fill(
            f"- {feature.replace(' needs transformers ', ': since transformers ')}, not in {', '.join(names)}.",
            width=120,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for feature, names in sorted(later.items())
    ]
    parts = [
        markdown(header, "lllllrrrr", rows),
        "\n".join(absent),
        *(["What is refused by name, or runs as transformers runs it:"] if features else []),
    ]
    return "\n\n".join(part for part in (*parts, "\n".join(features)) if part)


def upstream() -> str:
    """transformers' own tests with and without `import hf_efficient`."""
    rows = []
    for found in load("upstream"):
        without, with_us = found["without"], found["with"]
        counts = [without.get("passed", 0), with_us.get("passed", 0), found["refused"], found["different"]]
        rows.append([found["target"], found["transformers"], *map(str, counts)])
    header = "tests | transformers | passed without | passed with | refused by name | different"
    return markdown(header, "llrrrr", rows)


def import_time() -> str:
    """Seconds that `import hf_efficient` adds, with the oldest and the newest transformers, and the wheel's size."""
    rows = []
    for found in load("import_time")["results"].values():
        seconds = found["seconds"]
        # medians may change places
        added = max(0.0, seconds["transformers and hf_efficient"] - seconds["transformers"])
        model, with_model = seconds["a model"], seconds["a model and hf_efficient"]
        plain = [f"{value:.2f}" for value in (seconds["transformers"], added, model, with_model - model)]
        rows.append([found["versions"]["transformers"], *plain])
    header = "transformers | `import transformers` | and `hf_efficient` | `LlamaForCausalLM` of it | and `hf_efficient`"
    wheel = load(f"environments/{next(reversed(load('import_time')['results']))}")["wheel_bytes"]
    return f"{markdown(header, 'lrrrr', rows)}\n\nThe wheel has {wheel / 1e6:.1f} MB."
