"""What a record of `speculation.py` would be on an H200: a model, not a measurement."""

from hf_efficient.evaluation import devices


ON_HOST = ("prompt_lookup", "token_recycling", "both")  # drafters that run no model


def add_model(line: dict, plain: dict) -> None:
    """Adds v, c and the modelled H200 to a record of one of our ways. plain: that of `generate` on the same prompts."""
    step = plain["verify_seconds"] / plain["steps"]
    positions = line["batch"] + line["drafted_tokens"] / line["steps"]  # that a step verifies, padding aside
    device, weights = devices.find_device("h200"), 8.03e9
    read, compute = 2 * weights / device.bandwidth, 2 * weights * positions / device.operations["bfloat16"]
    draft = line["draft_seconds"] / line["steps"]
    line |= {"v": line["verify_seconds"] / line["steps"] / step, "c": draft / step}
    v, c = max(1.0, compute / read), draft / read if line["way"] in ON_HOST else line["c"]
    line["h200"] = {"v": v, "c": c, "speedup": line["tokens_per_step"] / (v + c)}
