"""Offline generation: `LLM(target, draft).generate(prompts, params)`. Knows token ids, no text."""

import logging
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch

from dflash_kernels.suite import KernelChoice, pick_kernels
from dflash_runtime.checkpoint.pair import DraftSource, TargetSource, check_pair
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.attention import check_capability
from dflash_runtime.device.exclusions import Setting, settle
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.settings import fit_num_pages, resolve_device, resolve_dtype, resolve_kernels, resolve_limits
from dflash_runtime.drafts.draft import Draft, load_draft
from dflash_runtime.engine import Engine
from dflash_runtime.errors import DFlashError, UsageError
from dflash_runtime.lossless import Lossless, check_lossless
from dflash_runtime.models.target import Target, load_target
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request, RequestOutput, SamplingParams
from dflash_runtime.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens one request gained in one step; `output` is set with its last."""

    index: int
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


class LLM:
    """A target, and a draft to speculate with, ready to generate. Also a context manager that closes it.

    Raises:
        PairMismatch: the draft was not made for the target.
        UsageError: more tokens to draft than the draft was trained for.
        UnsupportedError, CapacityError, TensorMismatch: see `errors`.
    """

    def __init__(self, target: TargetSource, draft: DraftSource | None, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if draft is not None:
            check_pair(draft, target)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        limits = resolve_limits(config, target.config, draft.config if draft is not None else None)
        if limits.num_draft_tokens == 0:
            draft = None
        backend = resolve_kernels(config.kernels, device, dtype)
        check_capability(backend, target.config, draft.config if draft is not None else None, _name(dtype))
        num_positions = limits.max_model_len + limits.num_lookahead_tokens
        kernels = pick_kernels(backend, device)
        placing = {"num_positions": num_positions, "kernels": kernels, "device": device, "dtype": dtype}
        target_model = load_target(target, **placing)  # type: ignore[arg-type]
        draft_model = load_draft(draft, target_model, **placing) if draft is not None else None  # type: ignore[arg-type]
        self._build(target_model, draft_model, limits, config, backend, device, dtype)

    @classmethod
    def from_models(
        cls,
        target: Target,
        draft: Draft | None,
        limits: Limits,
        *,
        config: EngineConfig | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "LLM":
        """An LLM from models that are already loaded, such as a draft of your own."""
        config = config or EngineConfig()
        llm = cls.__new__(cls)
        llm._build(target, draft, limits, config, resolve_kernels(config.kernels, device, dtype), device, dtype)
        return llm

    def _build(
        self,
        target: Target,
        draft: Draft | None,
        limits: Limits,
        config: EngineConfig,
        backend: KernelChoice,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config, warnings = settle(Setting(config, device.type, backend, limits.num_draft_tokens))
        for text in warnings:
            logger.warning(text)
        self.config, self.limits, self.device, self.dtype, self.warnings = config, limits, device, dtype, warnings
        draft_config = draft.config if draft is not None else None
        num_pages = fit_num_pages(config, target.config, draft_config, limits, device, dtype)
        runner = Runner(
            target,
            draft,
            limits,
            kernels=pick_kernels(backend, device),
            num_pages=num_pages,
            page_size=config.page_size,
            samples_drafts=config.draft_sampling == "probabilistic",
            device=device,
            dtype=dtype,
        )
        pages = PagePool(num_pages, config.page_size)
        cache = PrefixCache(pages, is_enabled=config.prefix_cache)
        max_in_flight = config.max_in_flight if config.is_async else 0
        self.engine = Engine(Scheduler(limits, pages, cache), runner, max_in_flight=max_in_flight)

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
        finished = [delta.output for delta in self.stream(prompts, params) if delta.output is not None]
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
