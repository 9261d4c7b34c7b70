"""Where and how models run: the settings that every model is built with."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from dflash_kernels.suite import Kernels


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the modules of a hosted target lie: by name, or as accelerate chooses within what devices may take.

    Devices are numbers of GPUs, `cpu`, or `disk`, which is read in every forward.
    """

    modules: Mapping[str, int | str] | None = None
    max_bytes: Mapping[int | str, int] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, the dtype of the run, the kernels, and the positions that rope tables cover, `[0, num_positions)`.

    With `spread` a target's weights may lie elsewhere; its KV, and whatever it gives, are on the device.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    num_positions: int
    spread: Spread | None = None

    @property
    def dtype_name(self) -> str:
        """As configs write it: `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one of this thread, which is where Triton launches and graphs are captured."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
