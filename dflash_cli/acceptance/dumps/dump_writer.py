"""Write a dump: answer prompts with a target alone, and store its answers and the outputs of tapped layers.

Prompts are answered in batches. The target continues each answer by a few tokens, then reads it again for its hidden
states. Each file is renamed into place when it is complete, so an interrupted dump continues after the existing files.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_cli.acceptance.dumps.dump_format import HIDDEN, TOKENS, DumpedText, TextFacts
from dflash_cli.acceptance.dumps.own_dump import (
    MANIFEST,
    METADATA,
    DumpedRequest,
    DumpManifest,
    read_manifest,
    read_text,
    text_digests,
)
from dflash_cli.acceptance.journal import check_settings
from dflash_cli.acceptance.measure import find_failures
from dflash_cli.checkpoints.checkpoint_identity import digest_ends
from dflash_cli.documents.atomic_file import atomic_text, check_parent, make_folder, naming_output, write_whole
from dflash_cli.generation.answers import Answer, Event, own_seed
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.generation.prompt_source import Failure, PromptSource
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.terminal.shown import Shown
from dflash_runtime.checkpoint.stored.digests import hash_file
from dflash_runtime.checkpoint.stored.strict_json import read_json
from dflash_runtime.documents import to_json
from dflash_runtime.errors import CheckpointError, UsageError
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.sampling_params import SamplingParams

CONVENTION = "tap i is the output of decoder layer i, counted from 0; after the last layer, before the final norm"
FILES = "[0-9]*-[0-9]*.safetensors"
BATCHES = 4
"""Number of engine batches that are answered before their rows are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpPlan:
    """The rows to answer, the layers `taps` to keep, and the folder to write to.

    The target continues each answer by `num_overhang` tokens. `source` describes the rows for a later replay.
    """

    rows: Sequence[PromptRow]
    params: SamplingParams
    taps: tuple[int, ...]
    folder: Path
    num_overhang: int
    source: PromptSource | None = None
    chat: bool = False
    resume: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DumpSummary(Shown):
    """Result of a dump."""

    manifest: DumpManifest
    num_written: int
    failed: tuple[Failure, ...]

    def summary(self) -> list[str]:
        num_requests = len(self.manifest.requests or ())
        return [f"{plural(self.num_written, 'answer')} written, {num_requests} in all, {len(self.failed)} failed"]

    @property
    def document(self) -> DumpManifest:
        return replace(self.manifest, failed=self.failed)


def check_folder(folder: Path, *, resume: bool, force: bool) -> None:
    """Refuse a folder before anything is loaded.

    Raises:
        UsageError: the folder cannot be created, holds other files, or already holds a dump without `resume` or
            `force`.
    """
    check_parent(folder / MANIFEST if folder.is_dir() else folder)
    if folder.is_file():
        raise UsageError(
            "is a file, expected a folder", id="output-is-a-file", path=folder, field="--output", found=str(folder),
            expected="a folder, or a new name",
        )  # fmt: skip
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not _is_dump(folder):
        raise UsageError(
            "the folder exists and does not hold a dump",
            id="output-not-a-dump",
            path=folder,
            hint="name a new folder with --output",
        )
    if not (resume or force):
        raise UsageError(
            "exists already",
            id="output-exists",
            path=folder,
            hint="pass --resume to continue the dump, or --force to replace it",
        )


def _is_dump(folder: Path) -> bool:
    """Return whether the folder holds one of our dumps. Other programs write a `manifest.json` too."""
    try:
        return read_json(folder / MANIFEST).get("kind") == DumpManifest.KIND
    except CheckpointError:
        return False


def write_dump(session: PairSession, request: DumpPlan, sink: Callable[[Event], None]) -> DumpSummary:
    """Dump the answers that the folder lacks. `sink` receives every event of the generation.

    Raises:
        UsageError: the folder holds a dump with other settings, or see `check_folder`.
        OSError: a file cannot be written. Earlier files stay.
    """
    params = request.params.with_stops(session.stop_token_ids)
    manifest = _describe(session, request, params)
    _prepare(request, manifest)
    known = _known_files(request, manifest) if request.resume else {}
    pending = [
        row for row in request.rows if any((row.digest, row.index, turn) not in known for turn in range(row.num_turns))
    ]
    failures: list[Failure] = []
    num_written, size = 0, BATCHES * session.llm.limits.max_num_requests
    for begin in range(0, len(pending), size):
        answers = _answer(session, request, params, pending[begin : begin + size], sink)
        failures += find_failures(answers)
        sound = [answer for answer in answers if answer.output.error is None]
        for answer, more in zip(sound, _overhangs(session, params, sound, request.num_overhang), strict=True):
            _write_answer(session, request, answer, more)
            num_written += 1
    manifest = replace(manifest, is_complete=not failures, requests=tuple(_requests(request, manifest)))
    _write_manifest(request.folder, manifest)
    return DumpSummary(manifest=manifest, num_written=num_written, failed=tuple(failures))


