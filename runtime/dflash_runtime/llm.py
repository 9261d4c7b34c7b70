"""Offline generation: `LLM(target, draft).generate(prompts, params)`.

The target's forward is six calls deep, and a test counts them:

    LLM.generate -> LLM.stream -> Engine.run -> Engine.step -> Runner.submit -> Runner._decode -> Target
"""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import overload

import torch

from dflash_runtime.checkpoint.pair import DraftLike, TargetSource
from dflash_runtime.checkpoint.targets.rank_sizes import OPTION
from dflash_runtime.checkpoint.text.tokenizer import Tokenizer
from dflash_runtime.device.setup.loading import LoadedPair, load_pair
from dflash_runtime.device.setup.pair_fingerprint import fingerprint
from dflash_runtime.documents import copy_fields
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.engine_setup import EngineSetup
from dflash_runtime.errors import DFlashError, UnsupportedError, UsageError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.lossless import Lossless, check_lossless
from dflash_runtime.notices import Notice
from dflash_runtime.prompts import Prompt, PromptReader, listed, params_of
from dflash_runtime.rank_messages import Message, RankRequest, Regrets, Run, Text, WarmUp
from dflash_runtime.rank_processes import RankProcesses
from dflash_runtime.ranks.rank_group import ALONE
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_runtime.warm_up import warm_up


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
            self.pair = target if isinstance(target, LoadedPair) else load_pair(target, draft, config, ranks)
            self._setup = EngineSetup.of(self.pair, lambda: self.fingerprint)
            self.engine = self._setup.engine
            self._reader = PromptReader(self.pair, self.engine)
        except BaseException:
            self._lose_others()
            raise
        if self._others is not None:
            self.engine.agree_on_stop = self._others.stop
            free = weakref.WeakMethod(self.engine.runner.drop_graphs)
            self._others.on_close.append(lambda: (method := free()) and method())

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
        return (*self.pair.warnings, *self._setup.warnings, *(item for item in shortages if item is not None))

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
                    ended = RequestOutput.read(request, self._reader.decode) if request.is_finished else None
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
        prompts = listed(prompts)
        params = params_of(prompts, params)
        if handoffs is not None and self.pair.placement.ranks.size > 1:
            raise UnsupportedError(
                "hand-offs need the KV of all heads, and each GPU has its own heads",
                id="handoffs-on-ranks", field="tensor_parallel_size", found=self.pair.placement.ranks.size,
                hint=f"leave out {OPTION}",
            )  # fmt: skip
        if handoffs is None and self._setup.store is not None:
            handoffs = HandoffPlan.of_store(self._setup.store, len(prompts))
        if handoffs is not None:
            fingerprint = self.fingerprint
            with self.engine.lock:
                self._check_call(call)
                self.engine.open_transfers(handoffs, fingerprint)
        return self._reader.read(prompts, params, handoffs)

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
