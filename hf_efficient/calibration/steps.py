"""What configs ask to be done to a block besides choosing codes: transforms before, refinement after."""

import importlib
import importlib.util


def transforms(schemes: dict) -> list:
    """What changes the weights of a block, but not what it computes, before codes are chosen:
    rotations, and `transform` of the file in `hf_efficient/calibration` that has the name of a method."""
    from hf_efficient.calibration.rotation import rotate_block

    found = [rotate_block] if any(getattr(own, "rotate", False) for own in schemes.values()) else []
    for method in sorted({own.method for own in schemes.values()}):
        if importlib.util.find_spec(f"hf_efficient.calibration.{method}"):
            found.append(importlib.import_module(f"hf_efficient.calibration.{method}").transform)
    return found


def refinement(schemes: dict):
    """The function that tunes a block whose layers have `schemes` (name -> config); None if none has `refine`."""
    if not any(getattr(own, "refine", False) for own in schemes.values()):
        return None
    from hf_efficient.calibration.refine import refine_block
    from hf_efficient.calibration.refine_sparse import refine_sparse_block

    is_sparse = any(own.name == "efficient_sparse" for own in schemes.values())
    return refine_sparse_block if is_sparse else refine_block
