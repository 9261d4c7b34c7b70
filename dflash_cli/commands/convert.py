"""`dflash convert`: write a draft in another dialect, with a manifest of every key, tensor and file."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dflash_cli.conversion.spec import ConversionSpec, Verification
from dflash_cli.formats.dialect import get_writable, writable_words
from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOptions, ReadingOptions
from dflash_cli.terminal.parameters import ESSENTIALS, SIZE, Argument, Option, parse_size
from dflash_cli.terminal.progress import bars
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.safe_text import safe_line
from dflash_runtime.documents import copy_fields, fields_of
from dflash_runtime.errors import UsageError, hinting

if TYPE_CHECKING:
    from dflash_cli.conversion.byte_progress import Progress
    from dflash_cli.conversion.changes import Change
    from dflash_cli.conversion.logits import LogitComparison
    from dflash_cli.conversion.manifest import Converted, DryRun
    from dflash_cli.conversion.result_plan import ResultPlan

LEGEND = (
    "kept: same name; moved: other section of the config; renamed: other name; split: rows of a fused tensor; "
    "derived: computed for the new dialect; dropped: not in the result"
)
"""The words that `--dry-run` prints before each key, tensor and file."""


@dataclass(frozen=True, kw_only=True)
class ConversionRequest(ForceOptions, ReadingOptions):
    """Convert a draft to another dialect, a checkpoint format. Tensors are copied byte for byte.

    conversion.json in the result lists what became of every config key, tensor and file.
    """

    source: Annotated[
        str,
        Argument(
            flag="--draft",
            short="-d",
            metavar="SRC",
            help="Draft to convert: a directory, org/repo[@revision], or tiny.",
        ),
    ]
    destination: Annotated[Path, Argument(metavar="DST", help="Directory to create; its parent must exist.")]
    to: Annotated[
        str,
        Option(
            metavar="DIALECT", group=ESSENTIALS,
            help=lambda: f"Dialect to write: {', '.join(writable_words())}. A dialect named "
            "after an engine is native, with every key that the engine needs to read the draft as it was trained.",
        ),
    ]  # fmt: skip
    target: Annotated[
        str | None,
        Option(
            short="-t", metavar="TARGET", group=ESSENTIALS,
            help="Target of the draft. It gives settings that SRC does not state. DST leaves out tensors that are "
            "copies of the target's.",
        ),
    ] = None  # fmt: skip
    target_name: Annotated[
        str | None,
        Option(metavar="NAME", group=ESSENTIALS, help="Name to store for the target. Default: its hub id."),
    ] = None
    dry_run: Annotated[
        bool,
        Option(is_per_run=True, group=ESSENTIALS, is_setting=False, help="Show what would be done, and write nothing."),
    ] = False
    verify: Annotated[
        Verification,
        Option(
            group=ESSENTIALS,
            help="Check the result. roundtrip: read it back. logits: also run SRC and DST on the CPU and compare "
            "their logits. none: no check.",
        ),
    ] = "roundtrip"
    allow_lossy: Annotated[
        bool,
        Option(
            is_per_run=True,
            group=ESSENTIALS,
            help="Convert although the new dialect cannot hold all settings or tensors.",
        ),
    ] = False
    quantize: Annotated[
        Literal["fp8"] | None,
        Option(
            help="fp8: round fc, o and the feed-forward of each layer to 8-bit floats with a scale per 128 x 128 "
            "numbers. Not rounded: q, k, v, the head, and with --to sglang fc. Default: no rounding."
        ),
    ] = None  # fmt: skip
    quantize_all: Annotated[
        bool,
        Option(help="Also round q, k, v and the head. The head is the target's."),
    ] = False
    dequantize: Annotated[
        bool,
        Option(help="Write packed matrices (FP8, MLX, quantised GGUF) as plain bfloat16."),
    ] = False
    tokenizer: Annotated[
        Path | None,
        Option(
            metavar="GGUF",
            help="With --to gguf: the target's GGUF file. Its tokenizer is copied, because llama.cpp needs one.",
        ),
    ] = None
    normalise_taps: Annotated[
        bool, Option(help="Sort the tapped layers, list each once, and reorder fc.weight to match.")
    ] = False
    max_shard_size: Annotated[
        int | None,
        Option(
            metavar="SIZE", parse=parse_size, expected=SIZE, min=1,
            help="Largest weight file, such as 500M or 5G. Default: the same files as SRC.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        get_writable(self.to)
        name = self.target_name
        if name is not None and (not name.strip() or safe_line(name) != name):
            raise UsageError(field="--target-name", found=name, expected="a hub id, such as org/model, or a path")
        if self.quantize_all and self.quantize is None:
            text = "--quantize-all: expected --quantize fp8 beside it"
            raise UsageError(text, id="quantize-all-alone", field="--quantize-all")
        if not get_writable(self.to).one_file:
            if self.tokenizer is not None:
                text = f"--tokenizer: --to {self.to} keeps the tokenizer in files of its own"
                raise UsageError(text, id="tokenizer-not-written", field="--tokenizer")
            return
        for option, value in (("--max-shard-size", self.max_shard_size), ("--quantize", self.quantize)):
            if value is not None:
                text = f"{option}: --to {self.to} writes one file in the types of SRC"
                raise UsageError(text, id="option-not-for-gguf", field=option)


def _for_renaming(spec: ConversionSpec, request: ConversionRequest) -> ConversionSpec:
    """The specification of a conversion that changes only names.

    Raises:
        UsageError: an option asks for more.
    """
    asked = {"--causality": request.causality is not None, "--normalise-taps": request.normalise_taps}
    asked["--verify logits"] = request.verify == "logits"
    asked["--quantize"] = request.quantize is not None
    for option, is_asked in asked.items():
        if is_asked:
            text = f"{option}: only names change in a draft of another kind than DFlash"
            raise UsageError(text, id="option-of-dflash", field=option.split()[0])
    return spec


def _plan(request: ConversionRequest) -> "ResultPlan":
    """The plan of the conversion, made before anything is written."""
    from dflash_cli.checkpoints.gguf_writer import check_tokenizer
    from dflash_cli.checkpoints.opening import Overrides, open_draft, open_target
    from dflash_cli.checkpoints.references import TINY, Role, fetch_directory, is_bundled
    from dflash_cli.checkpoints.unpacking import unpacked
    from dflash_cli.conversion.destination import check_destination, protect_inputs
    from dflash_cli.conversion.plan import ConversionPlan, plan_conversion
    from dflash_cli.conversion.renaming import plan_renaming
    from dflash_cli.conversion.staging import clear_remains
    from dflash_cli.formats.detection import detect
    from dflash_cli.formats.draft_kinds.kind import Kind
    from dflash_runtime.checkpoint.stored.gguf_checkpoint import open_stored

    check_destination(request.destination, force=request.force)
    for remain in clear_remains(request.destination, is_dry=request.dry_run):
        console.warn(remain)
    target = TINY if request.target is None and is_bundled(request.source) else request.target
    spec = ConversionSpec(
        to=request.to,
        target=None if target is None else open_target(fetch_directory(target, Role.TARGET)),
        target_reference=target,
        verifier=request.target_name,
        allow_lossy=request.allow_lossy,
        normalise_taps=request.normalise_taps,
        quantize=request.quantize,
        quantizes_all=request.quantize_all,
        max_shard_bytes=request.max_shard_size,
        tokenizer=request.tokenizer,
        argv=("dflash", *sys.argv[1:]),
    )
    source = open_stored(fetch_directory(request.source, Role.DRAFT))
    if request.dequantize:
        source = unpacked(source)
    detection = detect(source)
    if isinstance(detection.format, Kind):
        plan: ResultPlan = plan_renaming(source, detection, _for_renaming(spec, request))
    else:
        overrides = Overrides(request.causality, request.layout)
        with hinting(f"dflash validate {quote(request.source)} lists the faults of the draft"):
            plan = plan_conversion(open_draft(source, overrides=overrides), spec)
    if request.tokenizer is not None and isinstance(plan, ConversionPlan):
        check_tokenizer(request.tokenizer, plan.config.vocab_size)
    protect_inputs(request.destination, plan)
    for warning in plan.warnings:
        console.warn(warning)
    return plan


@verb(ConversionRequest)
def convert(request: ConversionRequest) -> "Converted | DryRun":
    """Write the draft in the other dialect, and return the manifest; with `dry_run`, the plan as a manifest.

    A conversion that fails leaves nothing at the destination.

    Raises:
        UsageError: the destination exists, or the dialect needs a name for the target.
        LossyConversion: the dialect cannot hold all of the draft, and `allow_lossy` is not given.
        CheckpointNotFound, CheckpointError, UnsupportedError, GateFailed, CapacityError: see `dflash_runtime.errors`.
    """
    plan = _plan(request)
    return _dry_run(plan) if request.dry_run else _write(request, plan)


def command(request: ConversionRequest) -> None:
    """Convert, and print the destination."""
    from dflash_cli.checkpoints.references import warn_if_hiding

    plan = _plan(request)
    console.status(_summary(plan))
    if request.dry_run:
        _show_dry_run(plan)
        return
    converted = _write(request, plan)
    if converted.logits is not None:
        console.status(_logits(converted.logits))
    console.show(converted, lambda: console.result(str(request.destination)))
    warn_if_hiding(request.destination)


def _write(request: ConversionRequest, plan: "ResultPlan") -> "Converted":
    from dflash_cli.conversion.execute import convert_draft
    from dflash_cli.conversion.manifest import Converted

    with _bars() as progress:
        manifest = convert_draft(
            plan, request.destination, verification=request.verify, progress=progress, force=request.force
        )
    return copy_fields(Converted, manifest, destination=str(request.destination))


def _dry_run(plan: "ResultPlan") -> "DryRun":
    from dflash_cli.conversion.manifest import DryRun

    return DryRun(**fields_of(plan.facts))


def _show_dry_run(plan: "ResultPlan") -> None:
    if console.is_json():
        console.result_json(_dry_run(plan))
        return
    console.status(LEGEND)
    for change in (*plan.key_changes, *plan.tensor_changes, *plan.file_changes):
        is_same = change.to in (None, change.from_)
        names = change.from_ if is_same else f"{change.from_ or '-'} -> {change.to}"
        console.result(f"{change.change:8} {names}{f'  ({change.why})' if change.why else ''}")
    for name, tensors in plan.files.items():
        console.result(f"{'writes':8} {name}  ({sum(tensor.num_bytes for tensor in tensors)} bytes of weights)")


def _summary(plan: "ResultPlan") -> str:
    keys, tensors = _counts(plan.key_changes), _counts(plan.tensor_changes)
    return (
        f"{plan.draft.format.name} -> {plan.format.name}: tensors {tensors}; config keys {keys}; "
        f"{plan.num_bytes / 1e6:.1f} MB of weights"
    )


def _logits(found: "LogitComparison") -> str:
    return (
        f"logits: the largest difference is {found.max_difference:g} where the largest logit is "
        f"{found.largest_logit:g}; {found.same_best_share:.2%} of the positions have the same best token"
    )


def _counts(changes: "Sequence[Change]") -> str:
    counts = Counter(change.change for change in changes)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


@contextmanager
def _bars() -> "Iterator[Progress]":
    """A progress bar for each stage of the conversion, in bytes."""
    with bars() as display:
        tasks: dict[str, Any] = {}

        def advance(stage: str, count: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage, total=total, figures="")
            display.advance(tasks[stage], count)
            done = display.tasks[tasks[stage]].completed
            display.update(tasks[stage], figures=f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

        yield advance
