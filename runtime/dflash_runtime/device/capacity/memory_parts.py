"""The parts of the memory of a serving run, as a document. Needs no torch; `memory_estimate.py` computes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """KV of the layers of one model with the same attention. Pages keep every token, also behind a window."""

    model: Literal["target", "draft"]
    window: Annotated[int | None, "null for full attention"]
    num_layers: int
    token_bytes: Annotated[int, "bytes per token over these layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMemory:
    """Memory of the recurrent layers of a hybrid target."""

    num_layers: int
    request_bytes: Annotated[int, "states, records of latest rows and convolution columns of one request"]
    num_snapshots: Annotated[int, "states that the prefix cache keeps, if memory holds them"]
    snapshot_bytes: Annotated[int, "bytes of one snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """The requests that a GPU of a given size holds. The CUDA context and other programs are not counted."""

    gpu_bytes: int
    usable_bytes: Annotated[int, "the fraction of the GPU memory that the run may use"]
    most_requests: Annotated[int, "requests at full length that fit at once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Memory of a run with `max_num_requests` requests at full length.

    parts   target, draft: weights after loading. The draft borrows the target's embedding and head.
            kv_pages: pages of both models; each request is rounded up to whole pages, and page 0 is never used.
            states, snapshots: of recurrent layers, and of a target that keeps its own cache.
            steps: the most that working memory, page tables and CUDA graphs take.
    """

    KIND: ClassVar[str] = "inspect"

    draft: str
    target: str
    target_runtime: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_requests: int
    num_draft_tokens: int
    num_lookahead_tokens: Annotated[int, "tokens that a step may write past a request's KV, within max_model_len"]
    page_size: int
    num_pages: int
    layers: tuple[LayerKV, ...]
    token_bytes: Annotated[int, "KV bytes per token of both models"]
    request_bytes: Annotated[int, "bytes that one more request at full length takes in pages and states"]
    parts: Annotated[Mapping[str, int], "part of the memory -> its bytes"]
    total_bytes: int
    recurrent: RecurrentMemory | None
    gpu: GpuFit | None
    not_counted: Annotated[tuple[str, ...], "memory that is known only after loading"]