def _describe(session: PairSession, request: DumpPlan, params: SamplingParams) -> DumpManifest:
    """Return the manifest as it is before the first answer."""
    target = session.llm.pair.target
    settings, digests = session.run_settings(params, chat=request.chat), text_digests(session.target.checkpoint)
    return DumpManifest(
        taps=request.taps,
        taps_convention=CONVENTION,
        dtype=session.llm.pair.placement.dtype_name,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        target=session.identities["target"],
        ends_digest=digest_ends(session.target),
        tokenizer_digest=digests["tokenizer_digest"],
        template_digest=digests["template_digest"],
        settings=to_json(settings | {"taps": request.taps, "num_overhang": request.num_overhang}),
        prompts=request.source,
        measured=session.describe(),
    )


def _prepare(request: DumpPlan, manifest: DumpManifest) -> None:
    """Create the folder with its manifest, or check that it holds a dump with these settings."""
    folder = request.folder
    check_folder(folder, resume=request.resume, force=request.force)
    if request.resume and (folder / MANIFEST).is_file():
        hint = "give the same target and options again, or name another folder with --output"
        check_settings(folder, read_manifest(folder).settings, manifest.settings, hint)
    is_new = not folder.exists()
    make_folder(folder)
    with naming_output(folder):
        for file in (*folder.glob(".*.tmp-*"), *(() if request.resume else folder.glob(FILES))):
            file.unlink()
    try:
        _write_manifest(folder, manifest)
    except BaseException:
        with suppress(OSError):  # as on a full disk
            if is_new:
                folder.rmdir()
        raise


def _known_files(request: DumpPlan, manifest: DumpManifest) -> dict[tuple[str, int, int], DumpedText]:
    """Return the stored answers by prompt and turn. An unreadable file is skipped, so its prompt is asked again."""
    known = {}
    for file in sorted(request.folder.glob("*.safetensors")):
        try:
            text = read_text(file, (len(request.taps), manifest.hidden_size), manifest.vocab_size)
        except CheckpointError:
            continue
        known[text.row.digest, text.row.index, text.turn] = text
    return known


def _answer(
    session: PairSession,
    request: DumpPlan,
    params: SamplingParams,
    rows: Sequence[PromptRow],
    sink: Callable[[Event], None],
) -> list[Answer]:
    answers = []
    for event in session.answer(rows, params, chat=request.chat):
        sink(event)
        if event.answer is not None:
            answers.append(event.answer)
    return answers


def _overhangs(
    session: PairSession, params: SamplingParams, answers: Sequence[Answer], num_tokens: int
) -> list[tuple[int, ...]]:
    """Return the target's further tokens after each answer, ignoring stop tokens; none at the model's length limit.

    A sampled token depends only on its position and its request's seed, so a longer answer would hold the same tokens.
    """
    if not num_tokens:
        return [() for _ in answers]
    further = replace(params, max_new_tokens=num_tokens, ignore_eos=True)
    prompts = [(*answer.output.prompt_token_ids, *answer.output.token_ids) for answer in answers]
    outputs = session.llm.generate(prompts, [own_seed(further, answer.row) for answer in answers])
    return [output.token_ids for output in outputs]


def _write_answer(session: PairSession, request: DumpPlan, answer: Answer, overhang: tuple[int, ...]) -> None:
    import torch
    from safetensors.torch import save

    from dflash_runtime.device.text_pages import read_features

    output, pair = answer.output, session.llm.pair
    text = [*output.prompt_token_ids, *output.token_ids]
    page_size, scales = pair.config.page_size, pair.kv_scales
    features = read_features(pair.target, pair.placement, page_size, text[:-1], request.taps, scales)
    rows: torch.Tensor = features.view(len(text) - 1, len(request.taps), -1).cpu().contiguous()
    facts = TextFacts(
        row=answer.row,
        turn=answer.turn,
        finish_reason=output.finish_reason,
        prompt_len=len(output.prompt_token_ids),
        answer_len=len(output.token_ids),
        num_overhang=len(overhang),
    )
    tensors = {HIDDEN: rows, TOKENS: torch.tensor([*text, *overhang])}
    data = save(tensors, metadata={METADATA: json.dumps(to_json(facts), ensure_ascii=False)})
    write_whole(request.folder / _file_name(answer.row.index, answer.turn), data)


def _requests(request: DumpPlan, manifest: DumpManifest) -> Iterator[DumpedRequest]:
    for text in _known_files(request, manifest).values():
        yield DumpedRequest(
            file=text.file.name,
            index=text.row.index,
            turn=text.turn,
            prompt_len=text.prompt_len,
            answer_len=text.answer_len,
            num_tokens=len(text.token_ids),
            sha256=hash_file(text.file),
        )


def _file_name(index: int, turn: int) -> str:
    return f"{index:05d}-{turn}.safetensors"


def _write_manifest(folder: Path, manifest: DumpManifest) -> None:
    with atomic_text(folder / MANIFEST) as output:
        output.write(json.dumps(to_json(manifest), indent=1, ensure_ascii=False) + "\n")
