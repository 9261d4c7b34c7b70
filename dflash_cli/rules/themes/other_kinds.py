"""Rules on drafts of other kinds than DFlash. They read the tables of `formats/draft_kinds`."""

import re
from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.formats.draft_kinds.kind_reading import KindReading
from dflash_cli.formats.draft_kinds.table import Service
from dflash_cli.rules.rule import FIX_INSPECT, FIX_REEXPORT, Outcome, Problem, check
from dflash_cli.rules.subject import WEIGHTS, NamedEngine, Subject
from dflash_cli.rules.themes.tensors import extra_tensor
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.errors import MISSING

MOST_NAMED = 6
"""The most missing tensors with a finding each. More missing tensors share one finding."""
TABLES = "the sources in dflash_cli/formats/draft_kinds, by kind"


@check(
    "D01",
    effect="engines stop when they read the config or build the draft's modules",
    fix="write the draft's own value, then check it: dflash validate {draft}",
    source=TABLES,
    stage="kind",
)
def its_keys_are_there(subject: Subject) -> Iterator[Problem]:
    """A draft of another kind states every setting of its kind, in the form that engines read.

    It is a warning if readers take another value for an absent key.
    """
    reading = subject.kind_reading
    if reading is None:
        return
    for fault in reading.wrong:
        yield Problem(subject.location(fault.key), fault.text)
    for fault in reading.absent:
        if fault.taken is MISSING or fault.taken is None:
            yield Problem(subject.location(fault.key), "missing")
        else:
            yield Problem(
                subject.location(fault.key),
                f"missing: readers take {fault.taken!r}",
                effect="readers fill in a value, which may belong to another draft",
                severity="warning",
                outcome="serves",
            )


@check(
    "D02",
    "info",
    effect="dflash does not know what the key asks for",
    fix="dflash inspect {draft} --json # shows the value",
    source=TABLES,
    stage="kind",
)
def its_keys_are_known(subject: Subject) -> Iterator[Problem]:
    """Every key of a draft of another kind, and of its headers' metadata, is known."""
    reading = subject.kind_reading
    if reading is None:
        return
    for fault in reading.unknown:
        yield Problem(subject.location(fault.key), f"{fault.key} is not known")
    metadata = subject.checkpoint.metadata if subject.checkpoint is not None and subject.tensors else {}
    for key in sorted(metadata.keys() - {"format"}):
        yield Problem(f"{WEIGHTS}:__metadata__.{key}", f"the header's metadata {key} is not known")


@check(
    "D03",
    effect="engines that do not check for it leave the tensor at random values",
    fix=FIX_REEXPORT,
    source=TABLES,
    stage="kind",
    outcome="drops",
)
def its_tensors_are_there(subject: Subject) -> Iterator[Problem]:
    """A draft of another kind has every tensor of its kind."""
    reading = _listed(subject)
    missing = reading.missing if reading is not None else []
    for outcome, engines in _by_coverage(subject, missing):
        about = replace(Problem(WEIGHTS, ""), outcome=outcome, engines=engines or None)
        if len(missing) > MOST_NAMED:
            rest = len(missing) - MOST_NAMED
            yield replace(about, message=f"missing: {', '.join(missing[:MOST_NAMED])} and {rest} more")
            continue
        for name in missing:
            assert reading is not None
            yield replace(about, message=f"missing: {name}, expected {_shown(reading.expected[name])}")


@check(
    "D04",
    effect="engines stop at the tensor, or ignore it although the draft was trained with it",
    fix=f"{FIX_INSPECT} # lists the tensors; export the draft without leftovers of training",
    source=TABLES,
    stage="kind",
)
def its_tensors_are_known(subject: Subject) -> Iterator[Problem]:
    """Every tensor of a draft of another kind belongs to its kind, and names start without a prefix."""
    reading = _listed(subject)
    if reading is None:
        return
    if reading.prefix:
        message = f"names start with {reading.prefix!r}, expected no prefix"
        yield from extra_tensor(subject, Problem(f"{WEIGHTS}:{reading.prefix}", message))
    for name in reading.unexpected:
        yield from extra_tensor(subject, Problem(f"{WEIGHTS}:{name}", f"unexpected: {name}"))


@check(
    "D05",
    effect="loading stops at the wrong shape",
    fix="correct the sizes in config.json or export the draft again, then check it: dflash validate {draft}",
    source=TABLES,
    stage="kind",
)
def its_shapes_fit(subject: Subject) -> Iterator[Problem]:
    """Every tensor of a draft of another kind has the shape that its config gives it."""
    reading = _listed(subject)
    for name, (found, wanted) in (reading.misshapen if reading is not None else {}).items():
        yield Problem(f"{WEIGHTS}:{name}", f"found {_shown(found)}, expected {_shown(wanted)}")


@check(
    "D06",
    effect="the engine serves the draft with another value than it was trained with",
    fix=f"{FIX_INSPECT} # names the engines that serve the draft; another one may apply the setting",
    source=TABLES,
    stage="kind",
    outcome="drops",
)
def engines_apply_its_settings(subject: Subject) -> Iterator[Problem]:
    """The named engines apply every setting of the kind."""
    reading = subject.kind_reading
    for engine, service in _services(subject, reading):
        assert reading is not None
        for text in reading.kind.outside(service.ignores, reading.values):
            key = text.partition(" ")[0]
            yield Problem(subject.location(key), f"{engine} serves only {text}", engines=(engine.name,))
        if service.note:
            yield Problem(
                subject.location("architectures"),
                f"{engine}: {service.note}",
                effect="the engine serves the draft, but not as its trainer meant",
                severity="warning",
                outcome="serves",
                engines=(engine.name,),
            )


def _listed(subject: Subject) -> KindReading | None:
    """The reading of a draft with a table of its tensors; None if the tensors are packed or of another architecture."""
    reading = subject.kind_reading
    is_packed = bool(subject.stated.value("quantization_config")) or QUANTIZATION_FILE in subject.files
    return (
        reading if reading is not None and subject.tensors is not None and reading.is_listed and not is_packed else None
    )


def _services(subject: Subject, reading: KindReading | None) -> Iterator[tuple[NamedEngine, Service]]:
    """The named engines with a model for this kind, and how they serve it."""
    for engine in subject.plan.engines:
        service = reading.kind.service(engine.name) if reading is not None else None
        if service is not None:
            yield engine, service


def _by_coverage(subject: Subject, missing: list[str]) -> Iterator[tuple[Outcome, tuple[str, ...]]]:
    """The outcome for the named engines that report missing tensors, and for the others. Nothing if none is missing."""
    if not missing:
        return
    named = [engine.name for engine in subject.plan.engines]
    stopping = {
        engine.name
        for engine, service in _services(subject, subject.kind_reading)
        if any(re.match(service.coverage, name) for name in missing)
    }
    others = tuple(name for name in named if name not in stopping)
    if stopping:
        yield "stops", tuple(name for name in named if name in stopping)
    if others or not named:
        yield "drops", others


def _shown(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
