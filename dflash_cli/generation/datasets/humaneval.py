"""HumanEval: 164 Python functions to be completed."""

from collections.abc import Sequence
from typing import ClassVar

from dflash_cli.generation.datasets.dataset import DATASETS, Dataset, Fields, Formats
from dflash_cli.generation.datasets.table_files import Record

TASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
"""Source: z-lab's dflash 0.1.0, benchmark.py."""


def _as_zlab(records: Sequence[Record]) -> list[Fields]:
    return [{"prompt": TASK.format(item.values["prompt"]), "id": item.values.get("task_id")} for item in records]


def _as_vllm(records: Sequence[Record]) -> list[Fields]:
    return [{"prompt": item.values["prompt"], "id": item.values.get("task_id")} for item in records]


@DATASETS.register("humaneval")
class HumanEval(Dataset):
    """vLLM's bench sends only the head of the function."""

    title: ClassVar[str] = "HumanEval"
    repo: ClassVar[str] = "openai/openai_humaneval"
    subset: ClassVar[str | None] = "openai_humaneval"
    columns: ClassVar[tuple[str, ...]] = ("prompt",)
    formats: ClassVar[Formats] = {"z-lab": _as_zlab, "vllm": _as_vllm}
