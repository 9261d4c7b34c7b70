"""Refusals of tensor parallelism, before the processes of other ranks start."""

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.device.settings import device_of
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.models.target import find_target_runtime
from dflash_runtime.models.target_shares import OPTION, share_config
from dflash_runtime.ranks.rank_group import Ranks


def check_split(target: TargetSource, config: EngineConfig, ranks: Ranks | None = None) -> None:
    """Refuse a target or settings that do not run on several ranks. `ranks` have joined to load the pair.

    Raises:
        UnsupportedError: transformers' code runs the target, the ranks do not divide it, or GPUs are missing.
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
    if runtime != "native":
        raise UnsupportedError(
            f"{OPTION} {size} splits targets of native families, and transformers' code runs this {found.model_type}",
            id="hosted-target-on-ranks", path=target.checkpoint.path, field="tensor_parallel_size", found=size,
            hint=f"--device-map auto instead of {OPTION} spreads it over the GPUs",
        )  # fmt: skip
    if config.prefix_store is not None:
        raise UsageError(
            f"--prefix-store does not go with {OPTION} {size}: each GPU has the KV of its own heads",
            id="prefix-store-on-ranks", field="prefix_store", found=config.prefix_store,
            hint=f"leave out --prefix-store or {OPTION}",
        )  # fmt: skip
    share_config(found, size)
    device_of(config.device, 0, size)
