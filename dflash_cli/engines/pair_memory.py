"""The memory of serving a pair with this tool's runtime, in lines for a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_cli.terminal.shown import Shown
from dflash_runtime.device.capacity.memory_parts import LayerKV, MemoryParts
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_runtime.checkpoint.pair import DraftLike, TargetSource
    from dflash_runtime.engine_config import EngineConfig

PARTS = {
    "target": "weights of the target",
    "draft": "weights of the draft, without the target's embedding and head",
    "kv_pages": "KV pages of both models",
    "states": "recurrent states",
    "snapshots": "snapshots of recurrent states for the prefix cache",
    "steps": "working memory and CUDA graphs of steps, at most",
}
"""Part of the memory -> its words."""

OWN_CACHE = {"states": "attention scores of the target, which keeps its own cache"}
"""Words for a target that keeps its own cache."""

OTHER_ENGINES = "for this tool's runtime; vLLM and SGLang divide GPU memory by rules of their own, not estimated here"


@dataclass(frozen=True, slots=True, repr=False)
class PairMemory(Shown):
    """The memory of a pair. Its document is `parts`."""

    parts: MemoryParts

    @property
    def document(self) -> MemoryParts:
        """The document that --json prints."""
        return self.parts

    def summary(self) -> list[str]:
        """One labelled line for each part."""
        return [f"{label:11} {text}" for label, text in _rows(self.parts)]


def measure_pair(
    draft: "DraftLike",
    target: "TargetSource",
    config: "EngineConfig",
    *,
    names: tuple[str, str],
    gpu_bytes: int | None = None,
) -> PairMemory:
    """Estimate the memory of a pair on a GPU, from headers. `names` are the references of draft and target.

    Raises:
        UsageError: `max_model_len` is above the pair's positions. `plan_pair` raises further errors.
    """
    from dflash_runtime.scheduling.limits import resolve_model_len

    if target.facts.max_position_embeddings is not None:  # before torch is imported
        resolve_model_len(config, target.facts.max_position_embeddings, draft.config)
    from dflash_runtime.device.capacity.memory_estimate import estimate_memory, plan_for_gpu

    plan = plan_for_gpu(target, draft, config)
    return PairMemory(estimate_memory(plan, draft=names[0], target=names[1], gpu_bytes=gpu_bytes))


def _rows(found: MemoryParts) -> Iterator[tuple[str, str]]:
    length = f"{found.max_model_len:,} tokens"
    yield "pair", f"{found.draft} with {found.target}: {found.dtype}, KV in {found.kv_dtype}"
    yield "estimate", OTHER_ENGINES
    lookahead = f"lookahead of {plural(found.num_lookahead_tokens, 'token')} included"
    yield "run", f"{plural(found.max_num_requests, 'request')} of {length}, {lookahead}"
    for item in found.layers:
        yield "KV", _layers_in_words(item)
    yield "KV", f"{found.token_bytes:,} bytes per token, {found.num_pages:,} pages of {found.page_size} tokens"
    if found.recurrent is not None:
        own = found.recurrent
        layers = f"{plural(own.num_layers, 'recurrent layer')}: {own.request_bytes:,} bytes per request"
        yield "states", f"{layers}, up to {own.num_snapshots} snapshots of {own.snapshot_bytes:,} bytes"
    yield "per request", f"{in_units(found.request_bytes)} at full length"
    words = PARTS | OWN_CACHE if found.not_counted else PARTS
    for name, size in found.parts.items():
        if size:
            yield "part", f"{in_units(size):>10}  {words[name]}"
    yield "total", f"{in_units(found.total_bytes):>10}  without the CUDA context and other programs"
    if found.not_counted:
        yield "not counted", f"{', '.join(found.not_counted)}: measured after loading"
    if found.gpu is not None:
        usable = f"{in_units(found.gpu.usable_bytes)} of {in_units(found.gpu.gpu_bytes)} GPU memory"
        yield "fits", f"{plural(found.gpu.most_requests, 'request')} of {length} at once, in {usable}"


def _layers_in_words(item: LayerKV) -> str:
    layers = plural(item.num_layers, "layer")
    kind = "full attention" if item.window is None else f"window {item.window}, but pages keep every token"
    return f"{item.model}, {layers}: {kind}, {item.token_bytes:,} bytes per token"


def in_units(num_bytes: int) -> str:
    """A size in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
