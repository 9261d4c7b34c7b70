"""Check a draft with the rules of a running server's engine and release."""

import re

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.engines.serving_engine import all_engines
from dflash_cli.probing.servers.inference_server import InferenceServer


def known_faults(draft: str | None, target: str | None, server: InferenceServer) -> list[str]:
    """`C20 message` for each error that a rule finds in the draft; empty without a draft."""
    if draft is None:
        return []
    # Help pages import this module too, and must stay fast.
    from dflash_cli.checkpoints.pair_references import complete_pair
    from dflash_cli.checkpoints.references import fetch_directory
    from dflash_cli.rules.subject import ValidationPlan
    from dflash_cli.rules.validator import validate_draft

    facts = server.describe()
    pair = complete_pair(draft, target, find=fetch_directory)
    assert pair.draft_location is not None
    report = validate_draft(
        ValidationPlan(
            draft=pair.draft_location,
            draft_reference=draft,
            target=None if pair.target is None else pair.find_target(fetch_directory),
            target_reference=pair.target,
            engines=parse_engines(_name(facts.engine, facts.release)),
            level="headers",
            num_speculative_tokens=facts.num_draft_tokens,
        )
    )
    return [f"{item.id} {item.message}" for item in report.findings if item.severity == "error"]


def _name(engine: str, release: str | None) -> str:
    """`vllm@0.33` for `0.33.0+cu130`. Without a rule about that release, the name alone: the newest known release."""
    known = next((item for item in all_engines() if item.name == engine), None)
    found = re.match(r"\d{1,9}(?:\.\d{1,9})*", release or "")
    numbers = tuple(map(int, found[0].split("."))) if found else ()
    releases = known.releases if known is not None else ()
    matching = [item for item in releases if item and numbers[: len(item)] == item]
    return f"{engine}@{known.write_release(matching[-1])}" if known is not None and matching else engine
