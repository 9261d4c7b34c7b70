"""The options of a run under alternative readings, for `validate --level run` and `diagnose`. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dflash_cli.terminal.options import PROMPTS_HELP, DeviceOptions, PromptOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Option


@dataclass(frozen=True, kw_only=True)
class DiagnosisOptions(DeviceOptions, PromptOptions):
    """The prompts and the device of a run under alternative readings."""

    prompts: Annotated[
        str | Path | Sequence[str | Sequence[int]] | None,
        Option(
            short="-p", metavar="FILE", group=ESSENTIALS, parse=str, is_setting=False,
            help=f"{PROMPTS_HELP} Default: prompts made from random ids.",
        ),
    ] = None  # fmt: skip
    num_prompts: Annotated[
        int | None,
        Option(
            min=4, group=ESSENTIALS,
            help="Prompts to make from random ids, or to sample from the given prompts. A cause is tested on "
            "further prompts. Default: 32, or all given prompts.",
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
