"""Offline generation: `LLM(target, draft).generate(prompts, params)`.

From a call to the target's forward it is six calls, and a test counts them:

    LLM.generate -> LLM.stream -> Engine.run -> Engine.step -> Runner.submit -> Runner._decode -> Target
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import overload

import torch

from dflash_runtime.checkpoint.pair import DraftLike, TargetSource
from dflash_runtime.checkpoint.tokenizer import Tokenizer
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.loading import LoadedPair, load_pair
from dflash_runtime.device.memory import fit_num_pages
from dflash_runtime.device.pair_fingerprint import fingerprint
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.step_times import find_step_times
from dflash_runtime.engine import Engine
from dflash_runtime.errors import DFlashError, RequestError, UsageError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.prefix_store import PrefixStore
from dflash_runtime.lossless import Lossless, check_lossless
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request, RequestOutput, SamplingParams, check_ids
from dflash_runtime.scheduling.scheduler import Scheduler
from dflash_runtime.scheduling.width import AdaptiveWidth, WidthPolicy
from dflash_runtime.transfers import HandoffPlan
from dflash_runtime.warm_up import warm_up

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens one request gained in one step; `output` is set with its last, and where it ended without any."""

    index: int
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


class LLM:
    """A pair ready to generate: one that is loaded, or a target and a draft to load. A context manager that closes it.

    One `generate` or `stream` runs at a time: a second one, of another thread or begun while a stream is not read to
    its end, is refused with a UsageError. Any number of LLMs may run on one loaded pair.

    Raises:
        CapacityError: the memory left after loading holds no request.
        PairMismatch, UsageError, UnsupportedError, TensorMismatch: see `load_pair`.
    """

    @overload
    def __init__(self, target: LoadedPair) -> None: ...

    @overload
    def __init__(self, target: TargetSource, draft: DraftLike | None, config: EngineConfig | None = None) -> None: ...

    def __init__(
        self, target: LoadedPair | TargetSource, draft: DraftLike | None = None, config: EngineConfig | None = None
    ) -> None:
        self.pair = pair = target if isinstance(target, LoadedPair) else load_pair(target, draft, config)
        draft_config = pair.draft.config if pair.draft is not None else None
        num_pages = fit_num_pages(pair.config, pair.target.config, draft_config, pair.limits, pair.placement)
        pages = PagePool(num_pages, pair.config.page_size)
        self.fingerprint = fingerprint(pair)
        salt = bytes.fromhex(self.fingerprint.digest)
        cache = PrefixCache(pages, is_enabled=pair.has_prefix_cache, salt=salt)
        self._store = open_store(pair, self.fingerprint)
        max_in_flight = pair.config.max_in_flight if pair.config.is_async else 0
        runner = Runner(pair, num_pages)
        scheduler = Scheduler(pair.limits, pages, cache, find_width_policy(pair, runner))
        scheduler.load.keeps_to_ridge = pair.has_graphs
        self.engine = Engine(scheduler, runner, max_in_flight=max_in_flight, seed=pair.config.seed)
        self._call: object | None = None  # the one that runs
        self._decode = self.tokenizer.decode if self.tokenizer is not None else None
        self._lock = Lock()

    @property
    def limits(self) -> Limits:
        """Limits of the engine that are fixed when the pair is loaded."""
        return self.pair.limits

    @property
    def device(self) -> torch.device:
        return self.pair.placement.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pair.placement.dtype

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each feature that was switched off, naming what excludes it: another feature, or memory."""
        runner = self.engine.runner
        shortages = [item.shortage for item in (runner.graphs, runner.pieces) if item is not None]
        return (*self.pair.warnings, *(shortage for shortage in shortages if shortage is not None))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None if its checkpoint has none, or the pair was built by hand."""
        return self.pair.tokenizer

    @property
    def num_draft_tokens(self) -> int:
        """K in use; 0 when decoding plainly."""
        return self.limits.num_draft_tokens

    def warm_up(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_requests: int | None = None,
        progress: Callable[[int, int], None] = lambda num_done, total: None,
    ) -> None:
        """Compile every kernel and capture every decode step that calls with these parameters will need.

        Without it that happens when each is first needed, which holds a call up by seconds. `params` are by default
        greedy; `max_requests` says how many will run at a time at most; `progress` hears how much is done, and of how
        much. What is prepared already is left as it is; where no steps are captured, as on the CPU, nothing is done.

        Raises:
            UsageError: this LLM is busy.
            DFlashError: the device failed, which closes an LLM for good.
        """
        given = [params] if isinstance(params, SamplingParams) else list(params or [SamplingParams()])
        call = self._begin()
        try:
            warm_up(self.engine, given, max_requests, progress)
        finally:
            if self._call is call:
                self._call = None

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        handoffs: HandoffPlan | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        A prompt is a string or a list of token ids. The answer to a string also ends at the target's own stop tokens;
        the answer to token ids ends only where `params` say so. Without a tokenizer strings are refused, and the
        outputs have no text.

        With `handoffs`, requests are handed off after their first token, or continue from hand-offs.

        A prompt that cannot be served has an output with `finish_reason` ERROR, and so has a request that fails. The
        other prompts are served. Ctrl-C is raised and leaves no request behind; `stream` yields the outputs of requests
        that ended before it.

        Raises:
            UsageError: `prompts` is one string; the number of `params` is neither one nor that of prompts; or this LLM
                is busy.
            DFlashError: the device failed in an earlier call, which closes an LLM for good.
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
        """As `generate`, yielding tokens as they are committed. Leaving early drops what is unfinished.

        Whatever ends this, Ctrl-C included, the outputs of all requests that had ended are yielded before.
        """
        prompts = _listed(prompts)
        if handoffs is None and self._store is not None:
            handoffs = HandoffPlan.of_store(self._store, len(prompts))
        requests, refused = self._requests(prompts, _params_of(prompts, params), handoffs)
        call = self._begin()
        try:
            self.engine.open_transfers(handoffs, self.fingerprint)
            for refusal in refused:
                yield Delta(refusal.index, (), refusal)
            self._check_call(call)
            for committed in self.engine.run(requests):
                request = committed.request
                ended = RequestOutput.read(request, self._decode) if request.is_finished else None
                yield Delta(request.index, tuple(committed.token_ids), ended)
                self._check_call(call)
        finally:
            if self._call is call:
                self.engine.close_transfers()
                self._call = None

    def check_lossless(self, outputs: Sequence[RequestOutput]) -> Lossless:
        """Judge greedy outputs against plain decoding, token by token; see `lossless`."""
        return check_lossless(self.engine.runner, outputs, self.dtype)

    def close(self) -> None:
        """Drop every request, those of a stream that was not read to its end too; the LLM can be used again."""
        self._call = None
        self.engine.close_transfers()
        self.engine.abort()

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
                if isinstance(prompt, str):
                    prompt, item = self._encode(prompt), item.with_stops(self._stop_token_ids)
                token_ids = check_ids(prompt)
                request = Request(index=index, prompt_token_ids=token_ids, params=item)
                self.engine.scheduler.check(request)
                requests.append(request if handoffs is None else handoffs.apply(request))
            except DFlashError as error:
                refused.append(RequestOutput.refuse(index, token_ids, error, self._decode))
        return requests, refused

    @property
    def _stop_token_ids(self) -> Sequence[int]:
        """The target's own stop tokens, those of its tokenizer included."""
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return self.pair.stop_token_ids if eos is None else (*self.pair.stop_token_ids, eos)

    def _encode(self, prompt: str) -> list[int]:
        """The token ids of a string.

        Raises:
            RequestError: the target has no tokenizer.
            CheckpointError: the tokenizer's files cannot be loaded.
        """
        if self.tokenizer is None:
            raise RequestError(
                id="prompt-without-tokenizer", field="prompt", found=prompt,
                expected="token ids: the target has no tokenizer",
            )  # fmt: skip
        return self.tokenizer.encode(prompt)

    def _begin(self) -> object:
        """Take the engine for one call.

        Raises:
            UsageError: another call has it.
            DFlashError: the device failed, and the engine is closed.
        """
        if self.engine.failure is not None:
            raise self.engine.failure
        with self._lock:
            if self._call is not None:
                raise UsageError(
                    "this LLM is busy: another generate or stream of it has not ended",
                    hint="read the stream to its end or close() it; threads take turns, or have an LLM each",
                )
            self._call = call = object()
        return call

    def _check_call(self, call: object) -> None:
        if self._call is not call:
            raise UsageError("this LLM was closed while a stream of it was being read")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_width_policy(pair: LoadedPair, runner: Runner) -> WidthPolicy | None:
    """An adaptive width, where it is asked for and steps have times; None is the whole block."""
    if not pair.config.adaptive_width or runner.draft is None:
        return None
    if runner.graphs is None:
        logger.warning("adaptive width is off because of models whose steps are not captured, and so not measured")
        return None
    try:
        return AdaptiveWidth(find_step_times(runner), pair.limits.num_draft_tokens)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        logger.warning("adaptive width is off because of memory, which does not hold all steps that are to be measured")
        return None


