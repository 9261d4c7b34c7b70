"""`dflash inspect`: describe a checkpoint, show how two differ, or estimate the memory of a pair."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dflash_cli.terminal import console
from dflash_cli.terminal.parameters import ENGINE, ESSENTIALS, SIZE, Argument, Option, parse_size
from dflash_cli.terminal.requests import Request, verb
from dflash_runtime.errors import UsageError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from dflash_cli.checkpoints.comparison import Difference
    from dflash_cli.checkpoints.description import Description
    from dflash_cli.checkpoints.references import Location
    from dflash_cli.engines.pair_memory import PairMemory

MEMORY_OPTIONS = ("max_model_len", "concurrency", "kv_dtype", "gpu_memory")
"""Options of the memory estimate, which need a target."""


@dataclass(frozen=True, kw_only=True)
class InspectionRequest(Request):
    """Describe a draft or a target; with two references, show the differences; with --target, estimate GPU memory."""

    reference: Annotated[
        str,
        Argument(
            flag="--draft",
            short="-d",
            metavar="REF",
            help="A directory, a hub repository org/repo[@revision], or tiny.",
        ),
    ]
    other: Annotated[
        str | None, Argument(metavar="REF2", help="Second checkpoint: show how it differs from the first.")
    ] = None
    tensors: Annotated[
        bool,
        Option(group=ESSENTIALS, help="List every tensor; with two checkpoints, every tensor that differs."),
    ] = False
    values: Annotated[
        bool,
        Option(
            group=ESSENTIALS,
            help="With two checkpoints: download hub repositories and compare tensor values. Default: compare only "
            "their configs and headers. Directories are always compared in full.",
        ),
    ] = False
    target: Annotated[
        str | None,
        Option(
            short="-t", metavar="TARGET", group=ESSENTIALS, is_per_run=True, ignores_shared=True,
            help="Estimate the GPU memory of serving the draft with this target, from headers.",
        ),
    ] = None  # fmt: skip
    max_model_len: Annotated[
        int | None,
        Option(
            min=2, group=ENGINE, is_per_run=True, ignores_shared=True,
            help="With --target: most tokens of a prompt and its answer together. Default: the most that the pair "
            "allows.",
        ),
    ] = None  # fmt: skip
    concurrency: Annotated[
        int | None,
        Option(
            min=1,
            group=ENGINE,
            is_per_run=True,
            ignores_shared=True,
            help="With --target: requests at once. Default: 16.",
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "fp8"] | None,
        Option(
            group=ENGINE,
            is_per_run=True,
            ignores_shared=True,
            help="With --target: number format of KV pages. Default: bfloat16.",
        ),
    ] = None
    gpu_memory: Annotated[
        int | None,
        Option(
            metavar="SIZE", parse=parse_size, expected=SIZE, min=2**20, group=ENGINE, is_per_run=True,
            ignores_shared=True,
            help="With --target: memory of the GPU, such as 80G. Prints how many requests fit.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        self._check_memory()
        if self.values and self.other is None:
            raise UsageError(
                "--values needs two checkpoints", id="option-needs-another", field="--values",
                hint="give a second one after the first",
            )  # fmt: skip

    def _check_memory(self) -> None:
        """Refuse options of the memory estimate without a target, and a target beside other questions."""
        if self.target is None:
            for name in MEMORY_OPTIONS:
                if getattr(self, name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    raise UsageError(
                        f"{flag} needs --target", id="option-needs-another", field=flag, hint="add --target TARGET"
                    )
            return
        for flag, is_given in (
            ("REF2", self.other is not None), ("--tensors", self.tensors), ("--values", self.values),
        ):  # fmt: skip
            if is_given:
                raise UsageError(
                    f"{flag} does not go with --target, which estimates the memory of one pair",
                    id="memory-of-one-pair", field=flag, hint="leave out one of the two",
                )  # fmt: skip


@verb(InspectionRequest)
def inspect(request: InspectionRequest) -> "Description | Difference | PairMemory":
    """Describe one checkpoint, the differences of two, or the memory of a draft and a target.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: a checkpoint is absent or cannot be read.
        UsageError: one checkpoint is a draft and the other a target; or `max_model_len` is above the pair's positions.
        PairMismatch: the draft was not made for the target.
    """
    if request.target is not None:
        return _estimate(request, request.target)
    from dflash_cli.checkpoints.comparison import compare
    from dflash_cli.checkpoints.description import describe
    from dflash_cli.checkpoints.references import Role, find_checkpoint

    names = [request.reference, *([] if request.other is None else [request.other])]
    locations = [find_checkpoint(item, Role.DRAFT, needs_weights=request.values and len(names) > 1) for item in names]
    found = [describe(item) for item in locations]
    tell_traffic(*locations)
    if len(found) == 1:
        return found[0]
    first, second = found
    if first.kind != second.kind:
        raise UsageError(
            f"{names[0]} is a {first.kind} and {names[1]} is a {second.kind}: they cannot be compared",
            id="kinds-differ", field="REF2", found=second.kind, expected=first.kind,
            hint="compare two drafts or two targets",
        )  # fmt: skip
    return compare(first, second, with_values=all(isinstance(item, Path) for item in locations))


def _estimate(request: InspectionRequest, target: str) -> "PairMemory":
    """Estimate the memory of a pair. Only the headers of a hub repository are read."""
    from dflash_cli.checkpoints.opening import open_draft, open_target
    from dflash_cli.checkpoints.references import Role, find_checkpoint, open_checkpoint
    from dflash_cli.engines.pair_memory import measure_pair
    from dflash_runtime.engine_config import EngineConfig

    locations = find_checkpoint(request.reference, Role.DRAFT), find_checkpoint(target, Role.TARGET)
    draft, verifier = open_draft(open_checkpoint(locations[0])), open_target(open_checkpoint(locations[1]))
    given: dict[str, Any] = {
        "max_model_len": request.max_model_len, "max_num_requests": request.concurrency, "kv_dtype": request.kv_dtype,
    }  # fmt: skip
    config = EngineConfig(**{name: value for name, value in given.items() if value is not None})
    found = measure_pair(draft, verifier, config, names=(request.reference, target), gpu_bytes=request.gpu_memory)
    tell_traffic(*locations)
    return found


def command(request: InspectionRequest) -> None:
    """Describe or compare, and print."""
    from dflash_cli.checkpoints.description import Description, inspect_document
    from dflash_cli.checkpoints.wording import description_lines, difference_lines
    from dflash_cli.engines.pair_memory import PairMemory

    found = inspect(request)
    if isinstance(found, Description):
        if console.is_json():
            console.result_json(inspect_document(found, with_tensors=request.tensors))
            return
        for line in description_lines(found, with_tensors=request.tensors):
            console.result(line)
        for note in found.notes:
            console.note(note)
        return
    if console.is_json():
        console.result_json(found.document)
        return
    if isinstance(found, PairMemory):
        for line in found.summary():
            console.result(line)
        return
    for line in difference_lines(found, with_tensors=request.tensors):
        console.result(line)
    if found.num_not_compared:
        text = "only headers were read from the hub; --values downloads the weights and compares them too"
        console.note(Notice(text, id="values-not-compared"))


def tell_traffic(*locations: "Location | None") -> None:
    """Print how much was read from the hub for each repository."""
    for location in locations:
        if location is not None and not isinstance(location, Path):
            console.status(f"{location.path}: {location.traffic.text}")
