"""Offline generation: `LLM(target, draft).generate(prompts, params)`.

The target's forward is six calls deep, and a test counts them:

    LLM.generate -> LLM.stream -> Engine.run -> Engine.step -> Runner.submit -> Runner._decode -> Target
"""

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import overload

import torch

from dflash_runtime.checkpoint.pair import DraftLike, TargetSource
from dflash_runtime.checkpoint.tokenizer import Tokenizer
from dflash_runtime.device.kv_pages import PagePorter
from dflash_runtime.device.loading import LoadedPair, load_pair
from dflash_runtime.device.memory import fit_num_pages, fit_num_snapshots
from dflash_runtime.device.pair_fingerprint import fingerprint
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.step_times import find_step_times
from dflash_runtime.documents import copy_fields
from dflash_runtime.drafts.lookups import lookups
from dflash_runtime.engine import Engine
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import DFlashError, RequestError, UnsupportedError, UsageError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.prefix_store import PrefixStore
from dflash_runtime.lossless import Lossless, check_lossless
from dflash_runtime.models.rank_sizes import OPTION
from dflash_runtime.notices import Notice
from dflash_runtime.rank_messages import Message, RankRequest, Regrets, Run, Text, WarmUp
from dflash_runtime.rank_processes import RankProcesses
from dflash_runtime.ranks.rank_group import ALONE
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request, RequestOutput, SamplingParams, check_ids
from dflash_runtime.scheduling.row_budget import BestBudget, RowBudget
from dflash_runtime.scheduling.scheduler import Scheduler
from dflash_runtime.scheduling.snapshots import SnapshotIndex
from dflash_runtime.scheduling.width import AdaptiveWidth, LookupWidth, StepTimes, WidthPolicy
from dflash_runtime.transfers import HandoffPlan
from dflash_runtime.warm_up import warm_up

logger = logging.getLogger(__name__)

STORE_BYTES = 64 * 2**30
"""The limit of a prefix store, if the config does not state one."""

Prompt = str | Sequence[int]
"""A prompt: text or token ids."""

UNORDERED = (bytes, bytearray, Mapping, Set)
"""Types that Python can iterate over, and that are neither a list of prompts nor a prompt."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one request. `output` is set if the request has ended; then `token_ids` may be empty."""

    index: int
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


