"""The hand-offs of one call: KV that this engine loads for requests, and KV that it sends to another engine.

Between steps the engine advances hand-offs without waiting. Loaded rows are stored in pages in stream order, and the
next step switches the request on. After a request is sent, its pages are freed. Payloads that stay on the device are
limited (`device/capacity/payload_room.py`). If a load fails or takes too long, the request is prefilled here.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from dflash_runtime.device.capacity.memory import is_out_of_memory
from dflash_runtime.device.capacity.payload_room import PayloadRoom
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.storage.kv_pages import MovingPages
from dflash_runtime.errors import CapacityError, DFlashError, HandoffMismatch, PeerUnreachable
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_futures import begun, result, then
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import Handoff, check_handoff, check_tokens, find_problems
from dflash_runtime.kv_transfer.prefix_store import PrefixStore
from dflash_runtime.kv_transfer.transfer_counts import TransferCounts
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import FinishReason, Request
from dflash_runtime.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

TAKEN_SECONDS = 600.0
"""Seconds until a hand-off that nobody takes fails. The other side may have a long queue."""

LOOK_SECONDS = 0.001
"""Time between two looks at copies that must finish."""

WAIT_SECONDS = 0.02
"""The longest wait of an engine without other work. It checks time limits in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPlan:
    """The hand-offs of a call: their connector, and the key of each prompt.

    is_sending   every request ends after its first token and is sent. Otherwise every request continues from the
                 hand-off of its key, or is prefilled here if none arrives within `timeout` seconds.
    force        load a hand-off of another pair as far as it fits, to measure the effect on acceptance
    notes        one per prompt, sent with its hand-off
    store        load the first rows of prompts from this store, and save new prompts in it
    """

    connector: Connector
    keys: tuple[str, ...]
    is_sending: bool = False
    timeout: float = 60.0
    force: bool = False
    notes: tuple[Mapping[str, object], ...] = ()
    store: PrefixStore | None = None

    @classmethod
    def of_store(cls, store: PrefixStore, num_prompts: int) -> "HandoffPlan":
        """A plan that loads prompt rows from a store, and saves rows that the store does not have.

        It ends the lookups of earlier plans of the store.
        """
        return cls(connector=store, keys=store.begin_call(num_prompts), store=store)

    def apply(self, request: Request) -> Request:
        """The request with its keys and parameters for this plan."""
        key = self.keys[request.index]
        if self.is_sending:
            sent = request.params
            return replace(request, params=replace(sent, max_new_tokens=1), send_key=key, sent_params=sent)
        if self.store is not None:
            num_rows = self.store.find(key, request)
            return replace(request, load_key=key if num_rows else None, load_len=num_rows)
        return replace(request, load_key=key, is_private=self.force)


@dataclass(slots=True)
class Arriving:
    """A hand-off that is being loaded: `source` as the connector loads it, `future` with tensors in pinned memory."""

    source: "Future[Handoff]"
    future: "Future[Handoff]"
    deadline: float
    moving: MovingPages | None = None
    generation: int = 0  # the request's generation when `moving` began


@dataclass(slots=True)
class Leaving:
    """A request that is being sent: its pages are copied when there is room, then the connector sends the copy."""

    handoff: Handoff
    moving: MovingPages | None = None
    deadline: float = math.inf
    future: "Future[None] | None" = None

    @property
    def has_pages(self) -> bool:
        """Whether the hand-off needs KV: only if its request continues on the other side."""
        return self.handoff.finish_reason is None


@dataclass(slots=True)
class Keeping:
    """Pages `[first, end)` of a prompt that are copied to a store in portions, while the request holds them.

    `moving` is the portion that is being copied.
    """

    request: Request
    generation: int
    first: int
    end: int
    moving: MovingPages | None = None

    @property
    def is_held(self) -> bool:
        """Whether the request still holds the pages."""
        return self.request.row is not None and self.request.generation == self.generation


