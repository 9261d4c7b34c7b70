"""The options of a run under alternative readings, for `validate --level run` and `diagnose`. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.terminal.options import DeviceOptions, PromptOptions
from dflash_cli.terminal.requests import ESSENTIALS, Option


@dataclass(frozen=True, kw_only=True)
class DiagnosisOptions(DeviceOptions, PromptOptions):
    """The prompts and the device of a run under alternative readings."""

    num_prompts: Annotated[
        int | None,
        Option(
            min=4, group=ESSENTIALS,
            help="Prompts to make from random ids, or to sample from the given prompts; a cause is tested on new ones. "
            "Default: 32, or all given prompts.",
        ),
    ] = None  # fmt: skip
    expected: Annotated[
        str | None,
        Option(
            group=ESSENTIALS, metavar="FIGURE",
            help="Judge acceptance against this figure in tokens per step: a number, or a file that states one (a "
            "result, a model card, a profile). Default: only very low acceptance is judged.",
        ),
    ] = None  # fmt: skip
    max_new_tokens: Annotated[
        int, Option(short="-n", min=8, group=ESSENTIALS, help="Generate at most N tokens per prompt.")
    ] = 128
