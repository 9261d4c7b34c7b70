"""SPEED-Bench: 880 conversations in eleven categories (qualitative), and prompts of 1k to 32k tokens (throughput).

Its rows may not be redistributed, and most rows on the hub are placeholders. Its authors' script fetches them from
their sources into a folder, which this reader expects.
"""

from typing import ClassVar

from dflash_cli.generation.datasets.dataset import DATASETS, Dataset, Formats, conversation_rows
from dflash_cli.generation.datasets.table_files import Record
from dflash_runtime.errors import RequestError

PLACEHOLDER = "SHOULD BE FETCHED FROM THE SOURCE"
"""Part of the text of a row that was not fetched."""


def _turns(record: Record) -> list[str]:
    """Return the questions: `turns` on the hub, user `messages` in the script's files."""
    turns = record.values.get("turns")
    if isinstance(turns, list):
        return [str(turn["content"] if isinstance(turn, dict) else turn) for turn in turns]
    messages = record.values.get("messages")
    if not isinstance(messages, list):
        return []
    return [str(item["content"]) for item in messages if isinstance(item, dict) and item.get("role") == "user"]


@DATASETS.register("speed-bench")
class SpeedBench(Dataset):
    """specdec_bench of Model-Optimizer asks all questions; the benches of vLLM and SGLang ask the first."""

    title: ClassVar[str] = "SPEED-Bench"
    repo: ClassVar[str] = "nvidia/SPEED-Bench"
    subset: ClassVar[str | None] = "qualitative"
    columns: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[Formats] = {
        "specdec-bench": lambda records: conversation_rows(records, _turns, None),
        "vllm": lambda records: conversation_rows(records, _turns, 1),
    }

    def check(self, record: Record) -> None:
        """Refuse a row without questions, or with placeholders instead."""
        turns = _turns(record)
        if not turns:
            found = ", ".join(record.values) or "nothing"
            raise RequestError(
                f"{record.where}: expected a column turns or messages with questions; found {found}",
                id="missing-column",
                field="turns",
            )
        if any(PLACEHOLDER in turn for turn in turns):
            raise RequestError(
                f"{record.where}: found a placeholder, expected a prompt fetched from its source",
                id="placeholder-prompt",
                hint="run the dataset's own prepare script, then pass --dataset speed-bench=FOLDER",
            )
