"""The kinds of attention that each backend computes, and a check of a pair against them.

A backend is a set of kernels. Its entry in `BACKENDS` lists the attention that it computes. A checkpoint that needs
another kind is refused before it is loaded, and never run with another mask. The check looks at each layer by itself: a
causal draft runs on a backend that has only causal attention.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.target_config import TargetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The attention that a backend computes. `max_head_dim` None means any even head size: rope turns pairs.

    With `fp8_pages` it reads and writes keys and values in FP8. `max_recurrent_nodes` limits the drafted tokens of
    a tree if the target has recurrent layers; None means any number.
    """

    causal: bool = True
    non_causal: bool = True
    causal_window: bool = True
    non_causal_window: bool = True
    sinks: bool = True
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float64"})
    fp8_pages: bool = True
    max_head_dim: int | None = None
    max_recurrent_nodes: int | None = None

    def can(self, need: "Need") -> bool:
        """Whether the backend computes this attention."""
        if need.has_sinks and not self.sinks:
            return False
        if need.window is None:
            return self.causal if need.is_causal else self.non_causal
        return self.causal_window if need.is_causal else self.non_causal_window


@dataclass(frozen=True, slots=True)
class Need:
    """The attention that one layer needs."""

    layer: str
    is_causal: bool
    window: int | None
    has_sinks: bool = False

    def __str__(self) -> str:
        kind = "causal" if self.is_causal else "non-causal"
        window = f" over a window of {self.window}" if self.window is not None else ""
        return f"{kind} attention{window}{' with sinks' if self.has_sinks else ''}"


MAX_RECURRENT_NODES = 63
"""One less than `delta_blocks.MAX_TREE_ROWS`. Refusals that come early import no kernels."""

BACKENDS: Mapping[str, Capability] = {
    "reference": Capability(),
    "triton": Capability(
        dtypes=frozenset({"float32", "bfloat16"}), max_head_dim=512, max_recurrent_nodes=MAX_RECURRENT_NODES
    ),
}
"""Both backends compute every mask, window and sink, and store KV in FP8. GPUs below compute capability 8.9 convert FP8
in integers. Tiles of heads of 512 take up to 66 KiB of shared memory on a GPU that has 99 KiB, the least from compute
capability 8.0 on; wider heads were not tried."""


def check_capability(
    backend: str,
    target: TargetConfig | None,
    draft: DraftConfig | None,
    dtype: str,
    *,
    has_fp8_pages: bool = False,
    num_tree_nodes: int = 0,
    recurrent_rows: str = "auto",
    backends: Mapping[str, Capability] = BACKENDS,
) -> None:
    """Refuse a pair, or a draft alone, if a layer needs attention that the backend lacks.

    With `has_fp8_pages`, also refuse a backend without KV in FP8, and a target that keeps its own cache. With
    `num_tree_nodes` above 0, also refuse a pair that cannot verify trees of this size.

    Raises:
        UnsupportedError: names the layer, its attention, and the backends that compute it.
    """
    capability = backends[backend]
    if dtype not in capability.dtypes:
        raise UnsupportedError(
            id="dtype-not-computed", field="dtype", found=dtype,
            expected=f"{_listed(capability.dtypes)} for the {backend} backend{_others(dtype, backends)}",
        )  # fmt: skip
    if has_fp8_pages and not capability.fp8_pages:
        raise UnsupportedError(
            id="fp8-kv-not-computed", field="--kv-dtype", found="fp8", expected=f"auto for the {backend} backend"
        )
    if target is not None and target.own_cache is not None:
        refuse_without_pages(target.model_type, has_fp8_pages=has_fp8_pages, num_tree_nodes=num_tree_nodes)
    if num_tree_nodes:
        _check_tree_drafts(draft)
        _check_recurrent_trees(capability, target, num_tree_nodes, recurrent_rows)
    for need in _needs(target, draft):
        if not capability.can(need):
            able = [name for name, other in backends.items() if other.can(need)]
            hint = f"--kernels {able[0]}" if able else None
            raise UnsupportedError(
                f"{need.layer} needs {need}, which the {backend} backend does not compute",
                id="attention-not-computed", field=need.layer, found=str(need), hint=hint,
            )  # fmt: skip
    paged = (target if target is not None and target.own_cache is None else None, draft)
    sizes = {size for config in paged if config is not None for _, size in config.kv_shapes}
    most = capability.max_head_dim or max(sizes, default=0)
    for size in sorted(sizes):
        if size % 2 or size > most:
            able = [name for name, other in backends.items() if size <= (other.max_head_dim or size) and not size % 2]
            raise UnsupportedError(
                id="head-size-not-computed", field="head_dim", found=size,
                expected="an even number" if size % 2 else f"at most {most} for the {backend} backend",
                hint=f"--kernels {able[0]}" if able else None,
            )  # fmt: skip


