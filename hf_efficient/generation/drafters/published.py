"""Draft heads as others publish them: which layout a checkpoint has, and the heads in it.

A key, a tensor or a value without a meaning here is refused by name: heads that are read wrongly only guess badly, and
nobody would notice.
"""

import json
from pathlib import Path

from transformers.utils import cached_file

from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.generation.drafters.published_dflash import PublishedDFlash, is_dflash
from hf_efficient.generation.drafters.published_eagle import EAGLE_TENSORS, PublishedEagle
from hf_efficient.generation.drafters.published_hydra import PublishedHydra
from hf_efficient.generation.drafters.published_medusa import PublishedMedusa
from hf_efficient.generation.drafters.published_tensors import PublishedTensors
from hf_efficient.tensor_files import shards


CONVERT = (
    "import torch; from safetensors.torch import save_file; "
    "tensors = torch.load('{old}', map_location='cpu', weights_only=True); "
    "save_file({{key: value.clone() for key, value in tensors.items()}}, '{new}')"
)
ALLOWED = "EAGLE, EAGLE-2, EAGLE-3, Medusa, Hydra and DFlash are read"


def read(place, hub_options: dict, missing: OSError) -> DraftHeads:
    """The heads that the folder or Hub repository `place` holds in a published layout.

    missing: why they are not in our own layout; raised where there is no `config.json` either.

    Raises:
        OSError: there is no such file, or no safetensors.
        ValueError: the layout is not one that is read.
    """
    try:
        path = cached_file(place, "config.json", **hub_options)
    except OSError:
        raise missing from None
    if path is None:  # what `cached_file` says of this name in a folder
        raise missing
    config = _object(path)
    refuse(config, place)
    if "medusa_num_heads" in config:
        files = _files(place, ("medusa_lm_head", "model"), hub_options)
        return PublishedMedusa.of(config, PublishedTensors(files), str(place))
    if "hydra_num_heads" in config:
        files = _files(place, ("hydra_lm_head",), hub_options)
        return PublishedHydra.of(config, PublishedTensors(files), str(place))
    tensors = PublishedTensors(_files(place, ("model",), hub_options))
    if is_dflash(config):
        return PublishedDFlash.of(config, tensors, str(place))
    if not any(name in tensors for name in EAGLE_TENSORS):
        raise ValueError(
            f"{place} has none of the tensors {', '.join(EAGLE_TENSORS)}, and its config.json none of "
            f"medusa_num_heads, hydra_num_heads and dflash_config: {ALLOWED}"
        )
    return PublishedEagle.of(config, tensors, str(place))


def refuse(config: dict, place) -> None:
    """Raises ValueError for layouts that say themselves what they are, and are not read."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", "dflash"):
        raise ValueError(
            f"{place}: speculators_model_type={kind!r}; of the speculators library 'eagle3' and 'dflash' are read"
        )


def _files(place, stems: tuple[str, ...], hub_options: dict) -> list[str]:
    """The safetensors files of the first of `stems` that is there, whole or in shards."""
    unreachable = None
    for stem in stems:
        for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json"):
            try:
                path = cached_file(place, name, **hub_options)
            except OSError as error:
                if error.__cause__ is not None:  # of the Hub: there may be such a file
                    unreachable = error
                continue
            if name.endswith(".safetensors"):
                return [path]
            return [cached_file(place, shard, **hub_options) for shard in shards(path)]
    if unreachable is not None:
        raise unreachable
    old = "pytorch_model.bin" if stems[0] == "model" else f"{stems[0]}.pt"
    new = f"{stems[0]}.safetensors"
    raise OSError(
        f"{place} has no {new}: weights are read from safetensors only, as other files can run code when they are "
        f'opened. Convert {old} in its folder with: python -c "{CONVERT.format(old=old, new=new)}"'
    )


def _object(path: str) -> dict:
    try:
        found = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found
