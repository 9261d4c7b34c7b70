"""Options of the engine, as bases of request classes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dflash_cli.terminal.options import DeviceOptions, values_of
from dflash_cli.terminal.parameters import ENGINE, SIZE, Option, parse_size
from dflash_cli.terminal.requests import Request, parameters_of
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_runtime.engine_config import EngineConfig

CONFIG_FIELDS = {
    "concurrency": "max_num_requests",
    "kv_memory": "kv_memory_bytes",
    "prefix_store_size": "prefix_store_bytes",
    "snapshot_memory": "snapshot_memory_bytes",
    "num_speculative_tokens": "num_draft_tokens",
    "tensor_parallel": "tensor_parallel_size",
    "tree": "num_tree_nodes",
    "tree_candidates": "tree_candidates",
}
"""Option -> the field of the engine's config that it sets, if they have different names."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(DeviceOptions):
    """How the engine runs."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float64"],
        Option(group=ENGINE, help="Number format of the models; auto is bfloat16 on a GPU and float32 on a CPU."),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        Option(
            group=ENGINE,
            help="Number format of KV pages. fp8: 8-bit floats (e4m3), with scales of the target's checkpoint if it "
            "has some; auto: the format of the models.",
        ),
    ] = "auto"  # fmt: skip
    kernels: Annotated[
        Literal["auto", "triton", "reference"],
        Option(group=ENGINE, help="Kernels to run; auto is triton on a GPU and reference on a CPU."),
    ] = "auto"
    recurrent_rows: Annotated[
        Literal["auto", "exact", "at-once"],
        Option(
            group=ENGINE,
            help="How recurrent layers run the rows of a block. exact: one after another, bitwise equal to decoding "
            "row by row. at-once: all rows in one product, so sums may round differently. auto: exact for at most 4 "
            "requests at a time.",
        ),
    ] = "auto"  # fmt: skip
    module_swaps: Annotated[
        bool,
        Option(
            off="--no-module-swaps", group=ENGINE,
            help="Compute modules of a hosted target (--target-runtime transformers) with this tool's kernels, where "
            "both agree on random inputs at start.",
        ),
    ] = True  # fmt: skip
    max_model_len: Annotated[
        int | None,
        Option(
            min=2, group=ENGINE, is_setting=False,
            help="Most tokens of a prompt and its answer together. Default: the most that the pair allows.",
        ),
    ] = None  # fmt: skip
    max_batched_tokens: Annotated[
        int | None,
        Option(
            min=1, group=ENGINE, is_setting=False,
            help="Most tokens in one step, prefill and decode together. Default: 8192 on a GPU, 2048 on a CPU.",
        ),
    ] = None  # fmt: skip
    page_size: Annotated[int, Option(min=1, group=ENGINE, is_setting=False, help="Tokens per KV page.")] = 16
    kv_memory: Annotated[
        int | None,
        Option(
            metavar="SIZE", parse=parse_size, expected=SIZE, min=1, group=ENGINE, is_setting=False,
            help="Memory for the KV cache, such as 512M or 20G. Default: the free memory.",
        ),
    ] = None  # fmt: skip
    gpu_memory_utilization: Annotated[
        float, Option(above=0, max=1, group=ENGINE, is_setting=False, help="Fraction of the GPU memory to use.")
    ] = 0.9
    prefix_cache: Annotated[
        bool,
        Option(
            off="--no-prefix-cache", group=ENGINE, is_setting=False,
            help="Reuse the KV of prompts that begin with the same tokens.",
        ),
    ] = True  # fmt: skip
    snapshot_memory: Annotated[
        int | None,
        Option(
            metavar="SIZE", parse=parse_size, expected=SIZE, min=1, group=ENGINE, is_setting=False,
            help="Memory for recurrent states that the prefix cache of a hybrid target keeps. Default: 8 states per "
            "concurrent request, at most a quarter of the KV memory.",
        ),
    ] = None  # fmt: skip
    prefix_store: Annotated[
        str | None,
        Option(
            metavar="DIR", group=ENGINE, is_setting=False,
            help="Keep the KV of prompts in DIR for later runs of the same pair.",
        ),
    ] = None  # fmt: skip
    prefix_store_size: Annotated[
        int | None,
        Option(
            metavar="SIZE", parse=parse_size, expected=SIZE, min=1, group=ENGINE, is_setting=False,
            help="Remove the least recently used prompts of the prefix store above this size. Default: 64G.",
        ),
    ] = None  # fmt: skip
    scheduling: Annotated[
        Literal["async", "sync"],
        Option(
            group=ENGINE, is_setting=False,
            help="Launch a step before the results of the last step are read (async), or wait for them (sync).",
        ),
    ] = "async"  # fmt: skip
    graphs: Annotated[
        bool,
        Option(off="--no-graphs", group=ENGINE, is_setting=False, help="Capture steps as CUDA graphs."),
    ] = True

    def check(self) -> None:
        super().check()
        store = self.prefix_store
        if store is not None and os.path.lexists(store) and not Path(store).is_dir():
            raise UsageError(
                "is a file, expected a folder", id="prefix-store-is-a-file", path=store,
                field="--prefix-store",
            )  # fmt: skip

    def engine_config(self, **own: Any) -> "EngineConfig":
        """The runtime's config. `own` are the fields that a verb decides.

        `threads` is set for the whole process.
        """
        from dflash_runtime.engine_config import EngineConfig

        given = values_of(self, EngineOptions)
        del given["threads"]
        return EngineConfig(**{CONFIG_FIELDS.get(name, name): value for name, value in given.items()}, **own)


def options_of_config() -> dict[str, str]:
    """Field of the engine's config -> the option that sets it."""
    names = [*(item.name for item in parameters_of(EngineOptions)), *CONFIG_FIELDS]
    return {CONFIG_FIELDS.get(name, name): f"--{name.replace('_', '-')}" for name in names}


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions(Request):
    """How many GPUs share the target."""

    tensor_parallel: Annotated[
        int,
        Option(
            min=1, group=ENGINE,
            help="Split the target over N GPUs of this machine. N must divide the heads of a native target.",
        ),
    ] = 1  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConcurrencyOptions(Request):
    """How many requests run at once."""

    concurrency: Annotated[
        int, Option(min=1, group=ENGINE, is_setting=False, help="Run at most N requests at once.")
    ] = 16
