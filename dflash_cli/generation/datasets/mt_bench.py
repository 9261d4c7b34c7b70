"""MT-Bench: 80 conversations of two turns in eight categories."""

from typing import ClassVar

from dflash_cli.generation.datasets.dataset import DATASETS, Dataset, Formats, conversation_rows
from dflash_cli.generation.datasets.table_files import Record
from dflash_runtime.errors import RequestError

TURNS = ("prompt", "turns")
"""The column with the list of questions: its name on the hub, and its name in FastChat's own file."""


def _turns(record: Record) -> list[str]:
    return next(list(record.values[name]) for name in TURNS if isinstance(record.values.get(name), list))


@DATASETS.register("mt-bench")
class MtBench(Dataset):
    """z-lab's benchmark asks both questions of a conversation; vLLM's bench asks the first."""

    title: ClassVar[str] = "MT-Bench"
    repo: ClassVar[str] = "HuggingFaceH4/mt_bench_prompts"
    split: ClassVar[str] = "train"
    columns: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[Formats] = {
        "z-lab": lambda records: conversation_rows(records, _turns, None),
        "vllm": lambda records: conversation_rows(records, _turns, 1),
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
