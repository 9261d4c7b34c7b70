"""Complete a pair: which target goes with a draft where the user names only one of them, or neither."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_cli.checkpoints.references import TINY, Location, Role, is_bundled, open_checkpoint
from dflash_cli.formats.dialect import detect_from
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, UnsupportedError, UsageError

Found = TypeVar("Found", bound=Location)
FoundTarget = TypeVar("FoundTarget", bound=Location)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReferences(Generic[Found]):
    """A draft and a target, as a user may type them, and where the draft is. A pair without a draft decodes plainly.

    With `is_named_by_draft` nobody typed the target: the draft names it.
    """

    draft: str | None
    draft_location: Found | None
    target: str | None
    is_named_by_draft: bool = False

    @property
    def note(self) -> str | None:
        """The note that tells the user which target the draft names, if nobody typed one."""
        return f"using the target that the draft names: {self.target}" if self.is_named_by_draft else None

    def find_target(self, find: Callable[[str, Role], FoundTarget]) -> FoundTarget:
        """Where the target is. `find` is `references.fetch_directory` or `references.find_checkpoint`.

        Raises:
            UsageError: the draft names none.
            CheckpointNotFound, UsageError: see `find`; the message says so where the draft named the target.
        """
        if self.target is None:
            raise UsageError(
                f"{self.draft} does not name its target",
                id="target-not-named",
                field="--target",
                hint="add --target TARGET",
            )
        try:
            return find(self.target, Role.TARGET)
        except CheckpointNotFound as error:
            if not self.is_named_by_draft:
                raise
            message = f"{error.message}; {self.draft} names it as its target"
            raise CheckpointNotFound(message, hint="add --target TARGET") from error


def complete_pair(
    draft: str | None, target: str | None, *, find: Callable[[str, Role], Found], needs_draft: bool = True
) -> PairReferences[Found]:
    """The pair that two references, of which either may be missing, stand for; `find` says where the draft is.

    Neither: the bundled pair. A draft alone: the target it names, None where it names none. A target alone is a pair
    only where no draft is needed, to decode plainly.

    Raises:
        CheckpointNotFound: the draft is not there.
        UsageError: a target without a draft.
    """
    if draft is None and target is not None and needs_draft:
        raise UsageError("a target is given without a draft", hint="add --draft DRAFT, or -k 0 to run the target alone")
    if draft is None and needs_draft:
        draft = TINY
    location = find(draft, Role.DRAFT) if draft is not None else None
    if target is None and (draft is None or is_bundled(draft)):
        target = TINY
    if target is not None or location is None:
        return PairReferences(draft=draft, draft_location=location, target=target)
    named = _named_target(location)
    return PairReferences(draft=draft, draft_location=location, target=named, is_named_by_draft=named is not None)


def served_name(reference: str, location: Location) -> str:
    """What an engine is told to load: the reference, or the directory where the reference means nothing to it."""
    return str(location) if is_bundled(reference) else reference


def _named_target(location: Location) -> str | None:
    """The target a draft names; None where it names none, or where its config cannot be read to the end."""
    try:
        checkpoint: Checkpoint = open_checkpoint(location)
        format = detect_from(checkpoint.config, frozenset(), checkpoint.config_path).format
        verifier = format.read_config(checkpoint.config, checkpoint.config_path).config.verifier
    except (CheckpointError, UnsupportedError):
        return None
    return verifier.name_or_path or None if verifier is not None else None
