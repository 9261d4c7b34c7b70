"""Words that a shell offers for the value of an option or an argument."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO

from dflash_cli.terminal import console
from dflash_cli.terminal.parameters import Parameter

WORDS = {
    "--dataset": "generation.datasets.dataset:dataset_names",
    "--dataset-format": "generation.datasets.dataset:format_names",
    "--engine": "engines.engine_names:names_with_releases",
    "DIALECT": "formats.dialect:writable_words",
    "DRAFT": "checkpoints.references:bundled_names",
    "ID": "rules.rule:rule_ids",
    "ID,...": "rules.rule:rule_ids",
    "KIND": "documents.kinds:kind_names",
    "REF": "checkpoints.references:bundled_names",
    "REF2": "checkpoints.references:bundled_names",
    "TARGET": "checkpoints.references:bundled_targets",
    "TOPIC": "terminal.documentation:topics",
}
"""Flag, or word for the value -> the function of dflash_cli that lists the words. A module is imported on demand."""


BREAKS = (":", "@")
"""Characters at which bash splits words. `tiny:dfl` reaches a program as three words, and so does `--engine=vl`."""


@contextmanager
def words_of_bash() -> Iterator[None]:
    """Join the words that bash has split, before Typer reads them, and offer only the last part of the found words."""
    cut = _join_words() if "COMP_WORDS" in os.environ else ""
    if not cut:
        yield
        return
    offered = StringIO()
    try:
        with redirect_stdout(offered):
            yield
    finally:
        console.result(*(line.removeprefix(cut) for line in offered.getvalue().splitlines()))


def _join_words() -> str:
    """Join words in COMP_WORDS. Returns the part of the typed word that bash keeps: `tiny:` of `tiny:dfl`."""
    try:
        words, place = shlex.split(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
    except (KeyError, ValueError):  # an open quote
        return ""
    joined: list[str] = []
    places: list[int] = []
    for word in words:
        if joined and (word in BREAKS or joined[-1].endswith(BREAKS)):
            joined[-1] += word
        elif joined and word == "=" and joined[-1].startswith("--"):
            places.append(len(joined))  # the value begins here
            continue
        else:
            joined.append(word)
        places.append(len(joined) - 1)
    if len(joined) == len(words):
        return ""
    place = places[place] if place < len(places) else len(joined)
    os.environ |= {"COMP_WORDS": shlex.join(joined), "COMP_CWORD": str(place)}
    typed = joined[place] if place < len(joined) else ""
    return typed[: max(map(typed.rfind, BREAKS)) + 1]


def completion_of(item: Parameter) -> Callable[[str], list[str]] | None:
    """The function from typed text to offered words; None if the shell offers files."""
    if not item.choices and _source(item) is None:
        return None

    def complete(typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",") if item.is_list and not item.is_argument else ("", "", typed)
        given = before.split(",")
        return [f"{before}{comma}{word}" for word in words_for(item) if word not in given and word.startswith(last)]

    return complete


def words_for(item: Parameter) -> Sequence[str]:
    """The known values of a parameter; empty if any text is a value."""
    source = _source(item)
    return item.choices or (() if source is None else _words(source))


def _source(item: Parameter) -> str | None:
    return WORDS.get(item.flag) or WORDS.get(item.metavar)


def _words(source: str) -> Sequence[str]:
    module, _, name = source.partition(":")
    return list(getattr(import_module(f"dflash_cli.{module}"), name)())
