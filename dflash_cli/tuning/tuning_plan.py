"""The plan of a tuning: its candidates, its files, and checks before a model is loaded. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_cli.acceptance.journal import check_journal
from dflash_cli.acceptance.measure import EvaluationPlan
from dflash_cli.documents.atomic_file import check_parent
from dflash_cli.terminal.sampling_options import LookupName
from dflash_cli.tuning.candidates import Candidate, candidates_for, default_numbers
from dflash_cli.tuning.step_costs import StepCosts, check_complete, read_step_costs
from dflash_cli.tuning.what_if import WhatIf
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRuns:
    """The runs of a tuning, and the step times of a file, if one is given."""

    candidates: Sequence[Candidate]
    lookups: Sequence[Candidate]
    given: StepCosts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPlan:
    """The prompts, numbers of draft tokens, batch sizes and what-ifs of a tuning.

    `config` is the engine's config for measuring acceptance. If `numbers` or `batches` is None, the pair or the file of
    step times decides. Answers and step times go to `folder`, which `resume` and `force` of `evaluation` apply to.
    """

    evaluation: EvaluationPlan
    config: EngineConfig
    numbers: Sequence[int] | None = None
    trees: Sequence[int] = ()
    batches: Sequence[int] | None = None
    num_rounds: int = 4
    step_times: Path | None = None
    what_ifs: Sequence[WhatIf] = ()
    rivals: Sequence[LookupName] = ()
    folder: Path | None = None

    def runs(self, trained: int) -> PlannedRuns:
        """The runs for a draft that was trained to draft `trained` tokens, after all checks of numbers and files.

        Raises:
            CheckpointNotFound: the file of step times does not exist.
            UsageError: a K, a batch size, a file of step times or an output does not fit.
        """
        given = read_step_costs(self.step_times, trained) if self.step_times is not None else None
        candidates = candidates_for(_numbers(self, trained, given), trained, self.trees)
        lookups = [Candidate(trained, name) for name in dict.fromkeys(self.rivals)]
        self._check_outputs([*candidates, *lookups, *self.what_ifs])
        return PlannedRuns(
            candidates=candidates, lookups=lookups, given=None if given is None else _at_batches(given, self)
        )

    def journal_of(self, item: Candidate | WhatIf) -> Path | None:
        """The file for the answers of a candidate or a what-if."""
        return None if self.folder is None else self.folder / f"{name_of(item)}.jsonl"

    def _check_outputs(self, measured: Sequence[Candidate | WhatIf]) -> None:
        """Check the folder and all files of answers before the first measurement."""
        if self.folder is None:
            return
        if not self.folder.is_dir():
            check_parent(self.folder)
            if self.folder.exists():
                raise UsageError(
                    id="output-is-a-file", field="--output", found=str(self.folder), expected="a folder, or a new name"
                )
            return
        for item in measured:
            path = self.journal_of(item)
            assert path is not None
            check_journal(path, resume=self.evaluation.resume, force=self.evaluation.force)


def _numbers(request: TuningPlan, trained: int, given: StepCosts | None) -> Sequence[int]:
    if request.numbers is not None:
        return request.numbers
    if given is None:
        return default_numbers(trained)
    drafted = (item for item in given.drafting if not (item.is_lookup or item.way == "tree"))
    numbers = sorted({item.num_speculative_tokens for item in drafted} or {trained})
    if numbers[-1] > trained:
        fitting = ",".join(str(number) for number in numbers if number <= trained)
        raise UsageError(
            id="k-out-of-range",
            path=request.step_times,
            field="K",
            found=numbers[-1],
            expected=f"1 to {trained}, the K of the draft's training",
            hint=f"choose among them: --num-speculative-tokens {fitting or trained}",
        )
    return numbers


def _at_batches(given: StepCosts, request: TuningPlan) -> StepCosts:
    """Return the times of a file at the requested batch sizes, by default at all batch sizes of the file."""
    batches = request.batches or given.batches
    check_complete(given, request.step_times, request.numbers or (), batches)
    return replace(given, plain={batch: given.plain[batch] for batch in batches})


def name_of(item: Candidate | WhatIf) -> str:
    """The name of a candidate or a what-if in files."""
    return item.name if isinstance(item, Candidate) else item.file_name