def open_store(pair: LoadedPair, fingerprint: Fingerprint) -> PrefixStore | None:
    """Where prompts are kept over runs, if that is asked for.

    Raises:
        UsageError: it is a file.
    """
    if pair.config.prefix_store is None:
        return None
    folder = Path(pair.config.prefix_store)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file, expected a folder for prompts that are kept")
    if not pair.has_prefix_cache:
        logger.warning("prompts are not kept in %s because of a prefix cache that is off", pair.config.prefix_store)
        return None
    return PrefixStore(folder, fingerprint, pair.config.page_size)


def _listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts of one call.

    Raises:
        UsageError: one string was given, whose characters are not the prompts.
    """
    if isinstance(prompts, str | bytes):
        raise UsageError(
            id="prompts-not-a-list", field="prompts", found=prompts, expected="a list of prompts",
            hint="pass a list, even of one prompt: generate([prompt])",
        )  # fmt: skip
    return list(prompts)


def _params_of(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """The sampling parameters of each prompt.

    Raises:
        UsageError: there are neither one set of parameters nor as many as prompts, or of another type.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise UsageError(
            id="other-number-of-params",
            field="params",
            found=len(params),
            expected=f"1 or {len(prompts)}, one per prompt",
        )
    for item in params:
        if not isinstance(item, SamplingParams):
            raise UsageError(field="params", found=type(item).__name__, expected="SamplingParams")
    return params
