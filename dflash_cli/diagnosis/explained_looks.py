"""Findings about tensors without findings that another one explains, or that only the looks support.

A rule states its fact about a tensor, and the facts from which its own follows (`fact` and `follows_from`). A matrix of
few levels, for example, has zeros, and rows of zeros repeat each other. `diagnose` does not name the zeros then. The
values of an FP8 copy are few (N33). They do not explain lost lines, copies, noise and sizes.

Sound matrices may look like noise. So noise is named only in a part without which the draft is better.
"""

import re
from collections.abc import Sequence, Set
from dataclasses import replace

from dflash_cli.diagnosis.weight_rewrites import Spot
from dflash_cli.rules.rule import Finding

LAYER = re.compile(r"layers\.(\d{1,9})\.(.*)")


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, each at the tensors where no other finding explains its fact. Findings without such a tensor go."""
    kept = []
    for item in findings:
        explaining = [other for other in findings if other.fact in item.follows_from]
        explained = {place for other in explaining for place in (other.location, *other.also)}
        kept += _at(item, [place for place in (item.location, *item.also) if place not in explained])
    return kept


def proven(findings: Sequence[Finding], harmful: Set[Spot]) -> list[Finding]:
    """The findings, those about noise at the tensors that harm. Findings without such a tensor go."""
    kept = []
    for item in findings:
        places = (item.location, *item.also)
        kept += _at(item, [at for at in places if item.fact != "noise" or _harms(spot_of(at), harmful)])
    return kept


def spot_of(location: str) -> Spot:
    """The part and the layer of a tensor."""
    tensor = location.partition(":")[2].removesuffix(".weight")
    found = LAYER.match(tensor)
    return (tensor, None) if found is None else (found[2], int(found[1]))


def _harms(spot: Spot, harmful: Set[Spot]) -> bool:
    """Whether a part harms. Tables outside layers are left out together."""
    part, layer = spot
    if layer is not None:
        return spot in harmful
    return any(at is None and name.partition(".")[0] == part.partition(".")[0] for name, at in harmful)


def _at(finding: Finding, places: Sequence[str]) -> list[Finding]:
    """The finding at these of its tensors; nothing without one."""
    return [replace(finding, location=places[0], also=tuple(places[1:]))] if places else []
