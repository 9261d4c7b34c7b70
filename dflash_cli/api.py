"""The Python interface: a function per verb, with the same options as the command, and typed results.

A function takes the options as keywords, or its request class: `evaluate(draft="tiny", num_prompts=8)` or
`evaluate(EvaluationRequest(draft="tiny", num_prompts=8))`. `LLM`, with `open_draft` and `open_target`, runs a pair. A
reference is a directory, `org/repo`, `org/repo@revision`, or a bundled one: `tiny`, `tiny:reduced`, `tiny:dflash2` or
`tiny:dspark`.
"""

from pathlib import Path

from dflash_cli.checkpoints import opening
from dflash_cli.checkpoints.opening import Causality, DraftCheckpoint, Layout
from dflash_cli.checkpoints.references import Role, fetch_directory
from dflash_runtime.checkpoint.pair import TargetSource

Reference = str | Path


def open_draft(
    reference: Reference, *, causality: Causality | None = None, layout: Layout | None = None
) -> DraftCheckpoint:
    """Read the config and headers of a draft in any known dialect. `causality` and `layout` overrule the config.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: see `dflash_runtime.errors`.
    """
    overrides = opening.Overrides(causality, layout)
    return opening.open_draft(fetch_directory(str(reference), Role.DRAFT), overrides=overrides)


def open_target(reference: Reference) -> TargetSource:
    """Read the config and headers of a target.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: see `dflash_runtime.errors`.
    """
    return opening.open_target(fetch_directory(str(reference), Role.TARGET))
