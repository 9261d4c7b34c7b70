"""Helpers for the futures of connectors."""

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from dflash_runtime.errors import DFlashError, PeerUnreachable
from dflash_runtime.kv_transfer.handoff import Handoff

Given = TypeVar("Given")
Got = TypeVar("Got")


def begun(begin: "Callable[[Given], Future[Got]]", what: Given) -> "Future[Got]":
    """The future that `begin(what)` returns, or a failed future with the error that it raises."""
    try:
        return begin(what)
    except Exception as error:
        failed: Future[Got] = Future()
        failed.set_exception(error)
        return failed


def then(
    source: "Future[Handoff]", prepare: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> "Future[Handoff]":
    """A future of the hand-off of `source`, with `prepare` applied to its tensors in the thread that ends `source`."""
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
    """The result of a future. Any error that is not a DFlashError becomes one, so that it has an exit code.

    Raises:
        DFlashError: the connector's own error.
        PeerUnreachable: the connector raised another error, or the future was cancelled.
    """
    try:
        return future.result()
    except DFlashError:
        raise
    except (Exception, CancelledError) as error:
        raise PeerUnreachable(f"{type(error).__name__}: {error}", id="connector-failed") from error


def settle(future: "Future[Any]", outcome: Any) -> None:
    """End a future with a result, or with an error if `outcome` is one. An ended future stays unchanged."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
