"""Open a pair for running: resolve references, load the models, find the tokenizer and the stop tokens."""

import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.checkpoint_identity import Identity, identify
from dflash_cli.checkpoints.opening import (
    NO_OVERRIDES,
    DraftCheckpoint,
    Overrides,
    lacks_embedding_scale,
    open_draft,
    open_target,
)
from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import fetch_directory, is_bundled
from dflash_cli.generation.answers import Event, Streaming, answer_rows
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.run_facts import PairRun, RunFacts, release_of
from dflash_cli.generation.threads import use_threads
from dflash_cli.generation.tokenizer import Tokenizer, find_tokenizer
from dflash_cli.terminal import console
from dflash_cli.terminal.progress import bars, working
from dflash_cli.version import __version__
from dflash_runtime.checkpoint.pair import TargetSource, check_pair
from dflash_runtime.checkpoint.text.tokenizer import find_stop_ids
from dflash_runtime.device.setup.early_refusals import refuse_early
from dflash_runtime.documents import copy_fields, fields_of
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError, hinting
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.limits import resolve_model_len, resolve_num_drafts
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.target_config import TargetFacts

if TYPE_CHECKING:
    import torch

    from dflash_runtime.llm import LLM, Delta

LOADED_SETTINGS = {
    "max_model_len", "dtype", "device", "device_name", "kernels", "target_runtime", "target_quantization", "rounding",
    "recurrent_rows", "module_swaps",
}  # fmt: skip
"""Settings of a run that only a loaded pair knows, unless the user chose them."""

