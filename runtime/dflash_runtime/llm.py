"""Offline generation: `LLM(target, draft).generate(prompts, params)`. Knows token ids, no text.

From a call to the target's forward it is six calls, and a test counts them:

    LLM.generate -> LLM.stream -> Engine.run -> Engine.step -> Runner.submit -> Runner._decode -> Target
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from dflash_runtime.checkpoint.pair import DraftLike, TargetSource
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.loading import LoadedPair, load_pair
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.settings import fit_num_pages
from dflash_runtime.engine import Engine
from dflash_runtime.errors import DFlashError, UsageError
from dflash_runtime.lossless import Lossless, check_lossless
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request, RequestOutput, SamplingParams
from dflash_runtime.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens one request gained in one step; `output` is set with its last."""

    index: int
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


class LLM:
    """A pair ready to generate: one that is loaded, or a target and a draft to load. A context manager that closes it.

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
        cache = PrefixCache(pages, is_enabled=pair.config.prefix_cache)
        max_in_flight = pair.config.max_in_flight if pair.config.is_async else 0
        scheduler = Scheduler(pair.limits, pages, cache)
        self.engine = Engine(scheduler, Runner(pair, num_pages), max_in_flight=max_in_flight)

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
        """A sentence for each feature that was switched off, naming the feature that excludes it."""
        return self.pair.warnings

    @property
    def num_draft_tokens(self) -> int:
        """K in use; 0 when decoding plainly."""
        return self.limits.num_draft_tokens

    def generate(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete prompts of token ids; outputs come in the order of the prompts.

        A prompt that cannot be served has an output with `finish_reason` ERROR; the others are not touched by it.
        """
        finished = []
        for delta in self.stream(prompts, params):
            if delta.output is not None:
                finished.append(delta.output)
        return sorted(finished, key=lambda output: output.index)

    def stream(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[Delta, None, None]:
        """As `generate`, yielding tokens as they are committed. Leaving early drops what is unfinished."""
        for request in _requests(prompts, params):
            try:
                self.engine.add(request)
            except DFlashError as error:
                yield Delta(request.index, (), RequestOutput.refuse(request, error))
        for committed in self.engine.run():
            request = committed.request
            output = RequestOutput.read(request) if request.is_finished else None
            yield Delta(request.index, tuple(committed.token_ids), output)

    def check_lossless(self, outputs: Sequence[RequestOutput]) -> Lossless:
        """Judge greedy outputs against plain decoding, token by token; see `lossless`."""
        return check_lossless(self.engine.runner, outputs, self.dtype)

    def close(self) -> None:
        """Drop every request; the LLM can be used again."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _requests(
    prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[Request]:
    prompts = list(prompts)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise UsageError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
    return [
        Request(index=index, prompt_token_ids=tuple(prompt), params=item)
        for index, (prompt, item) in enumerate(zip(prompts, params, strict=True))
    ]
