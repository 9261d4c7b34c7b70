"""Open a pair for running: resolve references, load the models, find the tokenizer and the stop tokens."""

import logging
from dataclasses import asdict, dataclass
from typing import Any

from dflash_cli import console
from dflash_cli.checkpoints.opening import Causality, DraftCheckpoint, open_draft, open_target
from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import fetch_directory
from dflash_cli.generation.threads import use_threads
from dflash_cli.generation.tokenizer import Tokenizer, find_tokenizer
from dflash_cli.version import __version__
from dflash_runtime.checkpoint.hf_config import read_token_ids
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PairSession:
    """A pair that is loaded and can answer prompts. `draft` is None when decoding plainly."""

    llm: LLM
    target: TargetSource
    draft: DraftCheckpoint | None
    tokenizer: Tokenizer | None
    stop_token_ids: tuple[int, ...]
    references: dict[str, str | None]
    causality: Causality | None = None
    template_options: str | None = None

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """Everything that decides what a run produces, for results and for resuming."""
        import torch

        return {
            **self.references,
            "num_speculative_tokens": self.llm.num_draft_tokens,
            "max_model_len": self.llm.limits.max_model_len,
            "dtype": str(self.llm.dtype).removeprefix("torch."),
            "device": self.llm.device.type,
            "causality": self.causality,
            "chat": chat,
            "chat_template_kwargs": self.template_options,
            **asdict(params),
            "stop_token_ids": list(params.stop_token_ids),
            "dflash": __version__,
            "torch": torch.__version__,
        }


def open_session(
    draft: str | None,
    target: str | None,
    config: EngineConfig,
    *,
    causality: Causality | None = None,
    template_options: str | None = None,
    threads: int | None = None,
) -> PairSession:
    """Load a pair. Without `threads` its size decides how many the CPU uses.

    Neither reference: the bundled pair. A draft alone: the target it names. A target alone: only with K = 0.

    Raises:
        UsageError: a combination that names no pair; and whatever opening and loading raise.
    """
    pair = complete_pair(draft, target, find=fetch_directory, needs_draft=config.num_draft_tokens != 0)
    draft_checkpoint = None
    if pair.draft_location is not None:
        draft_checkpoint = open_draft(pair.draft_location, causality=causality)
        draft_checkpoint.check_runnable()
    if pair.note is not None:
        console.note(pair.note)
    target_source = open_target(pair.find_target(fetch_directory))
    if draft_checkpoint is not None:
        for text in draft_checkpoint.parsed.notes:
            console.note(text)
    checkpoints = [target_source.checkpoint, *([draft_checkpoint.checkpoint] if draft_checkpoint is not None else [])]
    logger.info("running on %d CPU threads", use_threads(threads, config.device, checkpoints))
    with console.working("loading weights"):
        llm = LLM(target_source, draft_checkpoint, config)
    logger.info("loaded onto %s as %s, K %d", llm.device, llm.dtype, llm.num_draft_tokens)
    for text in llm.warnings:
        console.warn(text)
    tokenizer = find_tokenizer(target_source.checkpoint.path, template_options)
    return PairSession(
        llm=llm,
        target=target_source,
        draft=draft_checkpoint,
        tokenizer=tokenizer,
        stop_token_ids=_stop_token_ids(target_source, tokenizer),
        references={"draft": pair.draft, "target": pair.target},
        causality=causality,
        template_options=template_options,
    )


def _stop_token_ids(target: TargetSource, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a text: of the generation config, the config and the tokenizer."""
    generation = target.checkpoint.read_optional_json("generation_config.json") or {}
    ids = set(read_token_ids(generation.get("eos_token_id"))) | set(target.config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))
