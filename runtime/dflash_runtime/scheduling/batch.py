"""The batch of one step, and its output. Host only."""

from dataclasses import dataclass, field

from dflash_runtime.scheduling.request import Request, SnapshotAt


@dataclass(frozen=True, slots=True)
class PageAddition:
    """Pages that a request gains, written into its row of the page table from `column` on."""

    row: int
    column: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions `[start, end)` of a request to prefill. After its last chunk the request decodes.

    Only the last chunk of a resumed request can be empty. The last token of a prompt always runs. `keeps` are the
    snapshots to take at positions in `(start, end]`, in order.
    """

    request: Request
    start: int
    end: int
    is_last: bool
    generation: int
    keeps: tuple[SnapshotAt, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: requests admitted, pages added, chunks to prefill, requests to decode, and hand-offs to load.

    Chunks and blocks share one forward. `longest` is an upper bound on the true KV length of every decoding request.
    The step verifies the first `verify_width` rows of each block. With width 1 it drafts nothing. With a
    `mean_width` below that, requests get as many rows on average. `looked_up` has the draft tokens of each decoding
    request, if a lookup drafts. With `tree_rows` the step verifies trees of this many rows instead, which give paths of
    at most `verify_width` rows.
    """

    admitted: tuple[Request, ...] = ()
    additions: tuple[PageAddition, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[Request, ...] = ()
    longest: int = 0
    verify_width: int = 1
    mean_width: int = 0
    loads: tuple[Request, ...] = ()
    looked_up: tuple[tuple[int, ...], ...] = ()
    tree_rows: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.decode or self.admitted)

    @property
    def num_prompt_rows(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Rows that go through the target: prompt rows, and the verified rows of blocks or trees."""
        return len(self.decode) * (self.tree_rows or self.mean_width or self.verify_width) + self.num_prompt_rows


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of one step for one request: the committed tokens, and the verified draft tokens if it drafted.

    `confidences` has the draft's prediction for each draft token; see `DraftStep`. With `is_finite` false, the logits
    after the last committed token were not finite, and the request must end.
    """

    token_ids: list[int]
    draft_ids: list[int] = field(default_factory=list)
    num_accepted: int | None = None
    is_done: bool = False
    generation: int = 0
    is_finite: bool = True
    confidences: tuple[float | None, ...] = ()
