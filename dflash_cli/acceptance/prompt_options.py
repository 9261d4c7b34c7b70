"""The options by which `dflash eval-acceptance` is told on what to measure, and under which conditions."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from dflash_cli.generation.conditions import Condition, make_conditions, parse_context_lengths, parse_thinking
from dflash_cli.terminal.options import DatasetFormatOption, DatasetOption
from dflash_cli.terminal.parameters import MEASURING


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Which prompts, which of them, and in how many ways each is answered."""

    dataset: DatasetOption = None
    dataset_format: DatasetFormatOption = None
    sample: Annotated[
        Literal["stratified", "head", "random"],
        typer.Option(
            "--sample",
            help="How --num-prompts chooses: from each category in proportion, the first ones, or any.",
            rich_help_panel=MEASURING,
        ),
    ] = "stratified"
    thinking: Annotated[
        str | None,
        typer.Option(
            "--thinking",
            metavar="on,off",
            help="Answer every prompt with the chat template's enable_thinking on, off, or in both ways, side by side. "
            'Another name of it: --chat-template-kwargs {"NAME": "$thinking"}.',
            rich_help_panel=MEASURING,
        ),
    ] = None
    context_lengths: Annotated[
        str | None,
        typer.Option(
            "--context-lengths",
            metavar="N,...",
            help="Answer every prompt behind so much other text that it has N tokens, such as 1k,4k,16k, side by side.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    exact_match: Annotated[
        Literal["draft", "both", "none"],
        typer.Option(
            "--exact-match",
            help="Score the final number of answers whose rows have a reference, as those of gsm8k do: with the draft, "
            "or both with it and without it.",
            rich_help_panel=MEASURING,
        ),
    ] = "draft"

    def conditions(self, template_options: str | None) -> tuple[Condition, ...]:
        """Every way in which a prompt is answered; empty where there is one.

        Raises:
            UsageError: values that are none.
        """
        return make_conditions(
            parse_thinking(self.thinking),
            parse_context_lengths(self.context_lengths),
            with_plain=self.exact_match == "both",
            template_options=template_options,
        )
