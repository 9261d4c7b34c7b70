"""The figures of a report as one picture, drawn with matplotlib, which is an extra."""

import io
from collections.abc import Sequence
from typing import Any

from dflash_cli.acceptance.acceptance_report import headline
from dflash_cli.comparing.comparison_report import letter
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_cli.publishing.figures import Figure, find_figures
from dflash_runtime.errors import UnsupportedError

COLOURS = ("#1f66c1", "#b4530a", "#137a55", "#8a3ab9", "#a81d4a", "#5b6770")
MARKS = "osD"
INCHES, DOTS = 6.4, 150


def to_png(results: Sequence[StoredEvaluation]) -> bytes:
    """The figures in two columns, under the headline of each result.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise UnsupportedError(
            "a PNG is drawn with matplotlib, which is not installed", hint="pip install 'dflash-cli[plot]'"
        ) from error
    figures = find_figures(results)
    num_rows = (len(figures) + 1) // 2
    canvas = Canvas(figsize=(2 * INCHES, 0.3 * len(results) + 4.2 * num_rows), layout="constrained")
    heads = [f"{letter(place)}  {item.name}: {headline(item.evaluation)}" for place, item in enumerate(results)]
    canvas.suptitle("\n".join(heads), x=0.01, ha="left", fontsize=11)
    axes = canvas.subplots(num_rows, 2, squeeze=False).ravel()
    for place, ax in enumerate(axes):
        if place < len(figures):
            _draw(ax, figures[place])
        else:
            ax.set_axis_off()
    stream = io.BytesIO()
    canvas.savefig(stream, format="png", dpi=DOTS, metadata={"Software": None})
    return stream.getvalue()


def _draw(ax: Any, figure: Figure) -> None:
    ax.set_title(figure.title, loc="left", fontsize=10)
    ax.set_xlabel(figure.axis)
    ax.grid(alpha=0.25)
    {"curve": _curves, "bars": _bars, "dots": _dots}[figure.kind](ax, figure)
    if len(figure.series) > 1:
        ax.legend(frameon=False)


def _curves(ax: Any, figure: Figure) -> None:
    for index, series in enumerate(figure.series):
        known = [(place, point) for place, point in enumerate(series.points) if point is not None]
        places, values = [place for place, _ in known], [point.value for _, point in known]
        ax.plot(places, values, color=_colour(index), marker=_mark(index), markersize=4, label=series.name)
        banded = [(place, point.interval) for place, point in known if point.interval is not None]
        ax.fill_between(
            [place for place, _ in banded],
            [interval.low for _, interval in banded],
            [interval.high for _, interval in banded],
            color=_colour(index),
            alpha=0.18,
            linewidth=0,
        )
    ax.set_ylim(figure.low, figure.high)
    ax.set_xticks(range(len(figure.labels)), figure.labels)


def _bars(ax: Any, figure: Figure) -> None:
    width = 0.8 / len(figure.series)
    for index, series in enumerate(figure.series):
        shift = (index - (len(figure.series) - 1) / 2) * width
        known = [(place + shift, point.value) for place, point in enumerate(series.points) if point is not None]
        ax.bar(
            [place for place, _ in known],
            [value for _, value in known],
            width,
            color=_colour(index),
            label=series.name,
        )
    ax.set_ylim(figure.low, figure.high)
    ax.set_xticks(range(len(figure.labels)), figure.labels)


def _dots(ax: Any, figure: Figure) -> None:
    for index, series in enumerate(figure.series):
        shift = (index - (len(figure.series) - 1) / 2) * 0.18
        known = [(place + shift, point) for place, point in enumerate(series.points) if point is not None]
        heights, values = [height for height, _ in known], [point.value for _, point in known]
        ax.scatter(values, heights, color=_colour(index), marker=_mark(index), s=22, label=series.name)
        for height, point in known:
            if point.interval is not None:
                ax.hlines(height, point.interval.low, point.interval.high, color=_colour(index))
    ax.set_xlim(figure.low, figure.high)
    ax.set_yticks(range(len(figure.labels)), figure.labels)
    ax.invert_yaxis()


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _mark(index: int) -> str:
    return MARKS[index % len(MARKS)]
