"""The figure of differences by draft position, for reports and notebooks."""

from collections.abc import Sequence

from dflash_cli.acceptance.intervals.statistics import value_text
from dflash_cli.comparing.comparison_report import position_finding
from dflash_cli.comparing.contrasts import PositionContrast
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.figures.figure import Figure, Point, Series

ROOM = 1.15
"""The axis of values is longer than the largest difference by this factor."""


def difference_figures(comparisons: Sequence[Comparison]) -> list[Figure]:
    """Return the figure of differences by position; none if no comparison has positions."""
    shown = [item for item in comparisons if item.positions]
    if not shown:
        return []
    most = max(len(item.positions) for item in shown)
    series = tuple(
        Series(
            f"{item.other.name} minus {item.base.name}",
            tuple(map(_point, item.positions)) + (None,) * (most - len(item.positions)),
        )
        for item in shown
    )
    ends = [abs(end) for item in series for point in item.points if point is not None for end in point.extent]
    limit = ROOM * max(*ends, 0.01)
    found = "; ".join(f"{item.other.name}: {position_finding(item)}" for item in shown)
    figure = Figure(
        name="differences",
        kind="curve",
        title="Difference by position",
        caption="Difference of the share of verify steps that accept a position and all before it. The band is the "
        f"interval over prompts, where enough prompts differ. {found}.",
        axis="draft position",
        value_axis="difference of shares",
        labels=tuple(str(position) for position in range(1, most + 1)),
        series=series,
        low=-limit,
        high=limit,
    )
    return [figure]


def _point(line: PositionContrast) -> Point | None:
    if line.difference is None:
        return None
    ends = (line.interval.low, line.interval.high) if line.interval is not None else None
    return Point(value=line.difference, ends=ends, text=value_text(line.difference, line.interval, "+.3f"))
