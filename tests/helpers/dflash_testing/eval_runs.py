"""Short runs of `dflash eval-acceptance` on the bundled pair."""

from functools import partial

from dflash_testing.raised_errors import run_or_raise

SMALL = ["--num-prompts", "4", "-n", "12", "--num-resamples", "200"]
ENOUGH = ["-n", "12", "--num-resamples", "200"]
"""All 64 bundled prompts, the fewest for which there is an interval."""

run_eval = partial(run_or_raise, "eval-acceptance")
