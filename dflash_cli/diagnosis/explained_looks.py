"""Findings about tensors without findings that another one explains.

A rule states its fact about a tensor, and the facts from which its own follows (`fact` and `follows_from`). A matrix of
few levels, for example, has zeros, and rows of zeros repeat each other. `diagnose` does not name the zeros then. The
values of an FP8 copy are few (N33). They do not explain lost lines, copies, noise and sizes.
"""

from collections.abc import Sequence
from dataclasses import replace

from dflash_cli.rules.rule import Finding


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, each at the tensors where no other finding explains its fact. Findings without such a tensor go."""
    kept = []
    for item in findings:
        explaining = [other for other in findings if other.fact in item.follows_from]
        explained = {place for other in explaining for place in (other.location, *other.also)}
        left = [place for place in (item.location, *item.also) if place not in explained]
        if left:
            kept.append(replace(item, location=left[0], also=tuple(left[1:])))
    return kept