def refuse_without_pages(model_type: str, *, has_fp8_pages: bool, num_tree_nodes: int) -> None:
    """Refuse KV in FP8 and trees for a target that keeps its own cache.

    Raises:
        UnsupportedError: names the target's type.
    """
    if has_fp8_pages:
        raise UnsupportedError(
            f"the {model_type} target keeps KV in its own cache, and dflash stores only KV pages in FP8",
            id="fp8-kv-without-pages", field="--kv-dtype", found="fp8", hint="--kv-dtype auto",
        )  # fmt: skip
    if num_tree_nodes:
        raise UnsupportedError(
            f"the {model_type} target keeps KV in its own cache, and dflash verifies trees only over KV pages",
            id="tree-without-pages", field="--tree", found=model_type, hint="leave out --tree",
        )  # fmt: skip


def _check_tree_drafts(draft: DraftConfig | None) -> None:
    """Refuse trees for a draft with a Markov head, whatever the backend.

    Raises:
        UnsupportedError: names the draft's family.
    """
    if draft is not None and draft.markov is not None:
        raise UnsupportedError(
            f"a {draft.family} draft chooses each token after all tokens before it, and --tree needs one distribution "
            "per position or per pair of tokens, as DFlash and DFlash 2 drafts give them",
            id="tree-of-markov-draft", field="--tree", found=draft.family, hint="leave out --tree",
        )  # fmt: skip


def _check_recurrent_trees(
    capability: Capability, target: TargetConfig | None, num_nodes: int, recurrent_rows: str
) -> None:
    """Refuse trees of recurrent layers that are wider than a backend's kernels, or that must be exact.

    Raises:
        UnsupportedError: names the layers.
    """
    most = capability.max_recurrent_nodes
    if target is None or target.recurrence is None or most is None:
        return
    if recurrent_rows == "exact":
        raise UnsupportedError(
            "Triton kernels run all rows of a tree at once, and sums may round differently",
            id="tree-rows-not-exact", field="--recurrent-rows", found="exact", expected="auto or at-once beside --tree",
            hint="leave out --recurrent-rows, or --kernels reference",
        )  # fmt: skip
    if num_nodes > most:
        raise UnsupportedError(
            f"the {target.model_type} target has recurrent layers, and their kernels hold the square of a tree's rows",
            id="tree-too-wide-for-recurrent-layers", field="--tree", found=num_nodes, expected=f"at most {most}",
            hint=f"--tree {most}",
        )  # fmt: skip


def _needs(target: TargetConfig | None, draft: DraftConfig | None) -> list[Need]:
    windows = target.windows if target is not None and target.own_cache is None else ()
    has_sinks = target is not None and target.has_sinks
    needs = [Need(f"target layer {layer}", True, window, has_sinks) for layer, window in enumerate(windows)]
    if draft is not None:
        needs += [
            Need(f"draft layer {layer}", is_causal, window, draft.has_sinks)
            for layer, (is_causal, window) in enumerate(zip(draft.causal, draft.windows, strict=True))
        ]
    return needs


def _others(dtype: str, backends: Mapping[str, Capability]) -> str:
    able = [name for name, capability in backends.items() if dtype in capability.dtypes]
    return f", or {dtype} for {_listed(able)}" if able else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
