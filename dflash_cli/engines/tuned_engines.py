"""What engines are told of a K that was found best, and of one for each range of batch sizes."""

from typing import Any

from dflash_cli.checkpoints.pair_references import complete_pair, served_name
from dflash_cli.checkpoints.references import find_checkpoint
from dflash_cli.engines.served_pair import engine_settings
from dflash_cli.engines.serving_engine import ServeCommand, parse_engines
from dflash_cli.engines.tensorrt_llm import NAME as TENSORRT_LLM
from dflash_cli.engines.tensorrt_llm import speculative_settings, without
from dflash_cli.validation.validator import ValidationRequest

Schedule = tuple[tuple[int, int, int], ...]


def tuned_engines(
    engines: str, draft: str, target: str, num_draft_tokens: int, schedule: Schedule
) -> list[dict[str, Any]]:
    """For each engine of `vllm,tensorrt-llm` the settings as text, or why it would not serve the pair.

    A schedule that has one K for all batch sizes is none.
    """
    several = schedule if len(schedule) > 1 else ()
    pair = complete_pair(draft, target, find=find_checkpoint)
    location, target_location = pair.draft_location, pair.find_target(find_checkpoint)
    assert location is not None
    request = ValidationRequest(
        draft=location,
        draft_reference=draft,
        target=target_location,
        target_reference=target,
        engines=parse_engines(without(engines)),
        num_speculative_tokens=num_draft_tokens,
    )
    found = engine_settings(request, served_name(target, target_location), several) if request.engines else {}
    rows: list[dict[str, Any]] = [
        {"engine": str(engine), "text": item.text, "refusal": None}
        if isinstance(item, ServeCommand)
        else {"engine": str(engine), "text": None, "refusal": item.message}
        for engine, item in found.items()
    ]
    if without(engines) != engines:
        text = speculative_settings(served_name(draft, location), num_draft_tokens, several)
        rows.append({"engine": TENSORRT_LLM, "text": text, "refusal": None})
    return rows
