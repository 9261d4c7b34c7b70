"""GSM8K: word problems of grade-school mathematics, scored by the last number of the answer."""

from collections.abc import Sequence
from typing import ClassVar

from dflash_cli.generation.datasets.dataset import DATASETS, Dataset, Fields, Formats
from dflash_cli.generation.datasets.table_files import Record

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Suffix of mathematical questions in z-lab's benchmark. Source: dflash 0.1.0, benchmark.py."""
NUM_SHOTS = 5


def _reference(record: Record) -> str:
    """Return the number after `####`, with which solutions end."""
    return str(record.values["answer"]).rpartition("####")[2].strip()


def _as_zlab(records: Sequence[Record]) -> list[Fields]:
    return [{"prompt": f"{item.values['question']}{BOXED}", "reference": _reference(item)} for item in records]


def _as_vllm(records: Sequence[Record]) -> list[Fields]:
    return [{"prompt": item.values["question"], "reference": _reference(item)} for item in records]


def _as_specforge(records: Sequence[Record]) -> list[Fields]:
    """Put the first rows with their answers in front of each other row. Source: SpecForge's benchmarker."""
    shots = [
        {"role": role, "content": item.values[column]}
        for item in records[:NUM_SHOTS]
        for role, column in (("user", "question"), ("assistant", "answer"))
    ]
    return [
        {
            "messages": [*shots, {"role": "user", "content": item.values["question"]}],
            "reference": _reference(item),
        }
        for item in records[NUM_SHOTS:]
    ]


@DATASETS.register("gsm8k")
class Gsm8k(Dataset):
    """1,319 problems in the test split."""

    title: ClassVar[str] = "GSM8K"
    repo: ClassVar[str] = "openai/gsm8k"
    subset: ClassVar[str | None] = "main"
    columns: ClassVar[tuple[str, ...]] = ("question", "answer")
    formats: ClassVar[Formats] = {"z-lab": _as_zlab, "vllm": _as_vllm, "specforge": _as_specforge}
