"""Results as JSON lines while they arrive, and as tables, text waterfalls and a picture at the end."""

import gc
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

SCHEMA = "dflash-benchmark/1"
Row = dict[str, Any]


class Recorder:
    """Rows in memory. With a path, each row is written at once as a JSON line, so that an interrupted run keeps its
    rows.

    Each row has the schema, kind, date, machine, versions and command. As a context manager it closes the file.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.num_failures = 0
        self._common = {"machine": machine(device), "versions": versions(), "command": " ".join(sys.argv)}
        self._stream = path.open("w", encoding="utf-8") if path is not None else None

    def add(self, kind: str, row: Mapping[str, Any]) -> None:
        """Keep a result and write it."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.rows.append({"schema": SCHEMA, "kind": kind, "date": date, **row, **self._common})
        if self._stream is not None:
            self._stream.write(json.dumps(self.rows[-1]) + "\n")
            self._stream.flush()

    def guard(self, what: Mapping[str, Any], call: Callable[[], None]) -> None:
        """Run one part. An exception becomes a failure row and one line on stderr."""
        try:
            call()
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            self.num_failures += 1
            self.add("failure", {**what, "what": describe(what), "error": text})
            say(f"{describe(what)} failed: {text}")
        finally:
            release()

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()


def release() -> None:
    """Free the device memory of deleted objects. An engine and its graphs refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def last_errors(log: str, count: int = 1) -> str:
    """The last lines of a log that name an error, or else its last lines."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return " | ".join((errors or lines or ["the log is empty"])[-count:])


def describe(what: Mapping[str, Any]) -> str:
    """`dflash, batch 8, context 512`."""
    return ", ".join(str(value) if key == "arm" else f"{key} {value}" for key, value in what.items())


def machine(device: torch.device) -> Row:
    """The machine of the measurement."""
    facts: Row = {"device": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts |= {"device": found.name, "memory_bytes": found.total_memory, "cuda": torch.version.cuda}
    return facts


def versions() -> dict[str, str | None]:
    """Versions of the packages that affect times."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "dflash-cli"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned text: numbers to the right, None as a dash."""
    shown = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[index]) for line in [list(columns), *shown]) for index in range(len(columns))]
    rights = [not any(isinstance(row[index], str) for row in rows) for index in range(len(columns))]
    lines = []
    for line in [list(columns), *shown]:
        cells = zip(line, widths, rights, strict=True)
        lines.append("  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in cells).rstrip())
    return "\n".join(lines)


def waterfall_text(title: str, levels: Sequence[tuple[str, float]], width: int = 48) -> str:
    """One line per level, with its difference from the level before."""
    most = max(value for _, value in levels)
    lines, before = [title], 0.0
    for name, value in levels:
        bar = "#" * max(1, round(width * value / most))
        lines.append(f"  {name:32} {value:8.3f} ms  {value - before:+8.3f}  {bar}")
        before = value
    return "\n".join(lines)


def plot_waterfalls(path: Path, falls: Mapping[str, Sequence[tuple[str, float]]]) -> None:
    """Draw all waterfalls in one picture. Without matplotlib, print one line instead."""
    try:
        import matplotlib
    except ImportError:
        say(f"{path}: not drawn because matplotlib is not installed; the text above has the same values")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(falls), 1, figsize=(9, 2.6 * len(falls)), squeeze=False)
    for axis, (title, levels) in zip(axes[:, 0], falls.items(), strict=True):
        names = [name for name, _ in levels]
        ends = [value for _, value in levels]
        starts = [0.0, *ends[:-1]]
        for index, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            color = "#4878a8" if index == 0 else "#c0673f" if end >= begin else "#6f9f58"
            axis.barh(index, end - begin, left=begin, color=color)
            axis.text(max(begin, end), index, f" {end:.2f}", va="center", fontsize=8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("milliseconds", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    say(f"drew {path}")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