class LLM:
    """Generates with a loaded pair, or with a target and a draft that it loads. As a context manager it closes itself.

    One `generate` or `stream` runs at a time. Until it ends, a second call from any thread raises a UsageError. A
    stream ends when it has been read to its end or closed. Any number of LLMs may run on one loaded pair.

    Raises:
        CapacityError: the memory left after loading does not hold one request.
        PairMismatch, UsageError, UnsupportedError, TensorMismatch: see `load_pair`.
    """

    @overload
    def __init__(self, target: LoadedPair) -> None: ...

    @overload
    def __init__(self, target: TargetSource, draft: DraftLike | None, config: EngineConfig | None = None) -> None: ...

    def __init__(
        self, target: LoadedPair | TargetSource, draft: DraftLike | None = None, config: EngineConfig | None = None
    ) -> None:
        self._call: object | None = None  # identifies the running call
        self._lock = Lock()
        self._others: RankProcesses | None = None
        if not isinstance(target, LoadedPair) and config is not None and config.tensor_parallel_size > 1:
            self._others = RankProcesses(target, draft, config)
            self._end_others = weakref.finalize(self, self._others.close)  # at the end of the program, too
            config = self._others.config
        try:
            ranks = self._others.ranks if self._others is not None else ALONE
            self._open(target if isinstance(target, LoadedPair) else load_pair(target, draft, config, ranks))
        except BaseException:
            self._lose_others()
            raise
        if self._others is not None:
            self.engine.agree_on_stop = self._others.stop
            free = weakref.WeakMethod(self.engine.runner.drop_graphs)
            self._others.on_close.append(lambda: (method := free()) and method())

    def _open(self, pair: LoadedPair) -> None:
        """Build the engine of a pair."""
        self.pair, ranks = pair, pair.placement.ranks
        draft_config = pair.draft.config if pair.draft is not None else None
        sizes = (pair.config, pair.target.config, draft_config, pair.limits, pair.placement)
        num_pages, num_snapshots = ranks.least(fit_num_pages(*sizes)), ranks.least(fit_num_snapshots(*sizes))
        pages = PagePool(num_pages, pair.config.page_size)
        cache, self._without_snapshots = make_cache(pair, pages, num_snapshots)
        max_in_flight = pair.config.max_in_flight if pair.config.is_async else 0
        runner = Runner(pair, num_pages, num_snapshots)
        self._store, self._without_store = open_store(pair, lambda: self.fingerprint, runner.porter)
        make_index = lookups()[pair.config.drafting] if pair.is_looking_up else None
        policy, budget = find_width_policy(pair, runner), find_row_budget(pair, runner)
        scheduler = Scheduler(pair.limits, pages, cache, policy, make_index, budget)
        scheduler.load.keeps_to_ridge = pair.has_graphs
        self.engine = Engine(scheduler, runner, max_in_flight=max_in_flight, seed=pair.config.seed)
        self._decode = self.tokenizer.decode if self.tokenizer is not None else None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the pair. Waits for the digests of its weights, which are computed when first needed."""
        return fingerprint(self.pair)

    @property
    def limits(self) -> Limits:
        """The limits of the engine, which are fixed when the pair is loaded."""
        return self.pair.limits

    @property
    def device(self) -> torch.device:
        """The device of the engine."""
        return self.pair.placement.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        return self.pair.placement.dtype

    @property
    def warnings(self) -> tuple[Notice, ...]:
        """Warnings about the pair, about features that were switched off, and about steps that run slower."""
        runner = self.engine.runner
        shortages = [item.shortage for item in (runner.graphs, runner.pieces) if item is not None]
        without = (self._without_snapshots, self._without_store, *shortages)
        return (*self.pair.warnings, *(item for item in without if item is not None))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None without tokenizer files, and for a pair built in Python without one."""
        return self.pair.tokenizer

    @property
    def num_draft_tokens(self) -> int:
        """K in use; 0 in plain decoding."""
        return self.limits.num_draft_tokens

    def warm_up(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_requests: int | None = None,
        progress: Callable[[int, int], None] = lambda num_done, total: None,
    ) -> None:
        """Compile the kernels and capture the decode steps that requests with these parameters need.

        Without a warm-up, their first use delays a call by seconds. A captured step is not captured again. Without CUDA
        graphs, as on the CPU, the warm-up does nothing.

        params         by default greedy
        max_requests   the most requests that will run at a time
        progress       gets the number of finished jobs, and of all jobs

        Raises:
            UsageError: this LLM is busy, or was closed meanwhile.
            DFlashError: the device failed, which closes the LLM for good.
        """
        given = [params] if isinstance(params, SamplingParams) else list(params or [SamplingParams()])
        call = self._begin()

        def observe(num_done: int, total: int) -> None:
            self._check_call(call)
            progress(num_done, total)

        try:
            self._tell(WarmUp(tuple(given), max_requests))
            warm_up(self.engine, given, max_requests, observe)
        except BaseException:
            self._lose_others()  # they do not know where this rank has stopped
            raise
        finally:
            self._end(call)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        handoffs: HandoffPlan | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        A prompt is a string or a list of token ids. The answer to a string also ends at the target's own stop tokens;
        the answer to token ids ends only where `params` say so. Without a tokenizer, strings are refused, and the text
        of every output is None.

        With `handoffs`, requests are handed off after their first token, or continue from hand-offs.

        The output of a refused prompt or a failed request has `finish_reason` ERROR. The other prompts are served.
        Ctrl-C is raised and drops all requests; only `stream` yields the outputs of requests that ended before it.

        Raises:
            UsageError: `prompts` is one string, there are neither one set of `params` nor one per prompt, or this LLM
                is busy or was closed meanwhile.
            DFlashError: the device failed in an earlier call, which closes the LLM for good.
        """
        finished = []
        for delta in self.stream(prompts, params, handoffs=handoffs):
            if delta.output is not None:
                finished.append(delta.output)
        return sorted(finished, key=lambda output: output.index)

    def stream(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        handoffs: HandoffPlan | None = None,
    ) -> Generator[Delta, None, None]:
        """Complete prompts as `generate` does, and yield tokens when they are committed.

        Closing the generator drops unfinished requests. If an exception such as Ctrl-C ends it, it first yields the
        outputs of all ended requests.
        """
        call = self._begin()
        try:
            requests, refused = self._prepare(call, prompts, params, handoffs)
            for refusal in refused:
                yield Delta(refusal.index, (), refusal)
            self._tell(Run(tuple(copy_fields(RankRequest, request) for request in requests)))
            with self._closing_on_failure(), closing(self.engine.run(requests, lambda: self._call is call)) as run:
                for committed in run:
                    request = committed.request
                    ended = RequestOutput.read(request, self._decode) if request.is_finished else None
                    yield Delta(request.index, tuple(committed.token_ids), ended)
                    self._check_call(call)
            if not all(request.is_finished for request in requests):
                self._check_call(call)
        finally:
            self._end(call)

    def check_lossless(self, outputs: Sequence[RequestOutput], params: SamplingParams | None = None) -> Lossless:
        """Compare greedy outputs with plain decoding, token by token; see `lossless`.

        `params` are needed if the outputs follow a grammar.
        """
        self._tell(Regrets(tuple(Text(item.prompt_token_ids, item.token_ids) for item in outputs)))
        return check_lossless(self.engine.runner, outputs, self.dtype, params)

    def close(self) -> None:
        """Drop every request. A call that has not ended ends in a UsageError. The LLM can be used again.

        From another thread than the call's, this waits for the step that runs. The processes of other ranks end, and
        then the LLM cannot be used again.
        """
        with self.engine.lock:
            try:
                self.engine.abort()
                self.engine.close_transfers()
            finally:
                self._call = None
                self._lose_others()

    def _tell(self, message: Message) -> None:
        """Let the processes of other ranks make a call, too."""
        if self._others is not None:
            try:
                self._others.say(message)
            except DFlashError:  # a rank has ended since the last call
                self._lose_others()
                raise

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Run a call, and end the processes of other ranks if it leaves them in a step, or with other results."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, DFlashError) or not self.engine.is_whole or self.engine.failure is not None:
                self._lose_others()
            raise

    def _lose_others(self) -> None:
        """End the processes of other ranks, without which no step runs."""
        if self._others is not None:
            self._end_others()
            if hasattr(self, "engine"):
                self.engine.failure = self.engine.failure or DFlashError(
                    "this LLM is closed: the processes of its other GPUs have ended", id="llm-closed",
                    hint="load the pair again",
                )  # fmt: skip

    def _prepare(
        self,
        call: object,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        handoffs: HandoffPlan | None,
    ) -> tuple[list[Request], list[RequestOutput]]:
        """The requests of a call that has begun, and its refused prompts. Opens the call's hand-offs."""
        prompts = _listed(prompts)
        params = _params_of(prompts, params)
        if handoffs is not None and self.pair.placement.ranks.size > 1:
            raise UnsupportedError(
                "hand-offs need the KV of all heads, and each GPU has its own heads",
                id="handoffs-on-ranks", field="tensor_parallel_size", found=self.pair.placement.ranks.size,
                hint=f"leave out {OPTION}",
            )  # fmt: skip
        if handoffs is None and self._store is not None:
            handoffs = HandoffPlan.of_store(self._store, len(prompts))
        if handoffs is not None:
            fingerprint = self.fingerprint
            with self.engine.lock:
                self._check_call(call)
                self.engine.open_transfers(handoffs, fingerprint)
        return self._requests(prompts, params, handoffs)

    def _requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], handoffs: HandoffPlan | None
    ) -> tuple[list[Request], list[RequestOutput]]:
        """A request for each prompt that can be served, and an output for each other prompt. Queues nothing."""
        if handoffs is not None and len(handoffs.keys) != len(prompts):
            raise UsageError(
                field="handoffs",
                found=f"{len(handoffs.keys)} keys",
                expected=f"a key for each of {len(prompts)} prompts",
            )
        requests, refused = [], []
        for index, (prompt, item) in enumerate(zip(prompts, params, strict=True)):
            token_ids: tuple[int, ...] = ()
            try:
                if isinstance(prompt, UNORDERED):
                    found = type(prompt).__name__
                    raise RequestError(field="prompt", found=found, expected="a text or a sequence of token ids")
                if isinstance(prompt, str):
                    prompt, item = self._encode(prompt), item.with_stops(self._stop_token_ids)
                token_ids = check_ids(prompt)
                request = Request(index=index, prompt_token_ids=token_ids, params=item)
                self.engine.scheduler.check(request)
                self._check_grammar(request.params, handoffs)
                requests.append(request if handoffs is None else handoffs.apply(request))
            except DFlashError as error:
                refused.append(RequestOutput.refuse(index, token_ids, error, self._decode))
        return requests, refused

    def _check_grammar(self, params: SamplingParams, handoffs: HandoffPlan | None) -> None:
        """Compile the grammar of a request, if it has one.

        Raises:
            UnsupportedError: the pair or the call has what excludes a grammar, or see `Grammars.prepare`.
            RequestError: see `Grammars.prepare`.
        """
        if params.grammar is None:
            return
        excluded = {
            "hand-offs": handoffs is not None and handoffs.store is None,
            OPTION: self.pair.placement.ranks.size > 1,
            "--tree": self.pair.limits.num_tree_nodes > 0,
            "--drafting": self.pair.config.is_lookup,
            "a row budget": self.pair.config.row_budget,
        }
        if what := next((name for name, is_used in excluded.items() if is_used), None):
            raise UnsupportedError(
                f"a grammar does not go with {what}", id="grammar-excluded", field="grammar", hint=f"leave out {what}"
            )
        self.engine.runner.grammars.prepare(params)

    @property
    def _stop_token_ids(self) -> Sequence[int]:
        """The stop tokens of the target's configs and its tokenizer."""
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return self.pair.stop_token_ids if eos is None else (*self.pair.stop_token_ids, eos)

    def _encode(self, prompt: str) -> list[int]:
        """The token ids of a string.

        Raises:
            RequestError: the target lacks a tokenizer.
            CheckpointError: the tokenizer's files cannot be loaded.
        """
        if self.tokenizer is None:
            raise RequestError(
                id="prompt-without-tokenizer", field="prompt", found=prompt,
                expected="token ids: the target lacks a tokenizer",
            )  # fmt: skip
        return self.tokenizer.encode(prompt)

    def _begin(self) -> object:
        """Reserve the engine for one call.

        Raises:
            UsageError: another call has reserved it.
            DFlashError: the device failed, and the engine is closed.
        """
        if self.engine.failure is not None:
            raise self.engine.failure
        with self._lock:
            if self._call is not None:
                raise UsageError(
                    "this LLM is busy: an earlier generate or stream has not ended",
                    id="llm-busy",
                    hint="read the stream to its end or close() it; let threads take turns, or give each its own LLM",
                )
            self._call = call = object()
        return call

    def _end(self, call: object) -> None:
        """Give the engine back after a call, unless another thread has closed the call."""
        with self.engine.lock:
            if self._call is call:
                try:
                    self.engine.close_transfers()
                finally:
                    self._call = None

    def _check_call(self, call: object) -> None:
        if self._call is not call:
            raise UsageError("this LLM was closed before its call ended", id="stream-closed")

    def __repr__(self) -> str:
        runtime, placement = self.pair.target_runtime, self.pair.placement
        return f"LLM({runtime} target, {self.num_draft_tokens} draft tokens per step, {placement.dtype}, {self.device})"

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_width_policy(pair: LoadedPair, runner: Runner) -> WidthPolicy | None:
    """The width policy of a lookup, or of adaptive width. None, to verify whole blocks, if neither is on or step times
    cannot be measured.
    """
    if pair.is_looking_up:
        return LookupWidth(pair.limits.num_draft_tokens)
    if not pair.config.adaptive_width or runner.draft is None:
        return None
    times = _measured_times(runner, "adaptive width")
    return AdaptiveWidth(times, pair.limits.num_draft_tokens) if times is not None else None


