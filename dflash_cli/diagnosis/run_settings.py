"""Settings of the run level. Prompts are read and the tokenizer is loaded only when a pair is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_runtime.config import EngineConfig

if TYPE_CHECKING:
    from dflash_cli.diagnosis.readings import Observe, SearchBudget

MAX_NUM_REQUESTS = 32
NUM_MADE_UP = 32


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of the run level. `prompts` returns token ids, or None to have prompts made up."""

    config: EngineConfig
    budget: "SearchBudget"
    observe: "Observe"
    prompts: Callable[[], Sequence[Sequence[int]] | None] = lambda: None


def run_settings(
    target: Path,
    *,
    prompts: str | Sequence[Sequence[int]] | None,
    num_prompts: int | None,
    max_new_tokens: int,
    device: str,
    observe: "Observe",
    target_runtime: str = "auto",
    device_map: str | None = None,
) -> RunSettings:
    """The settings of a run with the target in a directory, from what a user typed.

    `prompts` names a file, or are token ids. `num_prompts` counts the prompts to make up, or of a file those to draw
    from it: all where it is None.
    """
    from dflash_cli.diagnosis.readings import SearchBudget

    return RunSettings(
        EngineConfig(
            device=device, target_runtime=target_runtime, device_map=device_map, max_num_requests=MAX_NUM_REQUESTS
        ),
        SearchBudget(num_prompts=num_prompts or NUM_MADE_UP, max_new_tokens=max_new_tokens),
        observe,
        lambda: _read_prompts(prompts, num_prompts, target) if isinstance(prompts, str) else prompts,
    )


def _read_prompts(prompts: str, num_prompts: int | None, target: Path) -> list[list[int]]:
    from dflash_cli.generation.prompts import Conversation, gather_rows, sample_rows
    from dflash_cli.generation.tokenizer import find_tokenizer

    rows = gather_rows([], prompts)
    if num_prompts is not None:
        rows = sample_rows(rows, num_prompts, seed=0)
    has_text = any(row.kind != "prompt_token_ids" for row in rows)
    tokenizer = find_tokenizer(target, None) if has_text else None
    return [Conversation(row).next_prompt(tokenizer, chat=False) for row in rows]
