"""Offline generation: `LLM(target, draft).generate(prompts, params)`. Knows token ids, no text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dflash_runtime.config import EngineConfig
from dflash_runtime.drafts.base import Draft, load_draft
from dflash_runtime.engine import Engine
from dflash_runtime.errors import CapacityError, UnsupportedError, UsageError
from dflash_runtime.kv import bytes_per_token
from dflash_runtime.models.base import Target, load_target
from dflash_runtime.pages import PagePool
from dflash_runtime.pair import DraftSource, TargetSource, check_pair
from dflash_runtime.request import FinishReason, Request, RequestOutput, SamplingParams
from dflash_runtime.runner import Runner
from dflash_runtime.scheduler import Limits, Scheduler

KV_SHARE = 0.85
"""Share of the memory that is free after loading that KV may take."""

MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens one request gained in one step; `output` is set with its last."""

    index: int
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


class LLM:
    """A target, and a draft to speculate with, ready to generate.

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
        limits = resolve_limits(config, target, draft)
        num_positions = limits.max_model_len + limits.num_lookahead_tokens
        with_draft = draft is not None and limits.num_draft_tokens > 0
        target_model = load_target(target, num_positions=num_positions, device=device, dtype=dtype)
        draft_model = None
        if draft is not None and with_draft:
            draft_model = load_draft(draft, target_model, num_positions=num_positions, device=device, dtype=dtype)
        self._build(target_model, draft_model, limits, config, device, dtype)

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
        llm = cls.__new__(cls)
        llm._build(target, draft, limits, config or EngineConfig(), device, dtype)
        return llm

    def _build(
        self,
        target: Target,
        draft: Draft | None,
        limits: Limits,
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.limits = limits
        self.device = device
        self.dtype = dtype
        num_pages = config.num_pages or fit_num_pages(target, draft, limits, config.page_size, device, dtype)
        runner = Runner(
            target,
            draft,
            num_draft_tokens=limits.num_draft_tokens,
            num_pages=num_pages,
            page_size=config.page_size,
            device=device,
            dtype=dtype,
        )
        self.engine = Engine(Scheduler(limits, PagePool(num_pages, config.page_size)), runner)

    @property
    def num_draft_tokens(self) -> int:
        """K in use; 0 when decoding plainly."""
        return self.limits.num_draft_tokens

    def generate(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete prompts of token ids; outputs come in the order of the prompts.

        Raises:
            RequestError, CapacityError: a prompt that cannot be served, before anything runs.
        """
        finished = [delta.output for delta in self.stream(prompts, params) if delta.output is not None]
        return sorted(finished, key=lambda output: output.index)

    def stream(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Delta]:
        """As `generate`, yielding tokens as they are committed."""
        for request in _requests(prompts, params):
            self.engine.add(request)
        for committed in self.engine.run():
            request = committed.request
            yield Delta(request.index, tuple(committed.token_ids), _output(request) if request.is_finished else None)


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one; a GPU that is too old or absent is refused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {name!r} is not served (known: cpu, cuda)")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"device {name!r} is not there: {torch.cuda.device_count()} CUDA devices found")
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            raise UnsupportedError(f"{torch.cuda.get_device_name(device)}: compute capability below 8.0")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_limits(config: EngineConfig, target: TargetSource, draft: DraftSource | None) -> Limits:
    """K, the model's limit and the batch, from what was asked and what the checkpoints can do."""
    trained = draft.config.num_draft_tokens if draft is not None else 0
    num_draft_tokens = trained if config.num_draft_tokens is None else config.num_draft_tokens
    if num_draft_tokens > trained:
        raise UsageError(
            f"{num_draft_tokens} speculative tokens, expected at most {trained}: "
            + ("no draft is given" if draft is None else f"the draft was trained for blocks of {trained + 1}")
        )
    served = target.config.max_position_embeddings
    if draft is not None and num_draft_tokens:
        served = min(served, draft.config.max_position_embeddings)
    max_model_len = config.max_model_len or served
    if max_model_len > served:
        raise UsageError(f"max_model_len {max_model_len}, expected at most {served}: the pair's position limit")
    return Limits(
        num_draft_tokens=num_draft_tokens,
        max_model_len=max_model_len,
        max_num_requests=config.max_num_requests,
        vocab_size=target.config.vocab_size,
    )


def fit_num_pages(
    target: Target, draft: Draft | None, limits: Limits, page_size: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Pages for every request at full length, or as many as free memory allows.

    Raises:
        CapacityError: memory does not hold even one page.
    """
    page_bytes = page_size * (
        bytes_per_token(target.config, dtype) + (bytes_per_token(draft.config, dtype) if draft is not None else 0)
    )
    wanted = limits.max_num_requests * -(-limits.max_model_len // page_size) + 1
    free = _free_bytes(device)
    affordable = int(free * KV_SHARE) // page_bytes
    if affordable < 2:
        raise CapacityError(f"KV: a page of {page_size} tokens takes {page_bytes} bytes, {free} bytes are free")
    return min(wanted, affordable)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import os

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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


def _output(request: Request) -> RequestOutput:
    return RequestOutput(
        index=request.index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(request.output_token_ids),
        finish_reason=request.finish_reason or FinishReason.LENGTH,
        acceptance_lengths=tuple(request.acceptance_lengths),
        kept_lengths=tuple(request.kept_lengths),
    )
