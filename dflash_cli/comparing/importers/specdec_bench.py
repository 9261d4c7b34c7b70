"""Results of Model-Optimizer's specdec_bench: `acceptance_rate.json`, a list with an entry for each run."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat


@RESULT_FORMATS.register("specdec_bench")
class SpecdecBench(ResultFormat):
    """The acceptance length of each turn or request, without its steps. The total is the mean over requests.

    Requests are identified by number or id, so results are comparable only on the same data set. Source: the metrics of
    `examples/specdec_bench` of Model-Optimizer, 2026-08-21.
    """

    title: ClassVar[str] = "specdec_bench acceptance_rate.json"

    def recognises(self, file: ResultFile) -> bool:
        return _runs(file.document) is not None

    def read(self, file: ResultFile) -> MeasuredResult:
        runs = _runs(file.document)
        assert runs is not None
        if len(runs) != 1:
            hint = "give each run its own --save_dir"
            raise file.refuse(f"found {len(runs)} runs, expected one", hint, id="several-runs")
        return self.of_length(
            file,
            runs[0]["Average_AL"],
            conversations=tuple(_conversations(runs[0]["Request_AL"])),
            definition="mean over turns of tokens / steps, with the first token (specdec_bench)",
        )


def _runs(document: Any) -> list[Any] | None:
    """Return the runs of a file, or None if the file has another format."""
    runs = document if isinstance(document, list) else [document]
    is_known = bool(runs) and all(isinstance(run, dict) and {"Request_AL", "Average_AL"} <= run.keys() for run in runs)
    return runs if is_known else None


def _conversations(requests: Mapping[str, Any]) -> Iterator[ConversationCounts]:
    for name, lengths in requests.items():
        turns = list(lengths.values()) if isinstance(lengths, Mapping) else [lengths]
        yield ConversationCounts(digest=name, name=f"request {name}", num_tokens=sum(turns), num_steps=len(turns))
