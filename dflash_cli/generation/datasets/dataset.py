"""What a dataset of prompts is, and how `--dataset` names one.

No dataset comes with this package: it is read from a folder, or downloaded from the hub into its cache. What a project
makes of a row differs, so that numbers on one dataset are those of one format; the format is part of every result.
"""

import re
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_cli.generation.datasets.table_files import Record
from dflash_runtime.errors import RequestError, UsageError
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.generation.datasets"
SPELLING = re.compile(r"^(?P<name>[\w.-]+)(/(?P<subset>[\w.-]+))?(=(?P<place>.+?))?(:(?P<count>\d+))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """What `--dataset NAME[/SUBSET][=PLACE][:N]` asks for; PLACE is a folder, a file, or a hub repository."""

    name: str
    subset: str | None = None
    place: str | None = None
    count: int | None = None


def parse_spec(text: str) -> DatasetSpec:
    """Read `gsm8k`, `gsm8k:100`, `speed-bench/throughput_1k=./data:50`.

    Raises:
        UsageError: it is none, or names no known dataset.
    """
    found = SPELLING.match(text)
    if found is None or found["count"] == "0":
        raise UsageError(f"--dataset {text}: expected NAME[/SUBSET][=PLACE][:N], such as gsm8k=./gsm8k:100")
    name, count = found["name"].lower(), found["count"]
    if name not in datasets():
        raise UsageError(
            f"--dataset {name}: no such dataset (known: {', '.join(sorted(datasets()))})",
            hint="prompts of your own are given with --prompts FILE",
        )
    return DatasetSpec(
        name=name, subset=found["subset"], place=found["place"], count=int(count) if count is not None else None
    )


Fields = dict[str, Any]
"""A row of prompts as in a file of them: `prompt`, `turns` or `messages`, and what else is known of it."""
Formats = Mapping[str, Callable[[Sequence[Record]], list[Fields]]]
"""Project -> what it makes of all rows."""


class Dataset(ABC):
    """A published set of prompts.

    `repo` is where the named projects load it from, `subset` the folder or file in it, `split` the part that is
    measured; `columns` have to be in every row. `formats` are the projects whose prompts are made, the default first:
    each takes all rows, because some put rows in front of others as examples.
    """

    title: ClassVar[str]
    repo: ClassVar[str]
    subset: ClassVar[str | None] = None
    split: ClassVar[str] = "test"
    columns: ClassVar[tuple[str, ...]]
    formats: ClassVar[Formats]

    def choose_format(self, name: str | None) -> str:
        """The project whose prompts are made; without a name, the first.

        Raises:
            UsageError: nobody of that name is known to use this dataset.
        """
        if name is not None and name not in self.formats:
            raise UsageError(f"--dataset-format {name}: {self.title} is formatted as {' or '.join(self.formats)} do")
        return name or next(iter(self.formats))

    def make_rows(self, records: Sequence[Record], format_name: str) -> list[tuple[str, Fields]]:
        """Where each row is from, and the row.

        Raises:
            RequestError: a row lacks a column, or holds no prompt.
        """
        for record in records:
            self.check(record)
        places = [record.where for record in records]
        made = self.formats[format_name](records)
        return list(zip(places[len(places) - len(made) :], made, strict=True))

    def check(self, record: Record) -> None:
        """Refuse a row that is not of this dataset.

        Raises:
            RequestError: naming file, row and columns.
        """
        missing = [name for name in self.columns if record.values.get(name) is None]
        if missing:
            found = ", ".join(map(str, record.values)) or "nothing"
            raise RequestError(
                f"{record.where}: no column {missing[0]}, which {self.title} has; found {found}",
                hint="name the dataset's own folder or repository: --dataset NAME=PLACE",
            )


DATASETS: Registry[type[Dataset]] = Registry("dataset")


def datasets() -> Registry[type[Dataset]]:
    """All datasets, by name."""
    DATASETS.discover(PACKAGE)
    return DATASETS
