"""Device, dtype and kernels of a run: the settings that every model is built with."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from dflash_kernels.suite import Kernels
from dflash_runtime.ranks.rank_group import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Spread:
    """The devices of a hosted target's modules.

    A device is the number of a GPU, `cpu`, or `disk`, which is read in every forward.

    modules     device of each module, by name; None lets accelerate choose
    max_bytes   the most bytes on each device if accelerate chooses
    """

    modules: Mapping[str, int | str] | None = None
    max_bytes: Mapping[int | str, int] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The device, dtype and kernels of a run. Rope tables cover positions `[0, num_positions)`.

    Pages hold keys and values in `kv_dtype`, or in `dtype` if it is None. With `spread` a target's weights may be on
    other devices. Its KV and its outputs are on `device`. With `has_swaps` our kernels compute modules of a hosted
    target where they agree with transformers' code. `ranks` share the target. With `has_graphs` forwards may be
    captured as CUDA graphs.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    num_positions: int
    spread: Spread | None = None
    has_swaps: bool = True
    ranks: Ranks = ALONE
    kv_dtype: torch.dtype | None = None
    has_graphs: bool = False

    @property
    def dtype_name(self) -> str:
        """The dtype as configs write it: `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_fp8_pages(self) -> bool:
        """Whether keys and values are stored in FP8."""
        return self.kv_dtype is not None

    @property
    def page_dtype(self) -> torch.dtype:
        """The dtype of keys and values in pages."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def page_dtype_name(self) -> str:
        """The dtype of keys and values in pages: `bfloat16` or `float8_e4m3fn`."""
        return str(self.page_dtype).removeprefix("torch.")


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread. Triton launches and CUDA graph captures use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
