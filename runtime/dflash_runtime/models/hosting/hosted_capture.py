"""Whether the forward of a hosted target can be captured as a CUDA graph, and why not.

On every device one forward runs under `refusing_host_reads`. On a GPU the forward is also captured and replayed with
other rows, and must give the result of an uncaptured forward.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_runtime.models.agreement import agree
from dflash_runtime.models.hosting.host_reads import find_host_read
from dflash_runtime.models.hosting.hosted_loading import first_line
from dflash_runtime.models.hosting.stream_capture import capture_stream, no_collection
from dflash_runtime.models.placement import as_current
from dflash_runtime.notices import Notice

Run = Callable[[Tensor, Tensor], Tensor]
"""A forward of token ids and positions [T] -> hidden states [T, hidden]."""

NUM_ROWS = (4, 384)
"""Rows of the captures in the trial. Models with experts run few and many rows through different kernels."""


class Rows(NamedTuple):
    """Inputs of a forward."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]


def why_not_captured(run: Run, vocab_size: int, num_positions: int, device: torch.device) -> Notice | None:
    """Try a forward out -> the reason why it cannot be captured, or None.

    The notice's id is `target-reads-on-host` with the operation as its field, `target-capture-fails` or
    `target-capture-differs`.
    """
    for num_rows in NUM_ROWS:
        first, second = (_rows(num_rows, start, vocab_size, num_positions, device) for start in (1, 5))
        found = find_host_read(lambda rows=first: run(*rows))  # type: ignore[misc]
        if found is not None:
            text = f"its code reads values on the host: {found.operation} in {found.place}"
            return Notice(text, id="target-reads-on-host", field=found.operation)
        reason = _try_capture(run, first, second, device) if device.type == "cuda" else None
        if reason is not None:
            return reason
    return None


def _rows(num_rows: int, start: int, vocab_size: int, num_positions: int, device: torch.device) -> Rows:
    numbers = torch.arange(start, start + num_rows, device=device)
    return Rows(numbers % vocab_size, numbers * 7 % num_positions)


def _try_capture(run: Run, first: Rows, second: Rows, device: torch.device) -> Notice | None:
    """Capture a forward of `first`, and replay it with `second` -> the reason why this fails, or None."""
    given = Rows(*(item.clone() for item in first))
    with as_current(device):
        try:
            graph, replayed = _capture(run, given, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # code of a model may raise any type
            reason = first_line(error)
            return Notice(
                f"its code fails in a capture: {reason}", id="target-capture-fails", field=type(error).__name__
            )
        for buffer, rows in zip(given, second, strict=True):
            buffer.copy_(rows)
        graph.replay()
        is_same = agree(replayed, run(*second))
    if is_same:
        return None
    return Notice("a replay of its captured forward gives another result", id="target-capture-differs")


def _capture(run: Run, rows: Rows, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Run a forward, then capture it -> its graph and its hidden states."""
    stream, graph = capture_stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*rows)
    torch.cuda.current_stream().wait_stream(stream)
    recording = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    # A failed capture may leave its stream as the current stream.
    with no_collection(), torch.cuda.stream(torch.cuda.current_stream()), recording:
        hidden = run(*rows)
    return graph, hidden