class Transfers:
    """The hand-offs of one call. `advance` makes progress and never waits."""

    def __init__(self, plan: HandoffPlan, fingerprint: Fingerprint, runner: Runner, scheduler: Scheduler) -> None:
        self.plan = plan
        self.counts = TransferCounts()
        self._fingerprint = fingerprint
        self._runner = runner
        self._scheduler = scheduler
        self._arriving: dict[Request, Arriving] = {}
        self._leaving: dict[Request, Leaving] = {}
        self._room = PayloadRoom.beside(runner, is_bounded=plan.is_sending and plan.connector.takes_device)
        self._keeping: list[Keeping] = []
        self._num_copied = 0  # pages that are being copied for the store
        self._kept: list[Future[None]] = []

    def begin(self, requests: Iterable[Request]) -> None:
        """Begin to load the hand-offs of requests. A preempted request continues the load that it has begun."""
        for request in requests:
            if request not in self._arriving:
                assert request.load_key is not None
                source = begun(self.plan.connector.load, request.load_key)
                # This runs in the connector's thread, because a copy to pinned memory takes longer than a step.
                future = then(source, self._runner.porter.pin)
                self._arriving[request] = Arriving(source, future, time.monotonic() + self.plan.timeout)

    def send(self, request: Request) -> None:
        """Begin to hand off a request right after its prefill."""
        leaving = Leaving(self._describe(request))
        if leaving.has_pages:
            try:
                state = self._runner.take_state(request)
            except Exception as error:  # such as no memory for a copy: the request has ended, so no step runs it again
                leaving.future = Future()
                leaving.future.set_exception(_not_copied(error))
            else:
                leaving.handoff = replace(leaving.handoff, tensors=state.tensors, state_values=state.values)
        self._leaving[request] = leaving
        self._advance_leaving_one(request)

    def keep(self, request: Request) -> None:
        """Begin to copy the pages of a prompt that the store does not have."""
        store = self.plan.store
        if store is None or request.row is None or request.is_private:
            return
        first, end = store.first_missing(request)
        if first < end:
            self._keeping.append(Keeping(request, request.generation, first, end))
            self._advance_keeping()

    def advance(self) -> list[Request]:
        """Make progress without waiting -> the requests that gained tokens or ended."""
        self._advance_keeping()
        return [*self._advance_arriving(), *self._advance_leaving()]

    def wait(self) -> None:
        """Wait up to WAIT_SECONDS for progress. For an engine without other work."""
        futures: list[Future[Any]] = [item.future for item in self._arriving.values()]
        futures += [item.future for item in self._leaving.values() if item.future is not None]
        if futures:
            wait(futures, WAIT_SECONDS, FIRST_COMPLETED)

    def close(self) -> None:
        """Forget unfinished hand-offs. The connector finishes the transfers that it has begun."""
        for request in list(self._arriving):
            self._drop(request)
        self._leaving.clear()
        self._settle_keeping()
        if self.counts.num_given_up > 1:
            text = f"{self.counts.num_given_up} prompts were prefilled here because no hand-off arrived"
            logger.warning(Notice(text, id="prompts-prefilled-here"))

    def _advance_arriving(self) -> Iterator[Request]:
        for request, arriving in list(self._arriving.items()):
            if request.is_finished or request.load_key is None:
                self._drop(request)  # the request failed, or its load was given up
            elif request.is_loading and self._is_due(arriving):
                yield from self._arrive(request, arriving)

    def _is_due(self, arriving: Arriving) -> bool:
        """Whether a hand-off has arrived, has failed, or is late."""
        return arriving.future.done() or time.monotonic() > arriving.deadline

    def _arrive(self, request: Request, arriving: Arriving) -> Iterator[Request]:
        """Make progress with a hand-off that is due -> the request once it is finished."""
        try:
            handoff = self._result(arriving)
            if arriving.moving is None or arriving.generation != request.generation:
                self._check(request, handoff)
                arriving.moving, arriving.generation = self._begin_in(request, handoff), request.generation
            if not self._runner.porter.advance(arriving.moving):
                return
            self._take_over(request, handoff)
            yield request
        except HandoffMismatch as error:
            self._scheduler.fail(request, error)
            yield request
        except DFlashError as error:
            self._give_up(request, error)
        self._drop(request)

    def _result(self, arriving: Arriving) -> Handoff:
        if not arriving.future.done():
            raise PeerUnreachable(f"no hand-off arrived within {self.plan.timeout:g} s", id="handoff-late")
        return result(arriving.future)

    def _check(self, request: Request, handoff: Handoff) -> None:
        """Refuse a hand-off of another prompt or of another pair.

        Raises:
            HandoffMismatch: names every difference.
            InvalidHandoff: a token id is outside the vocabulary.
        """
        check_tokens(handoff, self._scheduler.limits.vocab_size)
        if handoff.prompt_token_ids != request.prompt_token_ids:
            raise HandoffMismatch(
                f"hand-off {handoff.key} is of another prompt",
                id="handoff-of-another-prompt", field="key", found=handoff.key, hint="give both sides the same prompts",
            )  # fmt: skip
        if handoff.finish_reason is not None:
            return
        expected = self._runner.porter.shapes(handoff.kv_len)
        if self.plan.force:
            self.counts.problems |= dict.fromkeys(find_problems(handoff, self._fingerprint, expected))
        else:
            check_handoff(handoff, self._fingerprint, expected)

    def _begin_in(self, request: Request, handoff: Handoff) -> MovingPages:
        """Begin to fill a request's own pages. Pages shared through the prefix cache already have their rows."""
        if handoff.finish_reason is not None:
            return MovingPages({}, ())
        num_pages = -(-handoff.kv_len // self._runner.page_size)
        first = min(num_pages, request.prefilled_len // self._runner.page_size)
        return self._runner.porter.begin_in(handoff.tensors, request.pages[:num_pages], first)

    def _take_over(self, request: Request, handoff: Handoff) -> None:
        """Switch on a request whose pages are filled."""
        if not handoff.is_beginning:
            request.seed = handoff.seed
        if handoff.finish_reason is None:
            self._runner.take_over(request, handoff)
        self._scheduler.finish_loading(request, handoff.output_token_ids, handoff.kv_len, handoff.finish_reason)
        self.counts.num_loaded += 1
        self.counts.num_bytes += handoff.num_bytes

    def _give_up(self, request: Request, error: DFlashError) -> None:
        """Prefill a request here instead of loading it, and log the reason once."""
        if not self.counts.num_given_up:
            self.counts.why_given_up = error.message
            text = f"hand-off {request.load_key} was not loaded ({error.message}): prefilling its prompt"
            logger.warning(Notice(text, id="hand-off-not-loaded"))
        self.counts.num_given_up += 1
        self._scheduler.give_up_loading(request)

    def _drop(self, request: Request) -> None:
        self._arriving.pop(request).source.cancel()

    def _describe(self, request: Request) -> Handoff:
        """A request's hand-off, without tensors."""
        assert request.send_key is not None
        return Handoff(
            key=request.send_key,
            fingerprint=self._fingerprint.fields,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=tuple(request.output_token_ids),
            params=request.sent_params or request.params,
            seed=request.seed,
            finish_reason=self._finish_reason(request),
            note=self.plan.notes[request.index] if self.plan.notes else {},
        )

    def _finish_reason(self, request: Request) -> FinishReason | None:
        """Why a request ends at its first token. None if it continues on the other side."""
        params = request.sent_params or request.params
        is_last = params.max_new_tokens <= 1 or request.total_len >= self._scheduler.limits.max_model_len
        return request.finish_reason if request.finish_reason is FinishReason.STOP or is_last else None

    def _advance_leaving(self) -> Iterator[Request]:
        for request in list(self._leaving):
            if self._advance_leaving_one(request):
                yield request

    def _advance_leaving_one(self, request: Request) -> bool:
        """Make progress with a hand-off -> whether it has finished or failed."""
        leaving = self._leaving[request]
        if leaving.future is None and leaving.has_pages and not request.pages:
            leaving.future = Future()  # a step failed, and the pages were lost
            error = DFlashError("the pages of the request were lost before the hand-off", id="pages-lost")
            leaving.future.set_exception(error)
        if leaving.future is None and (not leaving.has_pages or self._is_taken(request, leaving)):
            leaving.future = begun(self.plan.connector.save, self._complete(leaving))
            leaving.deadline = time.monotonic() + TAKEN_SECONDS
        if leaving.future is None or not (leaving.future.done() or time.monotonic() > leaving.deadline):
            return False
        self._leave(request, leaving)
        return True

    def _is_taken(self, request: Request, leaving: Leaving) -> bool:
        """Whether all pages have been copied. The copy begins when there is room for the payload."""
        if leaving.moving is None and self._room.take(request, leaving.handoff.kv_len, self._is_wanted):
            stays = self.plan.connector.takes_device
            leaving.moving = self._runner.porter.begin_out(request.pages, leaving.handoff.kv_len, stays=stays)
        return leaving.moving is not None and self._runner.porter.advance(leaving.moving)

    def _is_wanted(self, request: Request) -> bool:
        """Whether the other side waits for this request."""
        return self.plan.connector.is_wanted(self._leaving[request].handoff.key)

    def _complete(self, leaving: Leaving) -> Handoff:
        """The hand-off with its copied tensors and all their rows."""
        if leaving.moving is None:
            return leaving.handoff
        leaving.handoff = replace(
            leaving.handoff,
            tensors={**leaving.moving.tensors, **leaving.handoff.tensors},
            num_rows=dict.fromkeys(leaving.moving.tensors, leaving.handoff.kv_len),
        )
        return leaving.handoff

    def _advance_keeping(self) -> None:
        """Copy more pages of requests that still hold them, and give finished copies to the store."""
        self._keeping = [item for item in self._keeping if not self._advance_keeping_one(item)]

    def _advance_keeping_one(self, item: Keeping) -> bool:
        """Copy portions of a prompt without waiting -> whether all its pages were copied, or lost with the request."""
        store, porter = self.plan.store, self._runner.porter
        assert store is not None
        while item.first < item.end:
            if item.moving is None:
                num_pages = min(item.end - item.first, store.room(self._num_copied)) if item.is_held else 0
                if not num_pages:
                    return not item.is_held
                pages = item.request.pages[item.first : item.first + num_pages]
                item.moving = porter.begin_out(pages, len(pages) * self._runner.page_size)
                self._num_copied += num_pages
            if not porter.advance(item.moving, begins=item.is_held):
                return False
            taken = {name: tensor[: item.moving.num_done] for name, tensor in item.moving.tensors.items()}
            if item.moving.num_done:
                self._kept.append(store.keep(item.request, item.first, taken))
            self._num_copied -= len(item.moving.pages)
            item.first += item.moving.num_done
            item.moving = None
        return True

    def _settle_keeping(self) -> None:
        """Wait until all copied pages are in the store. If some cannot be written, log the first reason."""
        self._advance_keeping()
        while self._keeping:
            time.sleep(LOOK_SECONDS)
            self._advance_keeping()
        failures = [error for error in (future.exception() for future in self._kept) if error is not None]
        if failures:
            logger.warning("%s not kept: %s", plural(len(failures), "prompt"), failures[0])
        self._kept = []

    def _leave(self, request: Request, leaving: Leaving) -> None:
        """End a request after its hand-off has finished, failed or timed out."""
        del self._leaving[request]
        self._room.give_back(request)
        assert leaving.future is not None
        try:
            if not leaving.future.done():
                leaving.future.cancel()
                message = f"nobody took the hand-off within {TAKEN_SECONDS:g} s"
                raise PeerUnreachable(message, id="handoff-not-taken-in-time")
            result(leaving.future)
        except DFlashError as error:
            self._scheduler.fail(request, error)
            return
        self.counts.num_sent += 1
        self.counts.num_bytes += leaving.handoff.num_bytes
        self._scheduler.finish_sending(request)


def _not_copied(error: Exception) -> DFlashError:
    """Return the error of a request after a failed copy of its state for a hand-off."""
    reason = f"the state of the request was not copied: {type(error).__name__}: {error}"
    return (CapacityError if is_out_of_memory(error) else DFlashError)(reason, id="state-not-copied")
