"""Futures of what connectors begin: refused at once, with tensors that are prepared, and what came of them."""

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from torch import Tensor

from dflash_runtime.errors import DFlashError, PeerUnreachable
from dflash_runtime.kv_transfer.handoff import Handoff

Given = TypeVar("Given")
Got = TypeVar("Got")


def begun(begin: "Callable[[Given], Future[Got]]", what: Given) -> "Future[Got]":
    """What a connector begins; where it refuses to, a future that says why."""
    try:
        return begin(what)
    except Exception as error:
        failed: Future[Got] = Future()
        failed.set_exception(error)
        return failed


def then(
    source: "Future[Handoff]", prepare: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> "Future[Handoff]":
    """What comes of a future with its tensors prepared, in the thread that it came in."""
    prepared: Future[Handoff] = Future()

    def finish(done: "Future[Handoff]") -> None:
        try:
            handoff = done.result()
            prepared.set_result(handoff.with_tensors(prepare(handoff.tensors)))
        except BaseException as error:
            prepared.set_exception(error)

    source.add_done_callback(finish)
    return prepared


def result(future: "Future[Got]") -> Got:
    """What came of a future; whatever a connector raises is an error with an exit code.

    Raises:
        DFlashError: the connector's own, or one that names what it raised.
    """
    try:
        return future.result()
    except DFlashError:
        raise
    except (Exception, CancelledError) as error:
        raise PeerUnreachable(f"{type(error).__name__}: {error}") from error
