"""What rules say of a pair on the engine of a running server, at the release that the server states."""

import re

from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import fetch_directory
from dflash_cli.engines.serving_engine import all_engines, parse_engines
from dflash_cli.validation.validator import ValidationRequest, validate_draft


def served_faults(
    draft: str,
    target: str | None,
    engine: str,
    release: str | None,
    *,
    num_draft_tokens: int | None = None,
) -> list[str]:
    """`C20 message` of each rule that finds an error; a release that no rule speaks of is judged as the newest."""
    pair = complete_pair(draft, target, find=fetch_directory)
    assert pair.draft_location is not None
    report = validate_draft(
        ValidationRequest(
            draft=pair.draft_location,
            draft_reference=draft,
            target=None if pair.target is None else pair.find_target(fetch_directory),
            target_reference=pair.target,
            engines=parse_engines(_name(engine, release)),
            level="headers",
            num_speculative_tokens=num_draft_tokens,
        )
    )
    return [f"{item.id} {item.message}" for item in report.findings if item.severity == "error"]


def _name(engine: str, release: str | None) -> str:
    """`vllm@0.33` of vllm and `0.33.0+cu130`, or the name alone."""
    known = next(item for item in all_engines() if item.name == engine)
    found = re.match(r"\d+(?:\.\d+)*", release or "")
    numbers = tuple(int(part) for part in found[0].split(".")) if found else ()
    for item in reversed(known.releases):
        if item and numbers[: len(item)] == item:
            return f"{engine}@{'.'.join(map(str, item))}"
    return engine
