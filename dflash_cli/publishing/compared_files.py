"""Files of a draft, compared between a folder and the hub: what a pull and a push list."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dflash_cli.checkpoints.hub import size_text
from dflash_cli.publishing.draft_folder import LocalFile
from dflash_cli.publishing.hub_upload import StoredFile
from dflash_cli.terminal.shown import Shown, Table
from dflash_runtime.documents import computed_key

Change = Literal["new", "changed", "same", "removed"]
SENT = ("new", "changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFile:
    """A file of a pull or a push."""

    name: str
    change: Annotated[
        Change,
        "new: the other side lacks the file and gets it. changed: the other side's version is replaced. same: not "
        "sent. removed: the file is on the hub only, and a push removes it",
    ]
    num_bytes: int


class ComparedFiles(Shown):
    """Base of results with compared files."""

    files: tuple[ComparedFile, ...]

    @property
    @computed_key
    def num_bytes(self) -> int:
        """Bytes of the new and changed files."""
        return sum(item.num_bytes for item in self.files if item.change in SENT)

    def shown_tables(self) -> dict[str, Table]:
        rows = [(item.change, size_text(item.num_bytes), item.name) for item in self.files]
        return {"": (("change", "size", "file"), rows)}


def change_of(stored: StoredFile | None, file: LocalFile | None) -> Change:
    """Compare a file on the hub with the file of the same name here. None if one side lacks it."""
    if stored is None or file is None:
        return "new"
    return "same" if stored.holds(file) else "changed"
