"""The base class of datasets of prompts, and the syntax of `--dataset`.

This package contains no dataset. Rows are read from a folder, or downloaded from the hub into its cache. Projects
format rows differently, so figures compare only within one format. Every result states the format.
"""

import re
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_cli.generation.datasets.table_files import Record
from dflash_runtime.errors import MISSING, RequestError, UsageError
from dflash_runtime.phrases import closest
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.generation.datasets"
SPELLING = re.compile(r"^(?P<name>[\w.-]+)(/(?P<subset>[\w.-]+))?(=(?P<place>.+?))?(:(?P<count>\d{1,9}))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """The parts of `--dataset NAME[/SUBSET][=PLACE][:N]`. PLACE is a folder, a file, or a hub repository."""

    name: str
    subset: str | None = None
    place: str | None = None
    count: int | None = None


def parse_spec(text: str) -> DatasetSpec:
    """Parse `gsm8k`, `gsm8k:100`, `speed-bench/throughput_1k=./data:50`.

    Raises:
        UsageError: the text is malformed, or the dataset is unknown.
    """
    found = SPELLING.match(text)
    if found is None or found["count"] == "0":
        raise UsageError(field="--dataset", found=text, expected="NAME[/SUBSET][=PLACE][:N], such as gsm8k=./gsm8k:100")
    name, count = found["name"].lower(), found["count"]
    if name not in datasets():
        close = closest(name, datasets())
        raise UsageError(
            f"--dataset {name}: no such dataset (known: {', '.join(sorted(datasets()))})",
            id="no-such-dataset",
            field="--dataset",
            found=name,
            hint=f"did you mean {close}?" if close else "pass your own prompts with --prompts FILE",
        )
    return DatasetSpec(
        name=name, subset=found["subset"], place=found["place"], count=int(count) if count is not None else None
    )


Fields = dict[str, Any]
"""A row as in a file of prompts: `prompt`, `turns` or `messages`, and other keys."""
Formats = Mapping[str, Callable[[Sequence[Record]], list[Fields]]]
"""Maps a project to the function that formats all rows."""


class Dataset(ABC):
    """A published set of prompts.

    Projects load it from `repo`; `subset` is the folder or file in it, and `split` the measured part. Every row must
    have `columns`. `formats` are the projects' prompt formats, the default first. A format receives all rows, because
    some formats use rows as examples in front of others.
    """

    title: ClassVar[str]
    repo: ClassVar[str]
    subset: ClassVar[str | None] = None
    split: ClassVar[str] = "test"
    columns: ClassVar[tuple[str, ...]]
    formats: ClassVar[Formats]

    def choose_format(self, name: str | None) -> str:
        """Return the named format, or the default.

        Raises:
            UsageError: the dataset lacks this format.
        """
        if name is not None and name not in self.formats:
            expected = f"a format of {self.title}: {' or '.join(self.formats)}"
            raise UsageError(field="--dataset-format", found=name, expected=expected)
        return name or next(iter(self.formats))

    def make_rows(self, records: Sequence[Record], format_name: str) -> list[tuple[str, Fields]]:
        """Return file and line of each row, and the formatted row.

        Raises:
            RequestError: a row lacks a column or a prompt.
        """
        for record in records:
            self.check(record)
        places = [record.where for record in records]
        made = self.formats[format_name](records)
        return list(zip(places[len(places) - len(made) :], made, strict=True))

    def check(self, record: Record) -> None:
        """Refuse a row of another dataset.

        Raises:
            RequestError: naming file, row and columns.
        """
        missing = [name for name in self.columns if record.values.get(name) is None]
        if missing:
            found = ", ".join(map(str, record.values)) or "nothing"
            raise RequestError(
                f"{record.where}: the column {missing[0]} of {self.title} is missing; found {found}",
                id="missing-column",
                field=missing[0],
                found=MISSING,
                hint="name the dataset's own folder or repository: --dataset NAME=PLACE",
            )


def conversation_rows(
    records: Sequence[Record], turns: Callable[[Record], list[str]], num_turns: int | None
) -> list[Fields]:
    """Return a row of the first `num_turns` questions per record, with the record's id and category."""
    return [
        {
            "turns": turns(item)[:num_turns],
            "id": item.values.get("prompt_id", item.values.get("question_id")),
            "category": item.values.get("category"),
        }
        for item in records
    ]


DATASETS: Registry[type[Dataset]] = Registry("dataset")


def dataset_names() -> list[str]:
    """The names of all datasets."""
    return sorted(datasets())


def format_names() -> list[str]:
    """The projects that a dataset can imitate."""
    return sorted({name for item in datasets().values() for name in item.formats})


def datasets() -> Registry[type[Dataset]]:
    """Return all datasets by name."""
    DATASETS.discover(PACKAGE)
    return DATASETS
