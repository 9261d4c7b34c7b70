"""Serving settings of each engine for the best K, and for the best K of each range of batch sizes."""

from dataclasses import dataclass, replace
from typing import Annotated

from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import find_checkpoint
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.engines.pair_serving import JudgedPair, judge_pair
from dflash_cli.engines.serving_engine import ServingEngine

Schedule = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine's settings for a tuned pair, or its reason not to serve the pair."""

    engine: str
    text: Annotated[str | None, "the command, or settings for a file"] = None
    refusal: Annotated[str | None, "why the engine would not serve the pair"] = None


def tuned_engines(
    engines: str, draft: str, target: str, num_draft_tokens: int, schedule: Schedule
) -> list[EngineSettings]:
    """Return the settings, or the refusal, of each engine in a list such as `vllm,sglang`.

    A schedule with the same K for all batch sizes is left out.
    """
    several = schedule if len(schedule) > 1 else ()
    pair = complete_pair(draft, target, find=find_checkpoint)
    named = parse_engines(engines)
    judged = judge_pair(pair, named, num_draft_tokens)
    return [_row(engine, judged, several) for engine in named]


def _row(engine: ServingEngine, judged: JudgedPair, schedule: Schedule) -> EngineSettings:
    refusal = judged.refusals[engine.name]
    if refusal is not None:
        return EngineSettings(str(engine), refusal=refusal.message)
    served = replace(judged.served, schedule=schedule)
    return EngineSettings(str(engine), engine.serve_command(served).text)