OF_TREES = ("num_tree_nodes", "tree_candidates")
"""Settings of a run that verifies trees."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenedPair:
    """A pair with everything read except the weights. `draft` is None for plain decoding."""

    target: TargetSource
    draft: DraftCheckpoint | None
    tokenizer: Tokenizer | None
    stop_token_ids: tuple[int, ...]
    references: dict[str, str | None]
    overrides: Overrides = NO_OVERRIDES
    template_options: str | None = None

    @cached_property
    def identities(self) -> dict[str, Identity]:
        """Identities of the checkpoints by role, without a draft for plain decoding."""
        found = {"target": identify(self.target.checkpoint, self.references["target"] or "")}
        if self.draft is not None:
            found["draft"] = identify(self.draft.checkpoint, self.references["draft"] or "")
        return found

    @property
    def directories(self) -> dict[str, Path]:
        """Directories of the checkpoints by role, without a draft for plain decoding."""
        drafts = {} if self.draft is None else {"draft": self.draft.checkpoint.path}
        return {"target": self.target.checkpoint.path, **drafts}

    @property
    def template_digest(self) -> str | None:
        """Digest of the chat template; None without a tokenizer."""
        return self.tokenizer.template_digest if self.tokenizer is not None else None

    def described(
        self, config: EngineConfig, device: str, target_runtime: str, target_quantization: str | None
    ) -> PairRun:
        """Facts about the checkpoints, the settings and this process."""
        return PairRun(
            **fields_of(RunFacts.here(device)),
            draft=self.identities.get("draft"),
            draft_method=None if self.draft is None else self.draft.format.serve_method,
            target=self.identities["target"],
            template_digest=self.template_digest,
            max_num_requests=config.max_num_requests,
            scheduling=config.scheduling,
            target_runtime=target_runtime,
            device_map=config.device_map,
            target_quantization=target_quantization,
            prefix_cache=config.prefix_cache,
            adaptive_width=config.adaptive_width,
            engine=asdict(config),
        )

    def known_settings(self, config: EngineConfig, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """The part of `PairSession.run_settings` that is known before the models are loaded.

        An option that is `auto`, or by default depends on the device, is not in it.
        """
        identities = {role: asdict(item) for role, item in self.identities.items()}
        chosen = {
            "dtype": config.dtype, "kernels": config.kernels, "recurrent_rows": config.recurrent_rows,
            "device": config.device.partition(":")[0], "target_runtime": config.target_runtime,
            "max_model_len": config.max_model_len or "auto", "kv_dtype": config.kv_dtype,
        }  # fmt: skip
        return {
            **{f"{role}_{key}": item[key] for role, item in identities.items() for key in ("digest", "modified_ns")},
            "num_speculative_tokens": resolve_num_drafts(config, self.draft.config if self.draft is not None else None),
            "draft_sampling": config.draft_sampling,
            **({"drafting": config.drafting} if config.is_lookup else {}),
            **{name: True for name in ("draft_confidence", "row_budget") if getattr(config, name)},
            "adaptive_width": config.adaptive_width,
            **{name: getattr(config, name) for name in OF_TREES if getattr(config, name) is not None},
            "device_map": config.device_map,
            **{name: value for name, value in chosen.items() if value != "auto"},
            **({} if config.module_swaps else {"module_swaps": False}),
            **({} if config.tensor_parallel_size == 1 else {"tensor_parallel_size": config.tensor_parallel_size}),
            **self.overrides.settings,
            "chat": chat,
            "chat_template_kwargs": self.template_options,
            **params.settings,
            **{name: release_of(name) for name in ("torch", "transformers")},
            "dflash": __version__,
        }

    def check_chat(self, rows: Sequence[PromptRow], *, chat: bool) -> None:
        """Require a chat template for --chat. Print a note if the target was not trained on chats.

        Raises:
            UsageError: the target's tokenizer lacks a chat template.
        """
        if not chat or not any(row.kind == "prompt" for row in rows):
            return
        if self.tokenizer is not None and not self.tokenizer.has_template:
            raise UsageError(
                "--chat: the target's tokenizer lacks a chat template",
                id="no-chat-template",
                field="--chat",
                hint="leave --chat out, or name a target that was trained on chats",
            )
        if is_bundled(self.references["target"] or ""):
            text = "the bundled target is a base model: it continues a chat like any other text"
            console.note(Notice(text, id="chat-with-base-model"))


@dataclass(frozen=True, kw_only=True)
class PairSession(OpenedPair):
    """A loaded pair that can answer prompts."""

    llm: "LLM"

    @property
    def num_draft_tokens(self) -> int:
        """K in use; 0 for plain decoding."""
        return self.llm.num_draft_tokens

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.llm.limits.max_model_len

    def answer(
        self, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool = False, stream: Streaming | None = None
    ) -> Iterator[Event]:
        """Answer every row. `stream` runs the prompts, by default the LLM of this pair. See `answer_rows`."""
        return answer_rows(rows, params, stream=stream or self._stream, tokenizer=self.tokenizer, chat=chat)

    def _stream(
        self, prompts: list[list[int]], params: list[SamplingParams], rows: Sequence[PromptRow]
    ) -> "Iterator[Delta]":
        """Run prompts; see `Streaming`."""
        return self.llm.stream(prompts, params)

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """Return everything that decides a run's result, for the result and for --resume.

        Checkpoints are identified by their digests, independent of names and paths.
        """
        pair = self.llm.pair
        return {
            **self.known_settings(pair.config, params, chat=chat),
            "num_speculative_tokens": self.llm.num_draft_tokens,
            "max_model_len": self.llm.limits.max_model_len,
            "dtype": pair.placement.dtype_name,
            "device": self.llm.device.type,
            "device_name": device_name(self.llm.device),
            "kernels": pair.placement.kernels.name,
            "target_runtime": pair.target_runtime,
            "target_quantization": pair.target_quantization,
            **({} if pair.rounding is None else {"rounding": pair.rounding}),
            **({} if pair.recurrent_rows is None else {"recurrent_rows": pair.recurrent_rows}),
            **({"module_swaps": pair.config.module_swaps} if pair.target_runtime == "transformers" else {}),
        }

    def describe(self) -> PairRun:
        """Return further facts about this run: checkpoints by name, machine, package versions, command."""
        pair = self.llm.pair
        return self.described(pair.config, device_name(self.llm.device), pair.target_runtime, pair.target_quantization)

    def check_params(self, params: SamplingParams) -> None:
        """Refuse sampling parameters that this pair cannot apply.

        Raises:
            UsageError: more positions to verify than a block has, or a stop id outside the vocabulary.
        """
        check_params(params, num_draft_tokens=self.num_draft_tokens, vocab_size=self.target.facts.vocab_size)

    def warm_up(self, params: SamplingParams, num_prompts: int) -> None:
        """Prepare the device for this many prompts with these parameters, with a progress bar on a terminal.

        Steps with a grammar are not captured, so only a note is printed for them.
        """
        pair = self.llm.pair
        if params.grammar is not None and (pair.has_graphs or pair.config.is_async):
            text = "answers follow a grammar, so each step waits for the step before and runs without CUDA graphs"
            console.note(Notice(text, id="grammar-steps"))
        if params.grammar is not None or not pair.has_graphs:
            return
        num_told = len(self.llm.warnings)
        with bars() as display:
            task = display.add_task("preparing", figures="")

            def show(num_done: int, total: int) -> None:
                display.update(task, completed=num_done, total=total, figures=f"{num_done} of {total} steps")

            self.llm.warm_up(params, max_requests=max(1, num_prompts), progress=show)
        for text in self.llm.warnings[num_told:]:
            console.warn(text)


def open_session(
    draft: str | None,
    target: str | None,
    config: EngineConfig,
    *,
    overrides: Overrides = NO_OVERRIDES,
    template_options: str | None = None,
    threads: int | None = None,
) -> PairSession:
    """Open and load a pair. Without `threads`, the size of the pair decides the number of CPU threads.

    Raises:
        UsageError: the references do not name a pair. Opening and loading raise further errors.
    """
    opened = open_pair(draft, target, config, overrides=overrides, template_options=template_options)
    return load_session(opened, config, threads=threads)


def load_session(opened: OpenedPair, config: EngineConfig, *, threads: int | None = None) -> PairSession:
    """Load the weights of an opened pair."""
    parts = [opened.target.checkpoint, *([opened.draft.checkpoint] if opened.draft is not None else [])]
    with working("loading weights"):  # the import of torch takes seconds too
        from dflash_runtime.llm import LLM

        logger.info("CPU threads: %d", use_threads(threads, config.device, parts))
        llm = LLM(opened.target, opened.draft, config)
    logger.info("loaded onto %s as %s, K %d", llm.device, llm.dtype, llm.num_draft_tokens)
    pair = llm.pair
    logger.info(
        "engine: target runtime %s, kernels %s, graphs %s, %s scheduling, at most %d requests of %d tokens, "
        "prefix cache %s", pair.target_runtime, pair.placement.kernels.name, "on" if pair.has_graphs else "off",
        pair.config.scheduling, pair.config.max_num_requests, llm.limits.max_model_len,
        "on" if pair.config.prefix_cache else "off",
    )  # fmt: skip
    for text in llm.warnings:
        console.warn(text)
    return copy_fields(PairSession, opened, llm=llm)


def open_pair(
    draft: str | None,
    target: str | None,
    config: EngineConfig,
    *,
    params: SamplingParams | None = None,
    overrides: Overrides = NO_OVERRIDES,
    template_options: str | None = None,
) -> OpenedPair:
    """Read configs, headers and tokenizer of a pair, and check limits of `config` and `params`. Imports no torch.

    Without references: the bundled pair. A draft alone: with the target it names. A target alone: without a draft,
    if `config` asks for no draft tokens.

    Raises:
        UsageError: the references do not name a pair, or the config asks for more than the pair can do. Opening
            raises further errors.
        PairMismatch: the draft was not made for the target.
        UnsupportedError, TensorMismatch: see `refuse_early`.
    """
    needs_draft = config.num_draft_tokens != 0 and not config.is_lookup
    pair = complete_pair(draft, target, find=fetch_directory, needs_draft=needs_draft)
    draft_checkpoint = None
    if pair.draft_location is not None:
        with hinting(f"dflash validate {quote(str(pair.draft))} lists the faults of the draft"):
            draft_checkpoint = open_draft(pair.draft_location, overrides=overrides)
            draft_checkpoint.check_runnable()  # before a target is fetched
    draft_config = draft_checkpoint.config if draft_checkpoint is not None else None
    num_draft_tokens = resolve_num_drafts(config, draft_config)
    if pair.note is not None:
        console.note(pair.note)
    target_source = open_target(pair.find_target(fetch_directory))
    facts = target_source.facts
    if draft_checkpoint is not None:
        check_pair(draft_checkpoint, target_source)
    refuse_early(target_source, draft_checkpoint, config)
    if draft_checkpoint is not None:
        tell_notes(draft_checkpoint, facts)
    if facts.max_position_embeddings is not None:
        resolve_model_len(config, facts.max_position_embeddings, draft_config)
    if params is not None:
        check_params(params, num_draft_tokens=num_draft_tokens, vocab_size=facts.vocab_size)
    tokenizer = find_tokenizer(target_source.checkpoint.path, template_options)
    if params is not None and params.grammar is not None:
        params.grammar.compiled()
    return OpenedPair(
        target=target_source,
        draft=draft_checkpoint,
        tokenizer=tokenizer,
        stop_token_ids=find_stop_ids(target_source, tokenizer),
        references={"draft": pair.draft, "target": pair.target},
        overrides=overrides,
        template_options=template_options,
    )


def check_params(params: SamplingParams, *, num_draft_tokens: int, vocab_size: int) -> None:
    """Refuse sampling parameters that a pair with this number of draft tokens cannot apply.

    Raises:
        UsageError: more positions to verify than a block has, or a stop id outside the vocabulary.
    """
    block = num_draft_tokens + 1
    if params.verify_width is not None and params.verify_width > block:
        raise UsageError(field="--verify-width", found=params.verify_width, expected=f"at most {block}, the block size")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise UsageError(field="--stop-token-id", found=token, expected=f"an id in [0, {vocab_size})")


def device_name(device: "torch.device") -> str:
    """Return the GPU's name, or the processor's architecture."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def tell_notes(draft: DraftCheckpoint, target: TargetFacts) -> None:
    """Print which settings the draft's config omits, and how they are read."""
    for note in draft.parsed.notes:
        console.note(note)
    if lacks_embedding_scale(draft.stated, target):
        scale = target.embedding_scale if draft.config.has_target_scale else 1.0
        fed = f"the target's scale, {scale:.4g}" if scale != 1.0 else "scale 1"
        text = (
            f"the target scales its embedding, but the draft does not state input_embedding_scale: the draft runs with "
            f"{fed}; acceptance is low if it was trained with another scale"
        )
        console.warn(Notice(text, id="embedding-scale-not-stated"))
