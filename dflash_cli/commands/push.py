"""`dflash push`: upload a checked draft to the hub, with its model card and its speculation profile."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_cli.terminal import console
from dflash_cli.terminal.options import DraftOptions, RuleOptions, TargetOptions
from dflash_cli.terminal.parameters import ESSENTIALS, OUTPUT, Argument, Option
from dflash_cli.terminal.progress import working
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.tables import print_table
from dflash_runtime.errors import GateFailed, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

if TYPE_CHECKING:
    from dflash_cli.comparing.stored_evaluation import StoredEvaluation
    from dflash_cli.publishing.draft_folder import LocalFile
    from dflash_cli.publishing.push_plan import PushPlan, PushResult

MAIN = "main"
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class PushRequest(RuleOptions, TargetOptions, DraftOptions):
    """Upload a draft's folder to the hub in one commit, after checking the draft and listing what will change.

    Needs HF_TOKEN or hf auth login. Files that the hub already has are not sent again.
    """

    draft: Annotated[
        str, Argument(flag="--draft", short="-d", metavar="DRAFT", help="Folder of the draft on this machine.")
    ]
    repo: Annotated[str, Argument(metavar="ORG/REPO", is_setting=False, help="Repository on the hub.")]
    result: Annotated[
        Path | None,
        Option(
            metavar="FILE", group=ESSENTIALS,
            help="A file of eval-acceptance --json: adds its section to README.md and its speculation_profile.json.",
        ),
    ] = None  # fmt: skip
    target_name: Annotated[
        str | None,
        Option(
            metavar="ORG/REPO", group=ESSENTIALS,
            help="The target's name in the card and the profile. Default: --target if it is on the hub, otherwise as "
            "measured.",
        ),
    ] = None  # fmt: skip
    engine: Annotated[
        tuple[str, ...],
        Option(
            short="-e", metavar="NAME[@RELEASE],...", group=ESSENTIALS,
            help="Engines that must be able to serve the draft; the card shows their commands.",
        ),
    ] = ()  # fmt: skip
    level: Annotated[
        Literal["headers", "weights"],
        Option(group=ESSENTIALS, help="Check configs and tensor headers, or every weight too."),
    ] = "weights"
    revision: Annotated[
        str, Option(metavar="BRANCH", group=ESSENTIALS, help="Branch to upload to. A missing branch is created.")
    ] = MAIN
    create_pr: Annotated[
        bool, Option(is_per_run=True, group=ESSENTIALS, help="Open a pull request instead of changing the branch.")
    ] = False
    private: Annotated[bool, Option(group=ESSENTIALS, help="Make a new repository private.")] = False
    message: Annotated[
        str, Option(short="-m", is_per_run=True, metavar="TEXT", group=ESSENTIALS, help="Subject of the commit.")
    ] = "Upload DFlash draft"
    dry_run: Annotated[
        bool, Option(is_per_run=True, group=ESSENTIALS, is_setting=False, help="List what would be uploaded, and stop.")
    ] = False
    yes: Annotated[
        bool,
        Option(short="-y", is_per_run=True, group=ESSENTIALS, is_setting=False, help="Upload without asking."),
    ] = False
    include: Annotated[
        tuple[str, ...],
        Option(metavar="PATTERN,...", group=OUTPUT, help="Also upload files that readers of a draft do not look for."),
    ] = ()
    exclude: Annotated[
        tuple[str, ...], Option(metavar="PATTERN,...", group=OUTPUT, help="Leave out files with these names.")
    ] = ()
    prune: Annotated[
        bool,
        Option(is_per_run=True, group=OUTPUT, help="Remove weights from the hub that the folder does not have."),
    ] = False
    force: Annotated[
        bool,
        Option(
            is_per_run=True, group=OUTPUT, is_setting=False,
            help="Upload although the draft fails its check, or the result is another draft's.",
        ),
    ] = False  # fmt: skip

    @property
    def hub_target(self) -> str | None:
        """The target's name on the hub, if the user gave it."""
        from dflash_cli.checkpoints.checkpoint_identity import published_name
        from dflash_cli.checkpoints.references import TINY_TARGET_NAME

        published = None if self.target is None else published_name(self.target)
        return self.target_name or (published if published != TINY_TARGET_NAME else None)

    def check(self) -> None:
        from dflash_cli.checkpoints.references import check_hub_names

        super().check()
        check_hub_names({"--target-name": self.target_name})
        if not REPO.fullmatch(self.repo):
            raise UsageError(field="ORG/REPO", found=self.repo, expected="a name on the hub, such as my-org/draft")
        if not self.message.strip():
            raise UsageError(field="--message", found=self.message, expected="a subject")
        if self.dry_run and self.yes:
            raise UsageError(
                "--dry-run and --yes exclude each other", id="options-exclude-each-other", field="--yes",
                hint="leave out one of them",
            )  # fmt: skip


