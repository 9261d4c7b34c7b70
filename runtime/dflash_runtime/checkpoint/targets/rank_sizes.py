"""Whether a number of ranks can split a target, from its config. Needs no torch."""

from collections.abc import Iterator

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs, native_config
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.target_config import TargetConfig

OPTION = "--tensor-parallel"

MOST_NAMED = 8
"""The largest number of ranks that a hint names."""

MXFP4 = "mxfp4"


def refuse_split(target: TargetSource, found: TargetConfig | None, config: EngineConfig, *, is_native: bool) -> None:
    """Refuse a target or settings that do not run on several ranks. `found` is the target's config, if it is known.

    Raises:
        UnsupportedError: transformers' code runs the target, or the ranks do not divide it.
        UsageError: a prefix store.
    """
    size = config.tensor_parallel_size
    if not is_native:
        kind = target.facts.model_type if found is None else found.model_type
        raise UnsupportedError(
            f"{OPTION} {size} splits targets of native families, and transformers' code runs this {kind}",
            id="hosted-target-on-ranks", path=target.checkpoint.path, field="tensor_parallel_size", found=size,
            hint=f"--device-map auto instead of {OPTION} spreads it over the GPUs",
        )  # fmt: skip
    if config.prefix_store is not None:
        raise UsageError(
            f"--prefix-store does not go with {OPTION} {size}: each GPU has the KV of its own heads",
            id="prefix-store-on-ranks", field="prefix_store", found=config.prefix_store,
            hint=f"leave out --prefix-store or {OPTION}",
        )  # fmt: skip
    if found is not None:
        check_sizes(found, size)


def split_refusal(target: TargetSource, size: int) -> UnsupportedError | None:
    """Return the refusal of a target on `size` ranks, as `refuse_split` gives it; None if its config shows none."""
    is_native = how_it_runs(target).is_fast
    found = native_config(target) if is_native else None
    try:
        refuse_split(target, found, EngineConfig(tensor_parallel_size=size), is_native=is_native)
    except UnsupportedError as error:
        return error
    return None


def check_sizes(config: TargetConfig, size: int) -> None:
    """Refuse a number of ranks that does not divide the target.

    Raises:
        UnsupportedError: names the first size that is not a multiple, and the numbers of ranks that fit.
    """
    sizes, counts = _split_sizes(config), {count for count, _ in config.kv_shapes}

    def misfits(size: int) -> Iterator[tuple[str, int]]:
        yield from ((name, value) for name, value in sizes.items() if value % size)
        yield from (("num_key_value_heads", count) for count in counts if count % size and size % count)

    for name, value in misfits(size):
        fitting = [str(other) for other in range(2, MOST_NAMED + 1) if not any(misfits(other))]
        raise UnsupportedError(
            id="not-divided-by-ranks", field=name, found=value, expected=f"a multiple of {OPTION} {size}",
            hint=f"{OPTION} {' or '.join(fitting)} fits this target" if fitting else f"leave out {OPTION}",
        )  # fmt: skip


def _split_sizes(config: TargetConfig) -> dict[str, int]:
    """The sizes that ranks divide, by their keys in a config."""
    own, experts = config.recurrence, config.experts
    sizes = {"num_attention_heads": config.num_heads}
    if experts is None or config.gemma is not None or len(experts.layers) < config.num_layers:
        sizes["intermediate_size"] = config.intermediate_size  # otherwise no layer has this width
    if experts is not None:
        if config.quantization != MXFP4:
            sizes["moe_intermediate_size"] = experts.intermediate_size
        if experts.shared_size is not None:
            sizes["shared_expert_intermediate_size"] = experts.shared_size
    if own is not None:
        sizes |= {"linear_num_key_heads": own.num_key_heads, "linear_num_value_heads": own.num_value_heads}
    return sizes
