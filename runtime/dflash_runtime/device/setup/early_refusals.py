"""Refusals of a pair that follow from its configs and headers. Needs no torch, so a user reads them at once.

`load_pair` applies the same rules again, for the device and the kernels that it has found.
"""

from shlex import quote

from dflash_runtime.checkpoint.draft_tensors import owned_tensors
from dflash_runtime.checkpoint.pair import COPY_TARGET, DraftLike, TargetSource
from dflash_runtime.checkpoint.targets.rank_sizes import refuse_split
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs, release_note
from dflash_runtime.device.setup.attention import BACKENDS, check_capability, refuse_without_pages
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, hinting, naming_file
from dflash_runtime.models.target import check_hosted_tensors, family_config, target_shapes
from dflash_runtime.scheduling.limits import resolve_num_drafts
from dflash_runtime.target_config import TargetConfig

DTYPES = ("float32", "bfloat16")
"""The dtypes that `--dtype auto` may mean."""


def refuse_early(target: TargetSource, draft: DraftLike | None, config: EngineConfig) -> None:
    """Refuse a pair that does not run on any device with this config. Without a draft, a target alone.

    How transformers runs a target is recorded for one of its releases. With another release only `load_pair` knows.

    Raises:
        UnsupportedError: no code runs the target, or no kernels run it.
        CheckpointError: the target's config is malformed, or files of its weights are absent, cut off or malformed.
        TensorMismatch: a target of a native family lacks tensors, or has some of another shape.
        UsageError: a setting that does not go with tensor parallelism.
        UnsupportedError, TensorMismatch: see `refuse_draft`.
    """
    if draft is not None and resolve_num_drafts(config, draft.config):
        refuse_draft(draft, config, num_tree_nodes=config.num_tree_nodes or 0)
    answer = how_it_runs(target, config.wanted_runtime)
    is_known = answer.is_fast or config.wanted_runtime == "native" or release_note() is None
    if answer.refusal is not None and is_known:
        raise answer.refusal
    with hinting(COPY_TARGET):
        target.checkpoint.check_headers()
        if answer.is_fast:
            target_shapes(target)
        elif how_it_runs(target, "native").is_fast:
            check_hosted_tensors(target)
    if not is_known:
        return
    found = family_config(target) if answer.is_fast else None
    if config.tensor_parallel_size > 1:
        with naming_file(target.checkpoint.config_path):
            refuse_split(target, found, config, is_native=answer.is_fast)
    if answer.runtime == "transformers-cache":
        refuse_without_pages(
            target.facts.model_type, has_fp8_pages=config.kv_dtype == "fp8", num_tree_nodes=config.num_tree_nodes or 0
        )
    _check_kernels(found, None, config, config.num_tree_nodes or 0)


def refuse_draft(draft: DraftLike, config: EngineConfig, *, num_tree_nodes: int) -> None:
    """Refuse a draft that does not run on any device with this config.

    Raises:
        UnsupportedError: no kernels run the draft, or a reason of `owned_tensors`.
        TensorMismatch: see `owned_tensors`.
    """
    with hinting(f"dflash validate {quote(str(draft.checkpoint.path))} lists the faults of the draft"):
        owned_tensors(draft)
    _check_kernels(None, draft.config, config, num_tree_nodes)


def _check_kernels(
    target: TargetConfig | None, draft: DraftConfig | None, config: EngineConfig, num_tree_nodes: int
) -> None:
    """Refuse models that no kernels run, of the kernels and dtypes that the config allows."""
    refusal = None
    for name in BACKENDS if config.kernels == "auto" else (config.kernels,):
        for dtype in DTYPES if config.dtype == "auto" else (config.dtype,):
            try:
                check_capability(
                    name, target, draft, dtype, has_fp8_pages=config.kv_dtype == "fp8", num_tree_nodes=num_tree_nodes,
                    recurrent_rows=config.recurrent_rows,
                )  # fmt: skip
            except UnsupportedError as error:
                refusal = refusal or error
            else:
                return
    assert refusal is not None
    raise refusal