def find_row_budget(pair: LoadedPair, runner: Runner) -> RowBudget | None:
    """The row budget. None, to verify whole blocks, if it is off or step times cannot be measured."""
    if not pair.config.row_budget or runner.draft is None:
        return None
    times = _measured_times(runner, "the row budget")
    return BestBudget(times) if times is not None else None


def _measured_times(runner: Runner, feature: str) -> StepTimes | None:
    """The step times of a runner, or None with a warning that the feature is off."""
    if runner.graphs is None:
        logger.warning("%s is off: the steps of these models are not captured, so their times are unknown", feature)
        return None
    try:
        return find_step_times(runner)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        logger.warning("%s is off: memory does not hold all the steps that it would measure", feature)
        return None


def make_cache(pair: LoadedPair, pages: PagePool, num_snapshots: int) -> tuple[PrefixCache, Notice | None]:
    """The prefix cache, and a warning if it is off because memory holds no state of recurrent layers."""
    if not pair.has_prefix_cache or pair.target.config.recurrence is None:
        return PrefixCache(pages, is_enabled=pair.has_prefix_cache), None
    if num_snapshots:
        return PrefixCache(pages, snapshots=SnapshotIndex(num_snapshots)), None
    notice = Notice("the prefix cache is off: its memory holds no state of the recurrent layers", id="no-snapshots")
    logger.warning(notice)
    return PrefixCache(pages, is_enabled=False), notice


