"""Power and clock of the GPU while an engine runs, sampled in the same way for every engine.

One `nvidia-smi` samples from start to end, beside all arms. Every arm tells the wall-clock times of its measured spans,
without starts and warm-ups, and `over` averages the samples in these spans.
"""

import ctypes
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from timing.report import say

PERIOD_MS = 50
LONGEST_WAIT_S = 8.0
"""The most seconds to wait for the samples of a span that has just ended."""

PR_SET_PDEATHSIG = 1
"""The operation of `prctl` in Linux."""

Span = tuple[float, float]
"""Wall-clock seconds of the begin and the end of a measurement, as `time.time()` gives them."""


@dataclass(frozen=True)
class Sample:
    """Watts of the GPU and MHz of its multiprocessors at a time, in seconds of the wall clock."""

    at: float
    watts: float
    mhz: float


@dataclass(frozen=True)
class Readings:
    """Means over the samples of a measurement. Without samples, watts and MHz are None."""

    watts: float | None = None
    mhz: float | None = None
    num_samples: int = 0

    def fields(self, **seconds: float | None) -> dict[str, Any]:
        """The fields of a row. With `step` the seconds that a step takes, `joules_per_step` is the energy of a step."""
        found: dict[str, Any] = {"watts": self.watts, "mhz": self.mhz, "power_samples": self.num_samples}
        for name, value in seconds.items():
            found[f"joules_per_{name}"] = self.watts * value if self.watts is not None and value is not None else None
        return found


class Gauges:
    """Samples of one GPU, as a context manager. They need `nvidia-smi`; a CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[Sample] = []
        self._sampler: subprocess.Popen[bytes] | None = None
        self._read_bytes = 0

    def __enter__(self) -> Self:
        if self._device.type == "cuda" and (program := shutil.which("nvidia-smi")) is not None:
            self._folder = tempfile.TemporaryDirectory()
            self._path = Path(self._folder.name) / "samples.csv"
            query = ["--query-gpu=timestamp,power.draw.instant,clocks.sm", "--format=csv,noheader,nounits"]
            line_by_line = ["stdbuf", "-oL"] if shutil.which("stdbuf") else []
            command = [*line_by_line, program, "-i", _smi_name(self._device), *query, "-lms", str(PERIOD_MS)]
            with self._path.open("wb") as stream:
                self._sampler = subprocess.Popen(
                    command, stdout=stream, stderr=subprocess.STDOUT, preexec_fn=_end_with_parent
                )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._sampler is not None:
            self._sampler.terminate()
            self._sampler.wait()
            self._folder.cleanup()

    def over(self, spans: Sequence[Span]) -> Readings:
        """Average the samples in the spans. Waits for samples that are still on their way."""
        if self._sampler is None or self._sampler.returncode is not None or not spans:
            return Readings()
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not self._has_passed(max(end for _, end in spans)) and time.monotonic() < deadline:
            if self._sampler.poll() is not None:
                said = self._path.read_text(errors="replace").strip()
                say(f"power: no longer sampled, nvidia-smi ended: {said[-200:]}")
                break
            time.sleep(PERIOD_MS / 1000)
        found = [item for item in self._samples if any(begin <= item.at <= end for begin, end in spans)]
        if not found:
            return Readings()
        watts, mhz = statistics.fmean(item.watts for item in found), statistics.fmean(item.mhz for item in found)
        return Readings(watts, mhz, len(found))

    def _has_passed(self, end: float) -> bool:
        """Read new samples -> whether one is later than `end`."""
        with self._path.open("rb") as stream:
            stream.seek(self._read_bytes)
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        self._samples += [item for line in whole.decode(errors="replace").splitlines() if (item := _parse(line))]
        return bool(self._samples) and self._samples[-1].at > end


def _parse(line: str) -> Sample | None:
    """A line such as `2026/11/02 10:30:45.123, 612.40, 1755`. None for another line, such as one with `[N/A]`."""
    try:
        at, watts, mhz = line.split(",")
        return Sample(datetime.strptime(at.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(watts), float(mhz))
    except ValueError:
        return None


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _smi_name(device: torch.device) -> str:
    """The name by which `nvidia-smi` knows a device, which sees all GPUs where torch sees the visible ones."""
    visible, index = os.environ.get("CUDA_VISIBLE_DEVICES"), device.index or 0
    return visible.split(",")[index].strip() if visible else str(index)
