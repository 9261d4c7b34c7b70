"""Rules on whether the target that is given is the very one a draft was made for: its tokenizer, and its weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_cli.checkpoints.fingerprint import TargetFingerprint, target_fingerprint
from dflash_cli.validation.rule import FIX_OTHER_TARGET, Problem, check
from dflash_cli.validation.subject import Subject
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import as_object

TOKENIZER_FILE = "tokenizer.json"
MANIFEST = "conversion.json"


@check(
    "P31",
    "warning",
    level="weights",
    effect="if the draft was trained with its own tokenizer, ids mean other text here and hardly any is accepted",
    fix=FIX_OTHER_TARGET,
    source="ggml-org/llama.cpp#25733",
    outcome="drops",
)
def vocabularies_are_the_same(subject: Subject) -> Iterator[Problem]:
    """A tokenizer.json that lies beside the draft gives every token the id it has in the target's."""
    if TOKENIZER_FILE not in subject.files or subject.target_source is None:
        return
    ours, theirs = (_vocabulary(item) for item in (subject.checkpoint, subject.target_source.checkpoint))
    if not ours or not theirs:
        return
    moved = [token for token, number in ours.items() if theirs.get(token, number) != number]
    missing = len(ours.keys() ^ theirs.keys())
    if moved:
        first = min(moved)
        yield Problem(
            f"{TOKENIZER_FILE}:model.vocab",
            f"{len(moved)} of {len(ours)} tokens have other ids than in the target's: {first!r} is {ours[first]!r}, "
            f"there {theirs[first]!r}",
        )
    elif missing:
        yield Problem(
            f"{TOKENIZER_FILE}:model.vocab",
            f"{missing} tokens are in one of the two tokenizers only",
            effect="text with these tokens is drafted badly, or the draft was made for another target",
        )


@check(
    "P32",
    "warning",
    level="weights",
    effect="if the draft was trained on the other target's hidden states, it accepts less with these",
    fix=FIX_OTHER_TARGET,
    source="MiaAI-Lab#67 (revision drift)",
    outcome="drops",
)
def target_is_the_one_of_the_conversion(subject: Subject) -> Iterator[Problem]:
    """The target is the one that conversion.json names, by names and shapes of its tensors and some of its rows."""
    if MANIFEST not in subject.files or subject.target_source is None or subject.checkpoint is None:
        return
    stated = as_object(as_object(_read(subject.checkpoint, MANIFEST).get("target")).get("fingerprint"))
    known = TargetFingerprint.from_json(stated)
    if known is None:
        return
    try:
        found = target_fingerprint(subject.target_source)
    except CheckpointError:
        return
    difference = known.difference(found)
    if difference is not None:
        yield Problem(f"{MANIFEST}:target.fingerprint", f"the target differs from the one converted for: {difference}")


def _vocabulary(checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """Token -> id, of a tokenizer that lists them so; empty for others."""
    if checkpoint is None:
        return {}
    model = as_object(_read(checkpoint, TOKENIZER_FILE).get("model"))
    return as_object(model.get("vocab"))


def _read(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    try:
        return checkpoint.read_optional_json(name) or {}
    except CheckpointError:
        return {}
