"""Settings of the run level. Does not import torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.diagnosis.answered_prompts import check_number
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.diagnosis.diagnosis_options import DiagnosisOptions

MAX_NUM_REQUESTS = 32
NUM_MADE_UP = 32


Observe = Callable[[str, int, int], None]
"""Callback with the name of the reading that starts, the number of finished readings, and the number of readings."""


@dataclass(frozen=True, slots=True)
class ExpectedFigure:
    """The acceptance length that the user expects of a draft, and where the figure comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Score:
    """Means over blocks along known texts.

    accepted   tokens per block, the target's own token included
    expected   the same as the draft's own probabilities foretell it
    loss       nats per drafted token of the text; later positions weigh less, as in training
    """

    accepted: float
    expected: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """How much to run.

    num_prompts       prompts that choose a reading
    max_new_tokens    tokens that each prompt is continued by
    start_len         random ids at the start of a prompt, if the user gives no prompts
    lead_len          sampled tokens after the start of a prompt
    factors           the settings to change (`AlternativeReading.factor`); None changes every one
    """

    num_prompts: int = 32
    max_new_tokens: int = 96
    start_len: int = 8
    lead_len: int = 48
    seed: int = 0
    factors: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of the run level. `prompts` are token ids, or None to make prompts from random ids.

    `make_runner` replaces `ReadingRunner`, so that many drafts of one target share what depends on the target only.
    """

    config: EngineConfig
    budget: SearchBudget
    observe: Observe = lambda name, num_done, total: None
    prompts: Sequence[Sequence[int]] | None = None
    expected: ExpectedFigure | None = None
    make_runner: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.prompts is not None:
            check_number(self.prompts)


def run_settings(target: Path, request: "DiagnosisOptions") -> RunSettings:
    """The settings of a run with the target in a directory. Without given prompts, prompts are made from random ids.

    Raises:
        CheckpointNotFound, UsageError: a file cannot be read, or lacks prompts or a figure.
    """
    return RunSettings(
        EngineConfig(
            device=request.device,
            target_runtime=request.target_runtime,
            device_map=request.device_map,
            max_num_requests=MAX_NUM_REQUESTS,
        ),
        SearchBudget(num_prompts=request.num_prompts or NUM_MADE_UP, max_new_tokens=request.max_new_tokens),
        prompts=_read_prompts(request, target),
        expected=read_expected(request.expected) if request.expected is not None else None,
    )


def read_expected(given: str) -> ExpectedFigure:
    """The acceptance length that a number states, or a file: a result, a model card or a profile.

    Raises:
        UsageError: a number below 1, or a file without a figure.
        CheckpointNotFound: neither a number nor a file.
    """
    from dflash_cli.comparing.stated_figure import read_stated_figure

    try:
        value, source = float(given), "--expected"
    except ValueError:
        value, source = read_stated_figure(Path(given)), Path(given).name
    if not 1 < value < math.inf:
        raise UsageError(
            f"--expected {given}: found {value:g}, expected more than 1 token per step",
            id="expected-out-of-range",
            field="--expected",
            found=given,
            expected="more than 1",
        )
    return ExpectedFigure(value, source)


def _read_prompts(request: "DiagnosisOptions", target: Path) -> list[list[int]] | None:
    """Token ids of the given prompts; None if none are given."""
    from dflash_cli.acceptance.prompt_choice import choose_rows
    from dflash_cli.generation.prompt_sets import read_prompts
    from dflash_cli.generation.prompts import Conversation
    from dflash_cli.generation.tokenizer import find_tokenizer

    given = read_prompts(request.prompts, request.dataset, request.dataset_format, count=request.num_prompts)
    if given is None:
        return None
    has_text = any(row.kind != "prompt_token_ids" for row in given.rows)
    tokenizer = find_tokenizer(target, request.template_options) if has_text else None
    choice = choose_rows(given, tokenizer, chat=request.chat, count=request.num_prompts, sample=request.sample)
    return [Conversation(row).next_prompt(tokenizer, chat=choice.chat) for row in choice.rows]
