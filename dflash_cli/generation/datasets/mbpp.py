"""MBPP: short Python tasks, in the sanitized subset."""

from collections.abc import Sequence
from typing import ClassVar

from dflash_cli.generation.datasets.dataset import DATASETS, Dataset, Fields, Formats
from dflash_cli.generation.datasets.table_files import Record

PAPER = (
    "You are an expert Python programmer, and here is your task: {} Your code should pass these tests:\n\n{}\n\n"
    "[BEGIN]\n"
)
"""Source: Austin et al. 2021, as in SpecForge's benchmarker."""


def _as_zlab(records: Sequence[Record]) -> list[Fields]:
    return [{"prompt": item.values["prompt"], "id": item.values.get("task_id")} for item in records]


def _as_specforge(records: Sequence[Record]) -> list[Fields]:
    return [
        {
            "prompt": PAPER.format(item.values["prompt"], "\n".join(item.values.get("test_list") or ())),
            "id": item.values.get("task_id"),
        }
        for item in records
    ]


@DATASETS.register("mbpp")
class Mbpp(Dataset):
    """257 tasks in the test split."""

    title: ClassVar[str] = "MBPP (sanitized)"
    repo: ClassVar[str] = "google-research-datasets/mbpp"
    subset: ClassVar[str | None] = "sanitized"
    columns: ClassVar[tuple[str, ...]] = ("prompt",)
    formats: ClassVar[Formats] = {"z-lab": _as_zlab, "specforge": _as_specforge}
