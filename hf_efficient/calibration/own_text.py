"""Calibration tokens that need no data: text that the model writes, or random tokens."""

import inspect

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.evaluation.devices import free_memory
from hf_efficient.observers.hooks import modes_kept


logger = logging.get_logger(__name__)
_ROWS = 32  # windows that are written at once
_MOST_ROWS = 4096  # on GPUs that say when their memory holds no more: then fewer
_SHARE_NEW = 0.5  # of the 8-token runs of a window that must stand nowhere else in the text
_RUN = 8
_MORE = 32  # one window in so many more than are missing
_MOST_ROUNDS = 4  # at most so many times the windows that are asked for are written


def check(model, calibration: CalibrationConfig) -> None:
    """Raises ValueError where `model` cannot make the tokens that `calibration` asks for; needs no weights."""
    reads_text = model.main_input_name == "input_ids" and hasattr(model.config.get_text_config(), "vocab_size")
    writes = reads_text and model.can_generate() and not model.config.is_encoder_decoder
    if not (reads_text if calibration.own_text == "random" else writes):
        kind = type(model).__name__
        reason = f"{kind} writes no text" if reads_text else f"{kind} reads {model.main_input_name!r} and not text"
        raise ValueError(
            f"{reason}, so calibration has none: give CalibrationConfig(texts=[...]), (dataset='file.txt'), "
            "(tokens=...) or (inputs=[...])"
        )


def reaches_all(model) -> bool:
    """Whether random tokens reach all of `model`: a text decoder with attention, without experts, in one process. Needs
    no weights."""
    takes = inspect.signature(model.forward).parameters
    if not model.can_generate() or model.config.is_encoder_decoder or "position_ids" not in takes:
        return False
    tp_size = getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1
    is_routed = any("expert" in name for name, _ in model.named_modules())
    if tp_size > 1 or is_routed or model.config is not model.config.get_text_config():
        return False
    try:
        check(model, CalibrationConfig(own_text="random"))
    except ValueError:
        return False
    return True


def fits(model, device_map: dict | None) -> bool:
    """Whether the weights of `model`, as they are, fit into the free memory of the device they are loaded to."""
    device = torch.device(next(iter((device_map or {"": "cpu"}).values())))
    return sum(parameter.nbytes for parameter in model.parameters()) < free_memory(device)


def own_tokens(model, calibration: CalibrationConfig) -> torch.Tensor:
    """Tokens int64 [num_samples, sequence_length] on the CPU, a shorter length where `model` has fewer positions. Text
    may have fewer windows, where the model goes on repeating itself; a warning says so.

    Raises:
        ValueError: the model repeats itself in every window that it writes.
    """
    config = model.config.get_text_config()
    length = min(calibration.sequence_length, getattr(config, "max_position_embeddings", None) or 1 << 62)
    generator = torch.Generator().manual_seed(calibration.seed)
    if calibration.own_text == "random":
        vocabulary = model.get_input_embeddings().num_embeddings
        return torch.randint(vocabulary, (calibration.num_samples, length), generator=generator)
    return _written(model, calibration.num_samples, length, generator)


def _written(model, number: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Windows that `model` samples at temperature 1, each after its first token: the one that begins text, or a random
    one where there is none. Windows that mostly repeat themselves or others are left out. How many are written at once,
    and so the text, depends on the device."""
    windows, seen, written, at_once = [], set(), 0, _MOST_ROWS if model.device.type == "cuda" else _ROWS
    with logging.tqdm(total=number, unit="window", desc="writing text to calibrate on") as bar:
        while len(windows) < number and written < _MOST_ROUNDS * number:
            missing = number - len(windows)  # a few more at the end: a round for the last one takes as long as for all
            count = at_once if missing > at_once else missing + missing // _MORE
            try:
                with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
                    torch.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
                    rows = _sample(model, _first_tokens(model, count, generator), length)
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
                at_once = max(1, count // 4)
                continue
            written += count
            for row in rows:
                runs = [tuple(run) for run in row.unfold(0, min(_RUN, length), 1).tolist()]
                new = set(runs) - seen
                if len(new) >= _SHARE_NEW * len(runs):
                    windows.append(row)
                    seen |= new
                    bar.update()
    if not windows:
        raise ValueError(
            f"{type(model).__name__} repeats itself in every text that it writes, which is nothing to calibrate on: "
            "give CalibrationConfig(texts=[...]) or another source"
        )
    if len(windows) < number:
        logger.warning(f"only {len(windows)} of {number} windows of text that {type(model).__name__} wrote are new")
    return torch.stack(windows[:number])


def _first_tokens(model, count: int, generator: torch.Generator) -> torch.Tensor:
    begin, known = model.config.get_text_config().bos_token_id, model.get_input_embeddings().num_embeddings
    if isinstance(begin, int) and 0 <= begin < known:
        return torch.full((count, 1), begin)
    return torch.randint(known, (count, 1), generator=generator)


def _sample(model, first: torch.Tensor, length: int) -> torch.Tensor:
    """Windows int64 [count, length] on the CPU that begin with `first` [count, 1]."""
    if length == 1:
        return first
    defaults = model.generation_config
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - 1, pad_token_id=0
    )
    first = first.to(model.device)
    model.generation_config = settings  # of which `generate` takes what is left out: penalties, the end of a text
    try:
        with modes_kept(model):
            return model.eval().generate(first, attention_mask=torch.ones_like(first), generation_config=settings).cpu()
    finally:
        model.generation_config = defaults
