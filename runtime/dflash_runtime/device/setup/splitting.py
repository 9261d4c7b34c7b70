"""Refusals of tensor parallelism, before the processes of other ranks start."""

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.rank_sizes import refuse_split
from dflash_runtime.device.setup.settings import device_of
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_runtime.ranks.rank_group import Ranks


def check_split(target: TargetSource, config: EngineConfig, ranks: Ranks | None = None) -> None:
    """Refuse a target or settings that do not run on several ranks. `ranks` have joined to load the pair.

    Raises:
        UnsupportedError: see `refuse_split`, or GPUs are missing.
        UsageError: a prefix store, one device for several ranks, or another number of ranks than the config's.
    """
    size = config.tensor_parallel_size
    if ranks is not None and size != ranks.size:
        raise UsageError(
            id="ranks-not-joined", field="tensor_parallel_size", found=size,
            expected=f"{ranks.size}, the ranks that load the pair",
            hint="LLM(target, draft, config) starts a process for each GPU",
        )  # fmt: skip
    if size == 1:
        return
    runtime, found = find_target_runtime(target, config.wanted_runtime)
    refuse_split(target, found, config, is_native=runtime == "native")
    device_of(config.device, 0, size)
