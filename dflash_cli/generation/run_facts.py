"""Facts about a run in its result: checkpoints, machine, package versions, command."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from dflash_cli.checkpoints.checkpoint_identity import Identity
from dflash_cli.terminal.environment import redacted
from dflash_cli.version import __version__
from dflash_runtime.documents import OPTIONAL, fields_of

PACKAGES = ("dflash-cli", "torch", "transformers", "safetensors", "tokenizers", "triton", "accelerate", "numpy")

DraftMethod = Annotated[str | None, OPTIONAL, "the name that engines give this way of drafting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Machine, package versions, command and time of a run."""

    device_name: str
    python: str
    packages: Mapping[str, str | None]
    argv: Annotated[tuple[str, ...], "the command, without secrets"]
    date: str

    @classmethod
    def here(cls, device_name: str) -> "RunFacts":
        """Return the facts of a run of this process."""
        releases = {name: release_of(name) for name in PACKAGES}
        return cls(device_name=device_name, python=platform.python_version(), packages=releases, **command_and_date())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEngine:
    """One worker of a run."""

    host: str
    device_name: str
    num_prompts: Annotated[int, "prompts that it answered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers that answered the prompts of a run."""

    address: Annotated[str, "of the Ray cluster; local if it was started for the run"]
    num_workers: Annotated[int, "number of workers at the same time"]
    num_lost: int
    engines: Annotated[tuple[WorkerEngine, ...], "including workers that were lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRun(RunFacts):
    """Facts about a run of a loaded pair."""

    draft: Identity | None
    draft_method: DraftMethod = None
    target: Identity
    template_digest: Annotated[str | None, "of the chat template"]
    max_num_requests: int
    scheduling: str
    target_runtime: str
    device_map: str | None = None
    target_quantization: Annotated[str | None, "how the target's weights are packed"] = None
    prefix_cache: bool
    adaptive_width: bool
    engine: Annotated[Mapping[str, Any], "every engine setting, as given"]
    workers: Annotated[Workers | None, OPTIONAL] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun(PairRun):
    """Facts about the run of an evaluation."""

    num_prompts: int
    prompts_digest: Annotated[str, "of the prompts as given"]
    rendered_prompts_digest: Annotated[str, "of the prompts' token ids"]
    lock_sha256: Annotated[str | None, "of the lock file that the pair was checked against"] = None
    workers: Annotated[Workers | None, "null if one process answered"] = None

    @classmethod
    def of(cls, run: PairRun, **more: Any) -> "EvaluationRun":
        """Return the facts of a run together with facts about its prompts."""
        return cls(**fields_of(run), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedEnds:
    """The checkpoint that provides a draft's embedding and head."""

    name: str
    ends_digest: Annotated[str | None, "of rows of the embedding and head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpSource:
    """The dump that a draft is replayed on."""

    name: str
    format: str
    taps: tuple[int, ...]
    target: Identity | None
    is_complete: bool
    num_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun(RunFacts):
    """Facts about a replay."""

    draft: Identity
    draft_method: DraftMethod = None
    target: Annotated[Identity | None, "if the dump names it"]
    head_from: Annotated[BorrowedEnds | None, "the checkpoint that provides the draft's embedding and head"]
    dump: DumpSource
    num_blocks: Annotated[int, "blocks that were drafted"]
    num_prompts: int
    prompts_digest: Annotated[str, "of the prompts as given"]


def command_and_date() -> dict[str, Any]:
    """Return `argv` and `date` of this process."""
    return {
        "argv": (Path(sys.argv[0]).name, *redacted(sys.argv[1:])),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def release_of(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    if name == "dflash-cli":
        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
