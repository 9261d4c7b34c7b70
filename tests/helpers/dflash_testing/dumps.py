"""Dumps of the bundled target, and the bundled drafts replayed on them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_cli.acceptance.dumps.dump_format import Dump, open_dump
from dflash_cli.acceptance.dumps.dump_writer import DumpPlan, write_dump
from dflash_cli.acceptance.replay import Replay, Replayed
from dflash_cli.acceptance.replay_request import ReplayRequest
from dflash_cli.checkpoints.opening import DraftCheckpoint, open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory, tiny_directory
from dflash_cli.generation.loaded_pair import open_session
from dflash_cli.generation.prompts import PromptRow, gather_rows
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.scheduling.sampling_params import SamplingParams

TAPS = (0, 2, 3, 4)
EXACT = EngineConfig(device="cpu", dtype="float64")
"""In float64, where batches of other shapes give the same tokens."""


def rows_of(prompts: Sequence[Sequence[int]]) -> list[PromptRow]:
    return [
        PromptRow(index=index, kind="prompt_token_ids", value=list(ids), category="ab"[index % 2])
        for index, ids in enumerate(prompts)
    ]


def bundled_rows(count: int) -> list[PromptRow]:
    return gather_rows([], str(tiny_directory() / "prompts.jsonl"))[:count]


def dump_to(
    folder: Path, rows: Sequence[PromptRow], params: SamplingParams, config: EngineConfig = EXACT, **changes: Any
) -> Dump:
    session = open_session(None, TINY, replace(config, num_draft_tokens=0))
    request: dict[str, Any] = {"rows": rows, "params": params, "taps": TAPS, "folder": folder, "num_overhang": 8}
    summary = write_dump(session, DumpPlan(**request | changes), lambda event: None)
    assert not summary.failed
    return open_dump(folder)


def draft_of(name: str, **changes: Any) -> DraftCheckpoint:
    draft = open_draft(fetch_directory(name, Role.DRAFT))
    return replace(draft, parsed=replace(draft.parsed, config=replace(draft.config, **changes)))


def request_for(dump: Dump, name: str = TINY, config: EngineConfig = EXACT, **changes: Any) -> ReplayRequest:
    draft = changes.pop("draft", None) or draft_of(name)
    target = open_target(fetch_directory(TINY, Role.TARGET))
    return ReplayRequest(draft=draft, draft_reference=name, dump=dump, head_from=target, config=config, **changes)


def replayed(request: ReplayRequest) -> list[Replayed]:
    return sorted(Replay(request).run(), key=lambda item: (item.text.row.index, item.text.turn))
