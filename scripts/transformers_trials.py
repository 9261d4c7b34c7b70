"""Print runtime/dflash_runtime/checkpoint/targets/transformers_trials.json: what trials of small random models found.

python scripts/transformers_trials.py > runtime/dflash_runtime/checkpoint/targets/transformers_trials.json

A config does not show how a model's code asks for attention, or whether its cache works. So a small random model of
every model type is loaded and tried once. The record lists the types for which the trial contradicts the config. It
also lists the types over our pages with code that reads values on the host, which rules out CUDA graphs. Types with a
config class that refuses small sizes are left out. The run takes several minutes.
"""

import json
import logging
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels", "tests/helpers")]

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.hosted_config import open_decoder
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.checkpoint.targets.runs_here import TRIAL_WORDS, how_it_runs
from dflash_runtime.errors import DFlashError
from dflash_runtime.models.hosting.hosted import HostedTarget
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.target import family_config
from dflash_runtime.models.target_loading import try_target
from dflash_testing.any_models import make_any
from dflash_testing.hosted_models import OWN_CACHE, SERVED, make_model
from dflash_testing.pairs import placement

SECONDS = 120
"""The longest trial."""


class Outcome(NamedTuple):
    """The end of a trial.

    ended        the end that differs from the config's: a runtime, or the id of a refusal in TRIAL_WORDS
    host_read    the operation of a target over our pages that reads a value on the host
    """

    ended: str | None = None
    host_read: str | None = None


def outcome_of(source: TargetSource) -> Outcome:
    """Try a target out."""
    said = how_it_runs(source, refuse_native=family_config, read_decoder=open_decoder, trials={})
    if said.runtime not in ("transformers", "transformers-cache"):
        return Outcome()
    try:
        target = try_target(source, placement(), said.runtime)
    except DFlashError as error:
        return Outcome(error.id if error.id in TRIAL_WORDS else None)
    if isinstance(target, OwnCacheTarget):
        return Outcome("transformers-cache" if said.runtime == "transformers" else None)
    assert isinstance(target, HostedTarget)
    return Outcome(host_read=None if target.uncaptured is None else target.uncaptured.field)


def try_type(kind: str) -> Outcome:
    """Return `outcome_of` a small model of a type; an empty one if no such model can be made."""
    signal.alarm(SECONDS)
    try:
        with TemporaryDirectory() as folder:
            make = make_model if kind in {**SERVED, **OWN_CACHE} else make_any
            make(Path(folder), kind)
            return outcome_of(open_target(Path(folder)))
    except Exception as error:  # each class of transformers raises its own types
        print(f"{kind}: {type(error).__name__}", file=sys.stderr)
        return Outcome()
    finally:
        signal.alarm(0)


def stop(*_: Any) -> None:
    raise TimeoutError


def record(kinds: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the tables of the record, each by model type."""
    signal.signal(signal.SIGALRM, stop)
    found = {kind: try_type(kind) for kind in kinds}
    return {
        "trials": {kind: outcome.ended for kind, outcome in found.items() if outcome.ended is not None},
        "host_reads": {kind: outcome.host_read for kind, outcome in found.items() if outcome.host_read is not None},
    }


if __name__ == "__main__":
    types = recorded_types()
    logging.disable(logging.WARNING)
    found = record(types["decoders"])
    sys.stdout.write(json.dumps({"transformers": types["transformers"], **found}, indent=0) + "\n")
