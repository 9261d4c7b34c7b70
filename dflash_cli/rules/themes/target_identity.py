"""Rules on whether a draft was made for the given target: its name, tokenizer and weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_cli.checkpoints.checkpoint_identity import (
    TargetFingerprint,
    may_name_one_target,
    published_name,
    target_fingerprint,
)
from dflash_cli.formats.dialect import named_architectures
from dflash_cli.rules.rule import FIX_OTHER_TARGET, FIX_RUN_LEVEL, Problem, check, check_weights
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.documents import from_json
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import as_object

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MANIFEST = "conversion.json"
PUBLISHED = {
    "qwen/qwen3-8b": ((16, (1, 9, 17, 25, 33)), (8, None)),
    "qwen/qwen3-4b": ((16, (1, 9, 17, 25, 33)),),
    "openai/gpt-oss-20b": ((8, (1, 6, 11, 16, 21)),),
    "qwen/qwen3.6-27b": ((16, (1, 16, 31, 46, 61)),),
    "qwen/qwen3.5-27b": ((16, (1, 16, 31, 46, 61)),),
}
"""Hub id of a target -> (block size, tapped layers) of its published drafts; None if the layers are not known."""


@check(
    "P08",
    "warning",
    effect="another target accepts fewer of the draft's tokens, even if it has the same shape",
    fix="dflash eval-acceptance {draft} --target {target} # measures it; or use the target that the draft names",
    source="z-lab/dflash#149; AEON-7#6",
    is_about_training=True,
)
def verifier_is_the_target(subject: Subject) -> Iterator[Problem]:
    """The given target is the verifier that the draft names."""
    name = subject.stated.value("verifier_name")
    reference = subject.plan.target_reference
    if not isinstance(name, str) or not name or reference is None:
        return
    if not may_name_one_target(name, reference):
        yield Problem(subject.at("verifier_name"), f"names {name}, but {reference} is given")


@check(
    "P16",
    "warning",
    effect="a draft is trained on the hidden states of one model, and the config names a model of another kind",
    fix=FIX_OTHER_TARGET,
    source="speculators 0.9.0 VerifierConfig",
    is_about_training=True,
)
def verifier_is_of_the_targets_kind(subject: Subject) -> Iterator[Problem]:
    """The target has the architecture that the draft names for its verifier."""
    stated = named_architectures({"architectures": subject.stated.value("verifier_architectures")})
    given = named_architectures(subject.target_json)
    if stated and given and not set(stated) & set(given):
        yield Problem(
            subject.at("verifier_architectures"), f"found {', '.join(stated)}, the target is {', '.join(given)}"
        )


@check(
    "P12",
    "info",
    effect="none by itself, but an unusual block size or unusual tapped layers are worth a second look",
    fix=FIX_RUN_LEVEL,
    source="configs of published drafts, 2026",
    is_about_training=True,
)
def settings_are_the_published_ones(subject: Subject) -> Iterator[Problem]:
    """Block size and tapped layers match the drafts published for this target."""
    reference = subject.plan.target_reference
    known = PUBLISHED.get(str(published_name(reference) if reference is not None else None).lower())
    if known is None or subject.stated.taps is None or subject.stated.block_size is None:
        return
    mine = (subject.stated.block_size, tuple(subject.stated.taps))
    if not any(block == mine[0] and taps in (None, mine[1]) for block, taps in known):
        stated = "; ".join(
            f"block {block}" + (f", tapped layers {list(taps)}" if taps else "") for block, taps in known
        )
        yield Problem(
            subject.at("target_layer_ids"), f"block {mine[0]}, tapped layers {list(mine[1])}; published: {stated}"
        )


@check(
    "P09",
    "warning",
    effect="if the draft was trained with its own tokenizer, ids mean other text here, and almost none is accepted",
    fix=FIX_OTHER_TARGET,
    source="ggml-org/llama.cpp#25733",
)
def tokenizers_agree(subject: Subject) -> Iterator[Problem]:
    """A tokenizer_config.json beside the draft lists the special tokens of the target.

    Special tokens differ between model families.
    """
    if TOKENIZER_CONFIG not in subject.files:
        return
    ours, theirs = special_tokens(subject.checkpoint), special_tokens(subject.target_checkpoint)
    for key in sorted(ours.keys() & theirs.keys(), key=str):
        if ours[key] != theirs[key]:
            yield Problem(
                f"{TOKENIZER_CONFIG}:added_tokens_decoder.{key}",
                f"found {ours[key]!r}, the target's is {theirs[key]!r}",
            )
            return


@check_weights(
    "P31",
    "warning",
    effect="if the draft was trained with its own tokenizer, ids mean other text here, and almost none is accepted",
    fix=FIX_OTHER_TARGET,
    source="ggml-org/llama.cpp#25733",
    outcome="drops",
)
def vocabularies_are_the_same(subject: Subject) -> Iterator[Problem]:
    """A tokenizer.json beside the draft gives every token the same id as the target's tokenizer."""
    if TOKENIZER_FILE not in subject.files:
        return
    ours, theirs = _vocabulary(subject.checkpoint), _vocabulary(subject.target_checkpoint)
    if not ours or not theirs:
        return
    moved = [token for token, number in ours.items() if theirs.get(token, number) != number]
    missing = len(ours.keys() ^ theirs.keys())
    if moved:
        first = min(moved)
        yield Problem(
            f"{TOKENIZER_FILE}:model.vocab",
            f"{len(moved)} of {len(ours)} tokens have other ids than in the target's: {first!r} is {ours[first]!r} "
            f"here and {theirs[first]!r} there",
        )
    elif missing:
        yield Problem(
            f"{TOKENIZER_FILE}:model.vocab",
            f"{missing} tokens are in only one of the two tokenizers",
            effect="text with these tokens is drafted badly, or the draft was made for another target",
        )


@check_weights(
    "P32",
    "warning",
    effect="if the draft was trained on the other target's hidden states, fewer of its tokens are accepted here",
    fix=FIX_OTHER_TARGET,
    source="MiaAI-Lab#67 (revision drift)",
    outcome="drops",
    is_about_training=True,
)
def target_is_the_one_of_the_conversion(subject: Subject) -> Iterator[Problem]:
    """The target equals the target that conversion.json describes.

    The rule compares the names and shapes of its tensors, and some of its rows.
    """
    if MANIFEST not in subject.files or subject.target_source is None:
        return
    stated = as_object(as_object(read_json(subject.checkpoint, MANIFEST).get("target")).get("fingerprint"))
    try:
        known = from_json(TargetFingerprint, stated)
        found = target_fingerprint(subject.target_source)
    except CheckpointError:  # InvalidConfig included: the manifest is of another tool
        return
    difference = known.difference(found)
    if difference is not None:
        yield Problem(f"{MANIFEST}:target.fingerprint", f"differs from the target that is given: {difference}")


def special_tokens(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Id -> text of the tokens that tokenizer_config.json lists."""
    entries = as_object(read_json(checkpoint, TOKENIZER_CONFIG).get("added_tokens_decoder"))
    return {key: as_object(entry).get("content") for key, entry in entries.items()}


def read_json(checkpoint: Checkpoint | None, name: str) -> Mapping[str, Any]:
    """A JSON file of a checkpoint; empty if the file is absent or cannot be read."""
    try:
        return (checkpoint.read_optional_json(name) if checkpoint is not None else None) or {}
    except CheckpointError:
        return {}


def _vocabulary(checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """Token -> id; empty if tokenizer.json has no such table."""
    return as_object(as_object(read_json(checkpoint, TOKENIZER_FILE).get("model")).get("vocab"))
