"""Engines that `dflash validate --engine` knows, by name and release."""

import difflib
import re
from dataclasses import dataclass

from dflash_runtime.errors import UsageError

KNOWN = {"vllm": (0, 33, 0), "sglang": (0, 5, 23)}
"""Engine -> the release whose source the rules were written from, which is assumed where none is given."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine. `release` compares as a tuple."""

    name: str
    release: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.release))}"


def parse_engines(text: str | None) -> tuple[Engine, ...]:
    """Read `vllm@0.33,sglang`.

    Raises:
        UsageError: an engine that is not known, or a release that is not one.
    """
    if not text:
        return ()
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(text: str) -> Engine:
    name, _, release = text.partition("@")
    if name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"--engine: unknown engine {name!r}{guess} (known: {', '.join(sorted(KNOWN))})")
    if not release:
        return Engine(name, KNOWN[name])
    if not re.fullmatch(r"\d+(\.\d+)*", release):
        raise UsageError(f"--engine: {release!r} is no release of {name}, expected for example {name}@0.33")
    numbers = tuple(int(part) for part in release.split("."))
    return Engine(name, numbers + (0,) * (3 - len(numbers)))
