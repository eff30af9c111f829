"""Where weights and hidden states are while a model is compressed block by block: here in memory; see
`hf_efficient.calibration.on_disk`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_efficient.calibration.blocks import Chain
from hf_efficient.calibration.resume import Progress, fingerprint
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.files import alone_in
from hf_efficient.tensor_files import checksum


class InMemory:
    """All weights of `model` are in memory, and all hidden states on the CPU.

    Attributes:
        recomputes: whether blocks that are compressed can be run again.
    """

    recomputes = True

    def __init__(self, model: nn.Module):
        self.model = model

    def check(self) -> None:
        """Raises ValueError where weights are not where they are needed."""
        elsewhere = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        if elsewhere:
            raise ValueError(
                f"calibration needs every weight in memory, but {len(elsewhere)} are offloaded, for example "
                f"{elsewhere[:3]}: load without offloading to disk or cpu; CalibrationConfig(device=...) brings one "
                "block at a time to a device"
            )

    def check_chains(self, chains: list[Chain], outside: list[str]) -> None:
        """Raises ValueError where blocks cannot be brought to memory one at a time."""

    @property
    def device(self) -> torch.device:
        """Where blocks are computed by default."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return self.model.device if accelerator is None else accelerator

    @contextmanager
    def running(self):
        """Inside, the model's own forward can run."""
        yield

    @contextmanager
    def block(self, name: str, device):
        """Inside, the block `name` is on `device`; afterwards it is back where it was."""
        module = self.model.get_submodule(name)
        home = next((p.device for p in module.parameters()), torch.device(device))
        if home == torch.device(device):
            yield
            return
        module.to(device)
        try:
            yield
        finally:
            module.to(home)

    def keep(self, label: str, batch: int, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of a batch on the CPU. label: says which, for a residence that names files."""
        return states.cpu()

    keep_rows = None  # see `collect`: in memory, where they are

    def compressed(self, name: str) -> None:
        """Called inside `block` when the block `name` is compressed and will not be run again."""

    @contextmanager
    def alone(self, calibration: CalibrationConfig) -> Iterator[None]:
        """Inside, no other process is inside with this `checkpoint_dir`. Raises ValueError where one is."""
        if not calibration.checkpoint_dir:
            yield
            return
        with alone_in(Path(calibration.checkpoint_dir).expanduser()):
            yield

    def progress(
        self, calibration: CalibrationConfig, configs: dict[str, Any], batches: list[dict], steps: tuple
    ) -> Progress | None:
        """The folder of this run's progress, where there is to be one."""
        if not calibration.checkpoint_dir:
            return None
        samples = [torch.tensor([checksum(parameter)]) for parameter in self.model.parameters()]
        folder = Path(calibration.checkpoint_dir).expanduser()
        return Progress(folder, fingerprint(self.model, configs, batches, steps, samples))
