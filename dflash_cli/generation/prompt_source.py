"""Where the prompts of a result come from, and which of them could not be measured."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.generation.prompts import Sample
from dflash_runtime.documents import HIDDEN


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
    """The dataset that prompts are made of."""

    source: Annotated[str, "a repository of the hub, or the place that the user named"]
    commit: str | None
    files: tuple[str, ...]
    subset: str | None
    format: Annotated[str, "the project whose prompts are made of the rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where the prompts of an evaluation come from, and how many of them were chosen."""

    name: str
    num_available: int
    num_chosen: int | None = None
    sample: Annotated[Sample | None, "how fewer prompts were chosen"] = None
    sample_seed: int | None = None
    is_bundled: bool = False
    version: Annotated[str | None, "of a bundled set"] = None
    sha256: Annotated[str | None, "of the file, or of a dataset's files one after the other"] = None
    dataset: DatasetSource | None = None
    num_too_long: Annotated[int, "prompts left out: longer than the shortest context that was asked for"] = 0
    warning: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether the name says which prompts these are, to anybody."""
        return self.version is not None or self.dataset is not None

    @property
    def lines(self) -> list[str]:
        """How many were taken of how many, where that was not all."""
        of_all = f"of {self.num_available} prompts"
        chosen = {
            "stratified": f"{self.num_chosen} {of_all}, drawn from each category in proportion "
            f"(seed {self.sample_seed})",
            "random": f"{self.num_chosen} {of_all}, drawn at random (seed {self.sample_seed})",
            "head": f"the first {self.num_chosen} {of_all}",
        }
        found = [chosen[self.sample]] if self.sample is not None else []
        if self.num_too_long:
            noun = "prompt" if self.num_too_long == 1 else "prompts"
            found.append(f"{self.num_too_long} {noun} left out: longer than the shortest context asked for")
        return found
