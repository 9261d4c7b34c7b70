"""MATH-500: 500 competition problems."""

from collections.abc import Sequence
from typing import ClassVar

from dflash_cli.generation.datasets.dataset import DATASETS, Dataset, Fields, Formats
from dflash_cli.generation.datasets.gsm8k import BOXED
from dflash_cli.generation.datasets.table_files import Record


def _rows(records: Sequence[Record], suffix: str) -> list[Fields]:
    return [
        {
            "prompt": f"{item.values['problem']}{suffix}",
            "id": item.values.get("unique_id"),
            "category": item.values.get("subject"),
        }
        for item in records
    ]


@DATASETS.register("math500")
class Math500(Dataset):
    """The subjects are the categories."""

    title: ClassVar[str] = "MATH-500"
    repo: ClassVar[str] = "HuggingFaceH4/MATH-500"
    columns: ClassVar[tuple[str, ...]] = ("problem",)
    formats: ClassVar[Formats] = {
        "z-lab": lambda records: _rows(records, BOXED),
        "specforge": lambda records: _rows(records, ""),
    }
