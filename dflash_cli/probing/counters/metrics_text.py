"""Read a server's metrics from their text in the Prometheus format.

Sources: `vllm/v1/spec_decode/metrics.py` of vLLM 0.33, `tools/server/server-task.cpp` of llama.cpp from build 10408 on
and `srt/observability/metrics_collector.py` of SGLang 0.5.23. Names match with and without `_total`, because only some
exporters add it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from dflash_cli.probing.counters.server_counters import SCALARS, ServerCounters, ServerMetrics
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.metrics import MAX_DRAFT_TOKENS
from dflash_runtime.phrases import shorten

MAX_DIGITS = 9
STREAM_DIGITS = 6
"""Digits of a number that C++ streams print by default."""
MAX_COUNT = 2**53
"""Counters are floats, and larger ones would lose steps."""
VALUE = re.compile(r"(?:\}|^[^\s{]+)\s+(\S+)")
WHOLE = re.compile(r"\d+\.0+|\d{7,}(?:\.\d*)?")
EXPONENT = re.compile(r"(\d)\.?(\d*)e\+?(\d{1,2})", re.IGNORECASE)
"""The value of a sample's line, values that C++ streams do not print, and the digits and exponent of a value."""
Sample = tuple[str, Mapping[str, str], float]
"""A metric's name, its labels and its value."""
RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of the ranks that compute one model together. SGLang can show the metrics of each."""
STARTED, INFO = "process_start_time_seconds", "_info"


def read_metrics(
    text: str, names: Mapping[str, str], where: str, load_names: Mapping[str, str] = MappingProxyType({})
) -> ServerMetrics:
    """The metrics in a text of the Prometheus format.

    `names` has the engine's name for each field of `ServerCounters` that it counts, `load_names` for its queue.

    Raises:
        UnsupportedError: the text is not in this format.
    """
    relevant = _relevant(text, (*names.values(), *load_names.values()))
    samples = _samples(relevant, where)
    started = [value for name, _, value in samples if name == STARTED and math.isfinite(value)]
    return ServerMetrics(
        counters=_counters_of(samples, names, where, resolution=_resolution(relevant, names)),
        started_s=started[0] if started else None,
        infos={name: labels for name, labels, _ in samples if name.endswith(INFO)},
        load=_load_of(samples, load_names),
    )


def _load_of(samples: Sequence[Sample], names: Mapping[str, str]) -> Mapping[str, float]:
    """The sums over engines and models of the metrics that have finite values."""
    found = {key: [value for name, _, value in samples if name == names[key]] for key in names}
    return {key: sum(values) for key, values in found.items() if values and all(map(math.isfinite, values))}


def _counters_of(
    samples: Sequence[Sample], names: Mapping[str, str], where: str, *, resolution: int
) -> ServerCounters | None:
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in samples:
        plain = name.removesuffix("_total")
        totals[plain] = totals.get(plain, 0) + value
        if plain == names.get("per_pos_accepted") and labels.get("position", "").isdecimal():
            position = int(labels["position"][:MAX_DIGITS])
            if position >= MAX_DRAFT_TOKENS:
                raise _foreign(where, f"position {position}")
            positions[position] = positions.get(position, 0) + value
    if names["num_drafts"] not in totals:
        return None
    counts = [totals[name] for name in names.values() if name in totals] + list(positions.values())
    wrong = next((value for value in counts if not 0 <= value < MAX_COUNT), None)
    if wrong is not None:
        raise _foreign(where, f"a counter of {wrong}")
    values = {field: int(totals[names[field]]) if names.get(field) in totals else None for field in SCALARS}
    per_pos_accepted = tuple(int(positions.get(position, 0)) for position in range(max(positions, default=-1) + 1))
    return ServerCounters(**values, per_pos_accepted=per_pos_accepted, resolution=resolution)


def _resolution(text: str, names: Mapping[str, str]) -> int:
    """The smallest rise that all counters of a text show, by the digits of its numbers with an exponent.

    Python prints `123.0` and all digits of larger numbers. A printer is taken as exact if one number has more digits
    than C++ streams print. Positions do not count: llama.cpp prints them as whole numbers, and others as floats.
    """
    positions = names.get("per_pos_accepted", " ")
    lines = [
        line for line in text.splitlines() if line.startswith(tuple(names.values())) and not line.startswith(positions)
    ]
    values = [found[1] for line in lines if (found := VALUE.search(line))]
    sizes = [(len(found[1] + found[2]), int(found[3])) for value in values if (found := EXPONENT.fullmatch(value))]
    is_exact = any(map(WHOLE.fullmatch, values)) or any(digits > STREAM_DIGITS for digits, _ in sizes)
    return 1 if is_exact else 10 ** max((max(0, size + 1 - STREAM_DIGITS) for _, size in sizes), default=0)


def _relevant(text: str, names: Sequence[str]) -> str:
    """The lines with a metric that is read, because parsing is slow; a text without one is returned whole."""
    wanted = (*names, STARTED, f"{INFO}{{")
    lines = [line for line in text.splitlines(keepends=True) if any(name in line for name in wanted)]
    return "".join(lines) or text


@lru_cache(maxsize=4)
def _samples(text: str, where: str) -> tuple[Sample, ...]:
    """The samples of a text. Waiting for a server to come to rest reads the same text many times."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(text))
        return _of_one_rank(
            [(item.name, item.labels, float(item.value)) for family in families for item in family.samples]
        )
    except (ValueError, LookupError, ArithmeticError) as error:
        said = (str(error).splitlines() or ["no reason"])[0]
        raise _foreign(where, f"no text in Prometheus' format: {shorten(said, 200)}") from error


def _of_one_rank(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples without equal lines, and without copies by further ranks of one model. The largest copy is kept."""
    copies: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    others: dict[tuple[str, frozenset[tuple[str, str]], float], Sample] = {}
    for sample in samples:
        name, labels, value = sample
        rest = frozenset(item for item in labels.items() if item[0] not in RANKS)
        if len(rest) == len(labels):
            others[name, rest, value] = sample
        elif (name, rest) not in copies or not value <= copies[name, rest][2]:
            copies[name, rest] = sample
    return (*others.values(), *copies.values())


def _foreign(where: str, found: str) -> UnsupportedError:
    expected = "counters in the Prometheus format"
    return UnsupportedError(f"found {found}, expected {expected}", id="not-prometheus", path=where, expected=expected)
