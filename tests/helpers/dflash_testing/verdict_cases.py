"""Open the cases of recorded verdicts as drafts with headers and without weights."""

from pathlib import Path
from typing import Any

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.subject import Subject, ValidationPlan, open_subject
from dflash_testing import config_cases
from dflash_testing.config_cases import ConfigCase
from dflash_testing.family_cases import FamilyCase
from dflash_testing.published_pairs import write_headers

NEWEST = "vllm 0.33.0"


def write_target(path: Path) -> Path:
    """A target's config and the header of its embedding."""
    shape = config_cases.SHAPE
    write_headers(path, config_cases.TARGET, {"model.embed_tokens.weight": ("F32", (shape.vocab, shape.hidden))})
    return path


def open_case(case: ConfigCase | FamilyCase, target: Path, engines: str) -> Subject:
    """The case as a draft beside the target."""
    draft = target.parent / f"draft-{len(list(target.parent.iterdir()))}"
    write_headers(draft, case.config, {name: ("F32", shape) for name, shape in case.shapes.items()})
    return open_subject(ValidationPlan(draft=draft, target=target, engines=parse_engines(engines)))


def plain(value: Any) -> Any:
    """A value in which tuples are lists, as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