@verb(PushRequest)
def push(request: PushRequest) -> "PushResult":
    """Plan an upload, and upload if `yes` is given.

    Raises:
        GateFailed: the draft fails its check, the result is another draft's, the hub has other weights, or the branch
            moved.
        UsageError, UnsupportedError: the folder has files that are not published.
        CheckpointNotFound: the draft or the token is absent, or the hub refuses or does not answer.
    """
    plan = _plan(request)
    return plan.run(request.message, is_pull_request=request.create_pr) if request.yes else plan.result


def command(request: PushRequest) -> None:
    """Print the plan, ask, upload and print the address."""
    plan = _plan(request)
    found = plan.result
    if not console.is_json():
        print_table(*found.shown_tables()[""])
        console.result(*found.summary())
    if found.is_needed and not request.dry_run and _is_confirmed(request):
        found = plan.run(request.message, is_pull_request=request.create_pr)
        if not console.is_json():
            console.result(found.url)
        console.note(Notice(_how_to_use(request, found), id="next-command"))
    if console.is_json():
        console.result_json(found)


def _how_to_use(request: PushRequest, found: "PushResult") -> str:
    """How others use the uploaded draft."""
    if found.pull_request is not None:
        return f"the pull request changes {found.repo} when it is merged"
    name = found.repo if found.revision == MAIN else f"{found.repo}@{found.revision}"
    target = [] if request.hub_target is None else ["--target", request.hub_target]
    engines = ["--engine", ",".join(request.engine)] if request.engine else []
    who = "readers with access" if found.is_private else "others"
    command = ["dflash", "serve-command" if engines else "inspect", name, *target, *engines]
    return f"{who} {'serve' if engines else 'look at'} it with: {shlex.join(command)}"


def _is_confirmed(request: PushRequest) -> bool:
    """Whether the upload is wanted: by --yes, or by the user at a terminal.

    Raises:
        UsageError: nobody can be asked.
    """
    if request.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            "nobody can be asked whether to upload", id="not-confirmed", field="--yes",
            hint="add --yes to upload, or --dry-run to only list the files",
        )  # fmt: skip
    return console.confirm(f"upload to {request.repo}?")


def _plan(request: PushRequest) -> "PushPlan":
    """Check the draft and its files, then compare them with the hub."""
    from dflash_cli.checkpoints.references import Role, fetch_directory, is_hub_id
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.publishing.draft_folder import choose_files
    from dflash_cli.publishing.hub_upload import read_state, require_access
    from dflash_cli.publishing.push_plan import plan_push

    if is_hub_id(request.draft):
        raise UsageError(
            field="DRAFT", found=request.draft, expected="a directory on this machine",
            hint=f"download it: dflash pull {shlex.quote(request.draft)}",
        )  # fmt: skip
    folder = fetch_directory(request.draft, Role.DRAFT)
    if not folder.is_dir():
        raise UsageError(
            field="DRAFT", found=request.draft, expected="the folder of the draft",
            hint=f"pass its folder: {shlex.quote(str(folder.parent))}",
        )  # fmt: skip
    require_access()
    if request.result is not None:
        read_evaluations([request.result])
    _check_draft(request)
    files = {item.name: item for item in choose_files(folder, include=request.include, exclude=request.exclude)}
    files |= {item.name: item for item in _made_files(request, folder)}
    with working("comparing with the hub"):
        return plan_push(
            read_state(request.repo, request.revision),
            [files[name] for name in sorted(files)],
            is_private=request.private,
            is_pull_request=request.create_pr,
            prunes=request.prune,
        )


