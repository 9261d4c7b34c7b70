"""Which looks at tensors explain others: the fact of one look follows from the fact of another at the same tensor.

`diagnose` does not name an explained look. A matrix of few levels, for example, has zeros, and rows of zeros repeat each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dflash_cli.rules.rule import Finding

ZEROS, CONSTANT, COPY = "N13", "N19", "N17"
OFFSETS, ZERO_LINES, FEW_VALUES, GRID = "N31", "N32", "N33", "N42"
SIZES, CLIPPED, ONE_SIGN, FORMAT = "N36", "N38", "N40", "N41"

EXPLAINED_BY: Mapping[str, frozenset[str]] = {
    "N14": frozenset({ZEROS}),
    COPY: frozenset({ZEROS, CONSTANT}),
    ZERO_LINES: frozenset({GRID}),
    "N34": frozenset({ZEROS, CONSTANT, ZERO_LINES, FEW_VALUES, GRID}),
    "N35": frozenset({OFFSETS}),
    SIZES: frozenset({ZEROS, CONSTANT, OFFSETS, CLIPPED, ONE_SIGN, FORMAT, GRID}),
    "N37": frozenset({ZEROS, CONSTANT, COPY, GRID}),
    CLIPPED: frozenset({CONSTANT, FEW_VALUES, FORMAT, GRID}),
    "N39": frozenset({ZEROS, CONSTANT, "N14", GRID}),
    ONE_SIGN: frozenset({CONSTANT, GRID}),
    FORMAT: frozenset({CONSTANT, GRID}),
    "N43": frozenset({ZEROS, "N14", ZERO_LINES, FEW_VALUES, GRID}),
}
"""Look -> the looks with facts from which its own fact follows. docs/explanation/faults.md gives the reasons.

The values of an FP8 copy are few (N33). They do not explain lost lines, copies, noise and sizes.
"""


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, each at the tensors where no other look explains its fact. Findings without such a tensor go."""
    kept = []
    for item in findings:
        explaining = [other for other in findings if other.id in EXPLAINED_BY.get(item.id, ())]
        explained = {place for other in explaining for place in (other.location, *other.also)}
        left = [place for place in (item.location, *item.also) if place not in explained]
        if left:
            kept.append(replace(item, location=left[0], also=tuple(left[1:])))
    return kept
