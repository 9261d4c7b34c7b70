"""CUDA graphs of prefill pieces without a GPU: a tape of torch operations that is replayed into the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_runtime.device.graphs.piecewise_graphs import PiecewiseGraphs
from dflash_runtime.llm import LLM


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, [item for item in tree_leaves(found) if isinstance(item, Tensor)]))
        return found

    def play(self) -> None:
        """Replay like a CUDA graph: read inputs from the same memory, and write outputs to the same memory."""
        for func, args, kwargs, made in self.calls:
            found = [item for item in tree_leaves(func(*args, **kwargs)) if isinstance(item, Tensor)]
            for old, new in zip(made, found, strict=True):
                if old.data_ptr() != new.data_ptr():
                    # A boolean mask may select another number of rows, which a graph on a GPU could not do.
                    old.resize_(new.shape).copy_(new)


class TapeRecorder:
    """A `Recorder` for the CPU and the reference kernels. Recordings with numbers in `refused` run out of memory."""

    def __init__(self) -> None:
        self._tape: _Tape | None = None
        self.num_recordings = 0
        self.refused: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.num_recordings += 1
        if self.num_recordings - 1 in self.refused:
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    def begin(self) -> None:
        self._tape = _Tape()
        self._tape.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Callable[[], None]:
        assert self._tape is not None
        tape, self._tape = self._tape, None
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return tape.play


def with_tapes(llm: LLM) -> PiecewiseGraphs:
    """Make an LLM on the CPU run its prompts in captured pieces."""
    runner = llm.engine.runner
    runner.pieces = pieces = PiecewiseGraphs(
        runner.target, runner._taps, runner.kernels, runner.target_kv, runner.limits.max_rows, TapeRecorder()
    )
    return pieces
