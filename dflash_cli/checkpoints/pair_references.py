"""Complete a pair if the user names only a draft, only a target, or neither."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_cli.checkpoints.references import TINY, Location, Role, is_bundled, open_checkpoint
from dflash_cli.formats.detection import detect_from
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, UnsupportedError, UsageError
from dflash_runtime.notices import Notice

Found = TypeVar("Found", bound=Location)
FoundTarget = TypeVar("FoundTarget", bound=Location)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReferences(Generic[Found]):
    """References of a draft and a target, and the location of the draft. A pair without a draft decodes plainly.

    `is_named_by_draft`: the user typed no target, and the draft's config names it.
    """

    draft: str | None
    draft_location: Found | None
    target: str | None
    is_named_by_draft: bool = False

    @property
    def note(self) -> Notice | None:
        """A note that names the target, if the user typed none."""
        text = f"using the target that the draft names: {self.target}"
        return Notice(text, id="target-named-by-draft") if self.is_named_by_draft else None

    def find_target(self, find: Callable[[str, Role], FoundTarget]) -> FoundTarget:
        """The location of the target. `find` is `references.fetch_directory` or `references.find_checkpoint`.

        Raises:
            UsageError: the draft does not name its target.
            CheckpointNotFound, UsageError: see `find`. The message says if the draft named the target.
        """
        if self.target is None:
            text = f"{self.draft} does not name its target"
            raise UsageError(text, id="target-not-named", field="--target", hint="add --target TARGET")
        try:
            return find(self.target, Role.TARGET)
        except CheckpointNotFound as error:
            if not self.is_named_by_draft:
                raise
            message = f"{error.message}; {self.draft} names it as its target"
            hint = "add --target TARGET"
            raise CheckpointNotFound(message, id="named-target-not-found", found=self.target, hint=hint) from error


def complete_pair(
    draft: str | None, target: str | None, *, find: Callable[[str, Role], Found], needs_draft: bool = True
) -> PairReferences[Found]:
    """The pair of two references. `find` returns the location of the draft.

    given     completed by
    neither   the bundled pair
    draft     the target that the draft names, None if it names none
    target    nothing: such a pair decodes plainly, and is refused if `needs_draft`

    Raises:
        CheckpointNotFound: see `find`.
        UsageError: a target without a draft.
    """
    if draft is None and target is not None and needs_draft:
        raise UsageError(
            "a target is given without a draft",
            id="target-without-draft",
            field="--draft",
            hint="add --draft DRAFT; dflash generate -k 0 runs the target alone",
        )
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
    """The name under which an engine loads a checkpoint: the reference, or a directory for the bundled pair."""
    return str(location) if is_bundled(reference) else reference


def _named_target(location: Location) -> str | None:
    """Return the target that a draft names, or None if its config names no target or cannot be read."""
    try:
        checkpoint = open_checkpoint(location)
        format = detect_from(checkpoint.config, frozenset(), checkpoint.config_path).format
        verifier = format.read_config(checkpoint.config, checkpoint.config_path).config.verifier
    except (CheckpointError, UnsupportedError):
        return None
    return verifier.name_or_path or None if verifier is not None else None