def open_store(
    pair: LoadedPair, find_fingerprint: Callable[[], Fingerprint], porter: PagePorter
) -> tuple[PrefixStore | None, Notice | None]:
    """The store that keeps prompts between runs, or None without one, and a warning if it cannot be used.

    It needs the prefix cache. It has no states, so a target with recurrent layers could not continue from its pages.

    Raises:
        UsageError: the path of the store is a file.
    """
    if pair.config.prefix_store is None:
        return None, None
    folder = Path(pair.config.prefix_store)
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            "is a file, expected a folder",
            id="prefix-store-is-a-file", path=folder, field="prefix_store", found=str(folder), expected="a folder",
        )  # fmt: skip
    if not pair.has_prefix_cache or pair.target.config.recurrence is not None:
        why = "it does not hold the states of recurrent layers" if pair.has_prefix_cache else "the prefix cache is off"
        notice = Notice(f"prompts are not kept in {folder}: {why}", id="no-prefix-store")
        logger.warning(notice)
        return None, notice
    max_bytes = pair.config.prefix_store_bytes or STORE_BYTES
    return PrefixStore(folder, find_fingerprint, pair.config.page_size, porter.page_specs(), max_bytes), None


def _listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts of one call.

    Raises:
        UsageError: `prompts` is one string or the token ids of one prompt instead of a list, or nothing like a list.
    """
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, (str, *UNORDERED))
    listed = list(prompts) if is_list else []
    if not is_list or (listed and all(map(_is_scalar, listed))):
        raise UsageError(
            id="prompts-not-a-list", field="prompts", found=prompts, expected="a list of prompts",
            hint="pass a list, even of one prompt: generate([prompt])",
        )  # fmt: skip
    return listed


def _is_scalar(item: object) -> bool:
    """Whether an item is an integer of any type, and not a row of a matrix, which may hold one number."""
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def _params_of(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """The sampling parameters of each prompt.

    Raises:
        UsageError: there are neither one set of parameters nor one per prompt, or a value has another type.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence):
        raise UsageError(field="params", found=params, expected="SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise UsageError(
            id="other-number-of-params",
            field="params",
            found=len(params),
            expected=f"one SamplingParams, or a list of {len(prompts)}, one per prompt",
        )
    for item in params:
        if not isinstance(item, SamplingParams):
            raise UsageError(field="params", found=type(item).__name__, expected="SamplingParams")
    return params
