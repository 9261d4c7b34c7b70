"""Engines and releases as users write them, such as `vllm@0.33,sglang`."""

import logging
import re
from collections.abc import Sequence
from functools import cache

from dflash_cli.engines.serving_engine import ServingEngine, all_engines
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import closest

logger = logging.getLogger(__name__)


@cache
def parse_engines(text: str | None) -> tuple[ServingEngine, ...]:
    """The engines of a text such as `vllm@0.33,sglang`. `vLLM==0.33.0+cu129` and `vllm:v0.33` are understood too.

    A release above the newest known release is read as that release, with one logged warning.

    Raises:
        UsageError: an engine or a release is not known, or an engine is named twice.
    """
    engines = tuple(_parse(part.strip()) for part in (text or "").split(",") if part.strip())
    names = [engine.name for engine in engines]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _refused("engine-twice", twice, f"{twice} is given twice; name one release of each engine")
    return engines


def check_tensor_parallel(engines: Sequence[ServingEngine], num_gpus: int) -> None:
    """Refuse several GPUs for an engine if dflash does not judge its tensor parallelism.

    Raises:
        UsageError: names the engine.
    """
    other = next((engine for engine in engines if num_gpus > 1 and not engine.splits_models), None)
    if other is not None:
        judged = [engine.name for engine in all_engines() if engine.splits_models]
        raise UsageError(
            f"--tensor-parallel {num_gpus}: dflash does not judge tensor parallelism of {other.name}, only of "
            f"{' and '.join(judged)}",
            id="tensor-parallel-not-judged", field="--tensor-parallel", found=num_gpus,
            hint=f"add --tensor-parallel 1, or leave out {other.name}",
        )  # fmt: skip


def known_engines() -> str:
    """Every engine with its releases: `sglang@0.5.23, vllm@0.24..0.33`."""
    return ", ".join(f"{engine.name}{_span(engine)}" for engine in all_engines())


def names_with_releases() -> list[str]:
    """Every engine, alone and with each known release, the newest first: `vllm`, `vllm@0.33`."""
    releases = ((engine, release) for engine in all_engines() for release in reversed(engine.releases) if release)
    return [
        *(engine.name for engine in all_engines()),
        *(f"{engine.name}@{engine.write_release(release)}" for engine, release in releases),
    ]


def _parse(text: str) -> ServingEngine:
    name, _, release = re.sub(r"\s*(==?|[:@\s])\s*", "@", text).partition("@")
    known = {engine.name: engine for engine in all_engines()}
    if name.lower() not in known:
        words = {word: engine.name for engine in all_engines() for word in (engine.name, *engine.also)}
        close = closest(re.sub(r"[-_ ]?v?\d.*", "", name) or name, words)
        guess = f"; did you mean {words[close]}?" if close else ""
        raise _refused("unknown-engine", name, f"unknown engine {name!r}{guess} (known: {known_engines()})")
    engine = known[name.lower()]
    if not release:
        return engine(engine.ends()[-1])
    numbers = engine.read_release(re.sub(r"^v(?=\d)|(\.post\d+)?(\+.*)?$", "", release))
    if numbers is not None and any(numbers[: len(item)] == item for item in engine.releases):
        return engine(numbers)
    if numbers is None or numbers < engine.ends()[-1] or not engine.releases:
        raise _refused("unknown-release", text, f"unknown release {text} (known: {known_engines()})")
    judged = engine(engine.ends()[-1])
    logger.warning("%s %s is newer than the newest known release: it is judged as %s", engine.name, release, judged)
    return judged


def _refused(id: str, found: str, why: str) -> UsageError:
    return UsageError(f"--engine: {why}", id=id, field="--engine", found=found, expected=known_engines())


def _span(engine: type[ServingEngine]) -> str:
    if not engine.releases:
        return ""
    texts = dict.fromkeys(engine.write_release(item) for item in engine.ends())
    return f"@{'..'.join(texts)}"
