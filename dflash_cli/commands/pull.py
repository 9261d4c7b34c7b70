"""`dflash pull`: download a draft from the hub into a folder, and verify it."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal import console
from dflash_cli.terminal.interruption import Interrupted
from dflash_cli.terminal.options import ForceOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Argument, Option
from dflash_cli.terminal.progress import working
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.tables import print_table
from dflash_runtime.errors import UsageError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from dflash_cli.publishing.pull_plan import PullPlan, PullResult


@dataclass(frozen=True, kw_only=True)
class PullRequest(ForceOptions):
    """Download a draft from the hub into a folder, compare every file with the hub's hashes, and describe the draft.

    Only files that readers of a draft look for are downloaded. The headers are read first, so a repository without a
    draft is refused at once. After an interruption, the same command continues.
    """

    repo: Annotated[
        str,
        Argument(
            metavar="ORG/REPO[@REVISION]", is_setting=False,
            help="Repository on the hub; REVISION is a branch, a tag or a commit.",
        ),
    ]  # fmt: skip
    output: Annotated[
        Path | None,
        Option(
            is_per_run=True, short="-o", metavar="DIR", group=ESSENTIALS, is_setting=False,
            help="Folder for the files. Default: the repository's name, in this folder.",
        ),
    ] = None  # fmt: skip
    gguf: Annotated[
        str | None,
        Option(
            metavar="NAME", group=ESSENTIALS, is_setting=False,
            help="Download this GGUF file of the repository: its name, or its quantisation such as Q8_0. Needed if "
            "the repository has several GGUF files, or safetensors weights too.",
        ),
    ] = None  # fmt: skip
    dry_run: Annotated[
        bool,
        Option(is_per_run=True, group=ESSENTIALS, is_setting=False, help="List what would be downloaded, and stop."),
    ] = False

    @property
    def folder(self) -> Path:
        """The folder that receives the files."""
        return self.output or Path(self.repo.partition("@")[0].rpartition("/")[2])

    def check(self) -> None:
        super().check()
        from dflash_cli.checkpoints.references import HUB_ID
        from dflash_cli.documents.atomic_file import check_output

        if not HUB_ID.match(self.repo):
            raise UsageError(
                field="ORG/REPO", found=self.repo, expected="a name on the hub, such as my-org/draft or my-org/draft@v2"
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(id="output-is-a-file", field="--output", found=str(self.folder), expected="a folder")
        check_output(self.folder, force=True, is_folder=True)


@verb(PullRequest)
def pull(request: PullRequest) -> "PullResult":
    """Download and verify a draft; with `dry_run`, return the files that would be downloaded.

    Raises:
        CheckpointError, UnsupportedError: the repository is not a draft, or a file differs from the hub's.
        CheckpointNotFound: the hub refuses or does not answer.
        UsageError: the folder has another version of a file.
    """
    plan = _plan(request)
    return plan.result if request.dry_run else _run(plan)


def command(request: PullRequest) -> None:
    """Download, verify, and describe the draft."""
    from dflash_cli.checkpoints.references import warn_if_hiding

    plan = _plan(request)
    if request.dry_run:
        console.show(plan.result, lambda: _print(plan.result))
        return
    found = _run(plan)
    console.show(found, lambda: _print_draft(found))
    warn_if_hiding(request.folder)
    words = ["dflash", "validate", str(found.draft), "--target", found.target or "TARGET"]
    console.note(Notice(f"to check it: {shlex.join(words)}", id="next-command"))


def _plan(request: PullRequest) -> "PullPlan":
    from dflash_cli.publishing.pull_plan import plan_pull

    with working("comparing with the hub"):
        return plan_pull(request.repo, request.folder, gguf=request.gguf, force=request.force)


def _run(plan: "PullPlan") -> "PullResult":
    try:
        return plan.run()
    except KeyboardInterrupt as error:
        raise Interrupted(kept_in=plan.folder, hint="run the same command again to continue") from error


def _print(found: "PullResult") -> None:
    print_table(*found.shown_tables()[""])
    console.result(*found.summary())


def _print_draft(found: "PullResult") -> None:
    """Print the description of the draft as `dflash inspect` prints it, and the summary."""
    from dflash_cli.checkpoints.description import describe
    from dflash_cli.checkpoints.wording import description_lines

    console.result(*description_lines(describe(found.draft), with_tensors=False), *found.summary())
