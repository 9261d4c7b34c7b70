"""The result of a finished run, from its file of answers and without a loaded model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.journal import Journal, stored_settings
from dflash_cli.generation.answers import Event
from dflash_cli.generation.loaded_pair import LOADED_SETTINGS, OpenedPair
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.run_facts import PairRun
from dflash_runtime.documents import copy_fields, to_json
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dflash_cli.acceptance.measure import EvaluationPlan


@dataclass(frozen=True, kw_only=True)
class AnsweredRun(OpenedPair):
    """An opened pair with the settings of its stored answers, in place of a loaded pair."""

    stored: Mapping[str, Any]
    config: EngineConfig

    @property
    def num_draft_tokens(self) -> int:
        return int(self.stored["num_speculative_tokens"])

    @property
    def max_model_len(self) -> int:
        return int(self.stored["max_model_len"])

    def check_params(self, params: SamplingParams) -> None:
        """The stored answers have these parameters."""

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """The settings of the stored answers."""
        return dict(self.stored)

    def describe(self) -> PairRun:
        """Facts about the pair and this process."""
        return self.described(
            self.config, self.stored["device_name"], self.stored["target_runtime"], self.stored["target_quantization"]
        )

    def warm_up(self, params: SamplingParams, num_prompts: int) -> None:
        """Nothing runs."""

    def answer(self, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool) -> Iterator[Event]:
        """No events: every row is answered."""
        assert not rows
        return iter(())


def find_answered(pair: OpenedPair, config: EngineConfig, plan: "EvaluationPlan") -> AnsweredRun | None:
    """The run of a file that answers every row, or None if the pair must be loaded.

    None also if a setting that is known before loading differs: loading then decides whether the file fits.
    """
    if plan.journal is None or not plan.resume or not plan.journal.is_file():
        return None
    stored = stored_settings(plan.journal)
    params = plan.params.with_stops(pair.stop_token_ids)
    known = pair.known_settings(config, params, chat=plan.chat)
    if not stored.keys() <= known.keys() | LOADED_SETTINGS:
        return None
    if any(name not in stored or stored[name] != value for name, value in to_json(known).items()):
        return None
    if Journal(plan.journal, stored, plan.rows, resume=True).pending:
        return None
    return copy_fields(AnsweredRun, pair, stored=stored, config=config)
