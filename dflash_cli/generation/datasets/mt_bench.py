"""MT-Bench: 80 conversations of two turns in eight categories."""

from collections.abc import Sequence
from typing import ClassVar

from dflash_cli.generation.datasets.dataset import DATASETS, Dataset, Fields, Formats
from dflash_cli.generation.datasets.table_files import Record
from dflash_runtime.errors import RequestError

TURNS = ("prompt", "turns")
"""The column with the list of questions: its name on the hub, and its name in FastChat's own file."""


def _turns(record: Record) -> list[str]:
    return next(list(record.values[name]) for name in TURNS if isinstance(record.values.get(name), list))


def _rows(records: Sequence[Record], num_turns: int | None) -> list[Fields]:
    return [
        {
            "turns": _turns(item)[:num_turns],
            "id": item.values.get("prompt_id", item.values.get("question_id")),
            "category": item.values.get("category"),
        }
        for item in records
    ]


@DATASETS.register("mt-bench")
class MtBench(Dataset):
    """z-lab's benchmark asks both questions of a conversation; vLLM's bench asks the first."""

    title: ClassVar[str] = "MT-Bench"
    repo: ClassVar[str] = "HuggingFaceH4/mt_bench_prompts"
    split: ClassVar[str] = "train"
    columns: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[Formats] = {
        "z-lab": lambda records: _rows(records, None),
        "vllm": lambda records: _rows(records, 1),
    }

    def check(self, record: Record) -> None:
        """Refuse a row without a list of questions."""
        if not any(isinstance(record.values.get(name), list) for name in TURNS):
            found = ", ".join(record.values) or "nothing"
            raise RequestError(
                f"{record.where}: expected a column turns or prompt with a list of questions; found {found}",
                id="missing-column",
                field="turns",
            )
