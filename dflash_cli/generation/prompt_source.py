"""The source of a result's prompts, and the prompts that could not be measured."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.generation.prompts import Sample
from dflash_runtime.documents import HIDDEN, NOT_REQUIRED
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that could not be measured; the error names it."""

    index: int
    id: str | int | None
    error: str
    condition: str | None = None
    exit_code: Annotated[int, HIDDEN] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """The dataset that provides the prompts."""

    source: Annotated[str, "a repository of the hub, or the folder or file that the user named"]
    commit: str | None
    files: tuple[str, ...]
    subset: str | None
    format: Annotated[str, "the project that defines the prompt format"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """The source of an evaluation's prompts, and how many were chosen."""

    name: str
    num_available: int
    num_chosen: int | None = None
    sample: Annotated[Sample | None, "how a subset was chosen"] = None
    sample_seed: int | None = None
    is_bundled: bool = False
    version: Annotated[str | None, "of a bundled set"] = None
    sha256: Annotated[str | None, "of the file, or of a dataset's files one after the other"] = None
    dataset: DatasetSource | None = None
    num_cut: Annotated[
        int, NOT_REQUIRED, "prompts longer than the shortest of --context-lengths, and cut at the front for this length"
    ] = 0
    num_too_long: Annotated[int, "prompts left out because no cut gives them every one of --context-lengths"] = 0
    warning: Notice | None = None

    @property
    def is_named(self) -> bool:
        """Whether the name identifies the prompts for every reader."""
        return self.version is not None or self.dataset is not None

    @property
    def lines(self) -> list[str]:
        """Lines that say which subset was chosen; empty if every prompt was."""
        of_all = f"of {self.num_available} prompts"
        chosen = {
            "stratified": f"{self.num_chosen} {of_all}, drawn from each category in proportion "
            f"(seed {self.sample_seed})",
            "random": f"{self.num_chosen} {of_all}, drawn at random (seed {self.sample_seed})",
            "head": f"the first {self.num_chosen} {of_all}",
        }
        found = [chosen[self.sample]] if self.sample is not None else []
        if self.num_cut:
            found.append(f"{plural(self.num_cut, 'prompt')} cut at the front to the shortest of --context-lengths")
        if self.num_too_long:
            found.append(f"{plural(self.num_too_long, 'prompt')} left out: no cut gives each of --context-lengths")
        return found
