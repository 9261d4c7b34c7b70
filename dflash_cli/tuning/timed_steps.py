"""How many steps an answer needs so that its steps can be timed."""

from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import plural

MIN_STEPS = 4
"""The fewest steps of an answer that are timed."""


def check_num_steps(num_steps: int) -> None:
    """Refuse answers that end after too few steps to time them.

    Raises:
        UsageError: naming the number of steps.
    """
    if num_steps < MIN_STEPS:
        raise UsageError(
            f"an answer ended after {plural(num_steps, 'step')}, expected at least {MIN_STEPS} to time",
            id="too-few-steps",
            field="--max-new-tokens",
            found=num_steps,
            expected=f"answers of at least {MIN_STEPS} steps",
            hint="ask for longer answers with -n",
        )
