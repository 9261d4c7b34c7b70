"""Engines that `--engine` knows, by name and release."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_runtime.errors import UsageError

Release = tuple[int, ...]

RELEASES: Mapping[str, tuple[Release, ...]] = {
    "vllm": tuple((0, minor) for minor in range(24, 34)),
    "sglang": ((0, 5, 23),),
    "transformers": ((5, 23),),
    "llama.cpp": (),
}
"""Engine -> the releases the rules speak of, oldest first; the last is assumed where none is given.

llama.cpp numbers its builds, and the rules follow its converter and loader as of August 2026. `transformers` is
z-lab's own code (PyPI dflash 0.1.0) on that release.
"""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine. `release` compares as a tuple and is empty where the engine has none."""

    name: str
    release: Release = ()

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.release))}".rstrip()


def parse_engines(text: str | None) -> tuple[Engine, ...]:
    """Read `vllm@0.33,sglang`; an engine may be named once.

    Raises:
        UsageError: an engine or a release that is not known.
    """
    engines = tuple(_parse(part.strip()) for part in (text or "").split(",") if part.strip())
    names = [engine.name for engine in engines]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--engine: {name} is named twice, expected one release of each engine")
    return engines


def known_engines() -> str:
    """Every engine with its releases, for messages."""
    return ", ".join(f"{name}{_span(releases)}" for name, releases in RELEASES.items())


def _parse(text: str) -> Engine:
    name, _, release = text.partition("@")
    if name not in RELEASES:
        close = difflib.get_close_matches(name, RELEASES, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"--engine: unknown engine {name!r}{guess} (known: {known_engines()})")
    known = RELEASES[name]
    if not release:
        return Engine(name, known[-1] if known else ())
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", release):
        raise UsageError(f"--engine: {release!r} is no release of {name} (known: {known_engines()})")
    numbers = tuple(int(part) for part in release.split("."))
    if not any(numbers[: len(item)] == item for item in known):
        raise UsageError(f"--engine: nothing is known of {name} {release} (known: {known_engines()})")
    return Engine(name, numbers)


def _span(releases: tuple[Release, ...]) -> str:
    if not releases:
        return ""
    ends = [".".join(map(str, item)) for item in (releases[0], releases[-1])]
    return f"@{ends[0]}" if len(releases) == 1 else f"@{ends[0]}..{ends[1]}"
