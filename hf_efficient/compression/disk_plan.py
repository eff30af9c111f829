"""What `compress_on_disk` will take, known before anything is read."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from hf_efficient.evaluation.memory import private_bytes


_LATER = 30_000_000  # libraries that are loaded when a block runs first, and what the C library keeps of freed memory
_NAMED = 10_000  # objects of Python for a tensor of the checkpoint: hooks, names, places in files
_EXAMPLE = 16  # tokens with which the model is watched: every block's hidden states stay until all blocks are found
_SQUARES = 6  # float32 [K, K] matrices that error feedback holds at once beside the Hessian
_MATRICES = 7  # float32 [N, K] matrices that choosing the codes of one weight holds at once
_STATES, _OUTPUTS = 8, 4  # float32 tensors as wide as hidden states, and as the widest layer, while a block runs


@dataclass(frozen=True)
class DiskPlan:
    """Bytes that a run takes in memory at most, and on disk.

    Args:
        process: of this process before the run, with libraries that it will load and the Python objects of all tensors.
        blocks: of two blocks of the model.
        outside: of what is outside the blocks, with one block: while the model finds its blocks.
        statistics: of the inputs of the layers of a block, of running it on one batch, and of the search for the codes
            of one of its weights.
        states, checkpoint: of hidden states, and of the compressed checkpoint, in `folder`.
        source: of the checkpoint that is read.
    """

    process: int
    blocks: int
    outside: int
    statistics: int
    states: int
    checkpoint: int
    source: int
    folder: Path

    @property
    def memory(self) -> int:
        """Bytes in memory at most."""
        return self.process + max(self.outside, self.blocks + self.statistics)

    @property
    def disk(self) -> int:
        """Bytes on the disk of `folder` at most."""
        return self.states + self.checkpoint

    def _parts(self) -> str:
        return (
            f"{_size(self.process)} for the process, {_size(self.blocks)} for two blocks, {_size(self.statistics)} for "
            f"statistics and rounding, or {_size(self.outside)} for embeddings and a block"
        )

    def text(self, allowed: int) -> str:
        """The plan in words."""
        return (
            f"memory: {_size(self.memory)} of {_size(allowed)} ({self._parts()}); disk: {_size(self.states)} of hidden "
            f"states and {_size(self.checkpoint)} of weights beside {self.folder.parent}, from a checkpoint of "
            f"{_size(self.source)}"
        )

    def check(self, allowed: int) -> None:
        """Raises ValueError where the plan does not fit into `allowed` bytes of memory, or into the disk."""
        if self.memory > allowed:
            raise ValueError(
                f"memory={_size(allowed)} is too little: the plan takes {_size(self.memory)} ({self._parts()})"
            )
        there = next(parent for parent in self.folder.parents if parent.exists())
        written = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if self.disk > shutil.disk_usage(there).free + written:
            raise ValueError(f"{there} has too little space: the run writes up to {_size(self.disk)} there")


def plan(files, folder: Path) -> DiskPlan:
    """The plan for the `BlockFiles` of a model whose quantizer has chosen what is compressed. folder: of the run."""
    model, quantizer = files.model, files.quantizer
    swapped, calibration = quantizer.swapped, quantizer.quantization_config.calibration
    itemsize = model.dtype.itemsize
    largest = max((_bytes_of(files, block) for block in files.blocks), default=0)
    statistics = max((_statistics(files, swapped, block) for block in ("", *files.blocks)), default=0)
    tokens, hidden, kept = 0, getattr(model.config.get_text_config(), "hidden_size", 0), 2
    if swapped.calibrated:
        tokens = calibration.num_samples * calibration.sequence_length
        refines = any(getattr(own, "refine", False) for own in swapped.calibrated.values())
        kept += 2 * refines
        widest = max(weight.out_features for weight, _ in swapped.weights.values())
        rows = calibration.batch_size * calibration.sequence_length
        statistics += 4 * rows * (_STATES * hidden + _OUTPUTS * widest)
        # refinement tunes float32 copies of a block: values, gradients and two moments
        statistics += 16 * largest // itemsize if refines else 0
    compressed = sum(
        round(w.format.bits_per_weight(w.out_features, w.in_features, model.dtype) / 8 * _count(w))
        for w, _ in swapped.weights.values()
    )
    whole = sum(files.size(part) for part in ("", *files.blocks))
    dense = sum(_count(w) for w, _ in swapped.weights.values()) * itemsize
    watched = _EXAMPLE * hidden * itemsize * len(files.blocks) if swapped.calibrated else 0
    return DiskPlan(
        process=private_bytes() + _LATER + _NAMED * len(files.stored) + watched,
        blocks=2 * largest,
        outside=_bytes_of(files, "") + largest,
        statistics=statistics,
        states=kept * tokens * hidden * itemsize,
        checkpoint=max(whole - dense, 0) + compressed,
        source=whole,
        folder=folder,
    )


def _statistics(files, swapped, part: str) -> int:
    """Bytes of the statistics of a part, and of the search for the codes of its largest weight."""
    squares, largest = {}, 0
    for name, (weight, _) in swapped.weights.items():
        module = name.rpartition(".")[0]
        config = swapped.calibrated.get(module)
        if config is None or files.part_of(name) != part:
            continue
        rows, columns = weight.out_features, weight.in_features
        square = 4 * columns * columns if "hessian" in config.observed() else 0
        if weight.experts is None:  # layers of one parent mostly read one tensor; the last one reads another
            parent = module.rpartition(".")[0]
            squares.setdefault((parent, columns), []).append(square)
        largest = max(largest, (_SQUARES + (weight.experts is not None)) * square + 4 * _MATRICES * rows * columns)
    return sum(sum(sorted(same)[-2:]) for same in squares.values()) + largest


def _bytes_of(files, part: str) -> int:
    """Bytes of a part in memory before it is compressed."""
    declared = sum(tensor.nbytes for tensor in files.declared(part).values())
    return max(declared, files.size(part))


def _count(weight) -> int:
    return (weight.experts or 1) * weight.out_features * weight.in_features


def _size(count: int) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.1f} {name}"