def _check_draft(request: PushRequest) -> None:
    """Require that the draft passes `validate`.

    Raises:
        GateFailed: it does not, and `force` is not given.
    """
    from dflash_cli.commands.validate import ValidationRequest, validate

    report = validate(
        ValidationRequest(
            draft=request.draft, target=request.target, engine=request.engine, level=request.level,
            strict=request.strict, ignore=request.ignore,
        )
    )  # fmt: skip
    if not report.fails(strict=request.strict):
        return
    severities = ("error", "warning") if request.strict else ("error",)
    found = [item for item in report.findings if item.severity in severities]
    text = f"the draft fails its check with {plural(len(found), 'finding')}: {', '.join(item.id for item in found)}"
    if request.force:
        console.warn(f"{text}; it is uploaded because of --force")
        return
    raise GateFailed(
        text, id="draft-fails", path=request.draft, found=[item.id for item in found],
        hint=f"dflash validate {_pair(request)} --level {request.level} says why; --force uploads it all the "
        "same",
    )  # fmt: skip


def _pair(request: PushRequest) -> str:
    """The draft and, if it is given, the target, as other commands take them."""
    return shlex.join([request.draft, *(["--target", request.target] if request.target else [])])


def _made_files(request: PushRequest, folder: Path) -> "list[LocalFile]":
    """The card and the profile of the result, if one is given. The folder itself stays as it is."""
    if request.result is None:
        return []
    from dflash_cli.commands.card import CardRequest, card
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.documents.reading import read_text
    from dflash_cli.publishing.card_insertion import insert_card
    from dflash_cli.publishing.draft_folder import CARD, PROFILE, LocalFile
    from dflash_cli.publishing.exports.export_format import ExportPlan, find_export

    stored = read_evaluations([request.result])[0]
    _check_result(request, stored, folder)
    names = tuple(name.partition("@")[0] for name in request.engine) or CardRequest(result=request.result).engine
    made = card(
        CardRequest(result=request.result, draft_name=request.repo, target_name=request.hub_target, engine=names)
    ).made
    existing = folder / CARD
    text = insert_card(read_text(existing) if existing.exists() else "", made, existing).text
    profile = find_export("speculation-profile").export(
        ExportPlan(stored=stored, draft=request.repo, model=request.hub_target)
    )
    for warning in profile.warnings:
        console.warn(warning)
    return [LocalFile(CARD, text.encode()), LocalFile(PROFILE, profile.text.encode())]


def _check_result(request: PushRequest, stored: "StoredEvaluation", folder: Path) -> None:
    """Require that the result was measured with this draft.

    Raises:
        GateFailed: it was measured with another draft, and `force` is not given.
    """
    from dflash_cli.checkpoints.checkpoint_identity import identify
    from dflash_runtime.checkpoint.stored.gguf_checkpoint import open_stored

    measured = stored.evaluation.measured.draft
    own = identify(open_stored(folder), request.draft).digest
    if measured is None or measured.digest == own:
        return
    text = f"measured with the draft of digest {measured.digest}, and this draft has {own}"
    if request.force:
        console.warn(f"{request.result}: {text}; it is published because of --force")
        return
    raise GateFailed(
        text, id="result-of-another-draft", path=request.result, found=measured.digest, expected=own,
        hint=f"measure this draft: dflash eval-acceptance {_pair(request)} --json > result.json",
    )  # fmt: skip
