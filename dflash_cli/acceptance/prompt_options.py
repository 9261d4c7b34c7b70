"""Options that decide under which conditions `dflash eval-acceptance` answers prompts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dflash_cli.generation.conditions import Condition, make_conditions, parse_tokens
from dflash_cli.terminal.options import PromptOptions
from dflash_cli.terminal.parameters import MEASURING, PROMPTS, Option


@dataclass(frozen=True, kw_only=True)
class ConditionOptions(PromptOptions):
    """The prompts to answer, and the conditions under which they are answered."""

    context_lengths: Annotated[
        tuple[int, ...],
        Option(
            metavar="N,...", min=1, group=PROMPTS, parse=parse_tokens, expected="a number of tokens such as 500 or 4k",
            help="Measure prompts of exactly N tokens each, such as 1k,4k,16k. Shorter prompts get other text in "
            "front, and longer prompts are cut at the front.",
        ),
    ] = ()  # fmt: skip
    exact_match: Annotated[
        Literal["draft", "both", "none"],
        Option(
            group=MEASURING,
            help="Compare the final number of each answer with the reference of its row (gsm8k has references). draft: "
            "answers with the draft. both: also answers without the draft.",
        ),
    ] = "draft"

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Every condition under which a prompt is answered; empty for a run without conditions."""
        return make_conditions(
            self.thinking,
            self.context_lengths,
            with_plain=self.exact_match == "both",
            template_options=self.template_options,
        )
