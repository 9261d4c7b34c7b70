"""What rules check: everything that could be read of a draft, with the target and engines it is checked against."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

from dflash_cli.checkpoints.pair_references import served_name
from dflash_cli.checkpoints.references import list_files, open_checkpoint
from dflash_cli.formats.dialect import Detection, ParsedConfig, detect_from
from dflash_cli.formats.unserved import SINK_KEY
from dflash_runtime.checkpoint.files import Checkpoint, TensorInfo
from dflash_runtime.checkpoint.hf_config import FULL, SLIDING
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import DraftConfig, RopeConfig, TargetFacts
from dflash_runtime.errors import CheckpointError, InvalidConfig, UnsupportedError, naming_file
from dflash_runtime.json_values import as_object, is_int

if TYPE_CHECKING:
    import torch

    from dflash_cli.checkpoints.references import Location

CONFIG_FILE = "config.json"
SPECULATORS_BODY = "transformer_layer_config"
MAX_LAYERS = 10_000

BODY_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
"""Published key -> field of `DraftConfig`, for the sizes that tensor shapes follow from."""


class NamedEngine(Protocol):
    """A serving engine that the user named, at one release. `release` is empty where the engine has none."""

    @property
    def name(self) -> str: ...

    @property
    def release(self) -> tuple[int, ...]: ...

    def served_causality(self, subject: "Subject") -> tuple[bool, ...] | None:
        """Causality of each layer as the engine serves it; None where that is not known for the release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Everything that could be read of a draft, and the target and engines it is checked against.

    A draft under validation may be broken, so each part may be missing, and an error says why:

    config      empty if config.json cannot be read (`config_error`)
    detection   None if no dialect recognises the config (`parse_error`)
    parsed      None if the dialect cannot read the config (`parse_error`)
    dims        None if the config does not state even the sizes of the draft
    tensors     None if the headers cannot be read (`weights_error`)

    `draft_reference` and `target_reference` are what the user typed.
    """

    path: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None = None
    files: frozenset[str] = frozenset()
    config_error: CheckpointError | None = None
    weights_error: CheckpointError | None = None
    detection: Detection | None = None
    parsed: ParsedConfig | None = None
    parse_error: CheckpointError | UnsupportedError | None = None
    dims: DraftConfig | None = None
    tensors: Mapping[str, TensorInfo] | None = None
    target_source: TargetSource | None = None
    target_reference: str | None = None
    draft_reference: str | None = None
    engines: Sequence[NamedEngine] = ()
    num_speculative_tokens: int | None = None
    known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What one rule has found out that another asks for too, by a name of theirs."""

    @property
    def target(self) -> TargetFacts | None:
        return self.target_source.facts if self.target_source is not None else None

    @property
    def target_json(self) -> Mapping[str, Any]:
        """The target's config as it is written; empty without a target."""
        return self.target_source.checkpoint.config if self.target_source is not None else {}

    @property
    def dialect(self) -> str | None:
        return self.detection.format.name if self.detection is not None else None

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config or "speculators_config" in self.config

    @property
    def body(self) -> Mapping[str, Any]:
        """The object that holds the decoder keys."""
        return as_object(self.config.get(SPECULATORS_BODY)) if self.is_speculators else self.config

    @property
    def nested(self) -> Mapping[str, Any]:
        """`dflash_config` of a native draft."""
        return {} if self.is_speculators else as_object(self.config.get("dflash_config"))

    def load(self, name: str) -> "torch.Tensor | None":
        """The tensor of that canonical name, None where the draft has none."""
        if self.checkpoint is None or name not in (self.tensors or {}):
            return None
        return self.checkpoint.load(name)

    def location(self, key: str) -> str:
        """A key at the top level of the config."""
        return f"{CONFIG_FILE}:{key}"

    def body_location(self, key: str) -> str:
        """A key of the decoder body."""
        return self.location(f"{SPECULATORS_BODY}.{key}" if self.is_speculators else key)

    def homes(self, key: str) -> dict[str, Any]:
        """Every location that states a key which native drafts may nest, with its value; the one that wins first."""
        found = {self.location(f"dflash_config.{key}"): self.nested[key]} if key in self.nested else {}
        return {**found, self.location(key): self.config[key]} if key in self.config else found

    def stated(self, key: str) -> Any:
        """The value an engine takes for such a key, None where there is none."""
        return next((value for value in self.homes(key).values() if value is not None), None)

    @property
    def tap_key(self) -> str:
        return "aux_hidden_state_layer_ids" if self.is_speculators else "target_layer_ids"

    @property
    def tap_location(self) -> str:
        return next(iter(self.homes(self.tap_key)), self.location(self.tap_key))

    @property
    def taps(self) -> list[int] | None:
        """Tapped layers as outputs numbered from 0, None where they are no list of integers."""
        value = self.stated(self.tap_key)
        if not isinstance(value, list) or not value or not all(is_int(item) for item in value):
            return None
        return [item - 1 for item in value] if self.is_speculators else list(value)

    @property
    def block_size(self) -> int | None:
        value = self.stated("block_size")
        return value if is_int(value) else None

    @property
    def vocabulary_sizes(self) -> tuple[int, int] | None:
        """The draft's and the target's vocabulary as the draft states them, where both can be told."""
        vocab = self.body.get("vocab_size")
        reduced = self.config.get("draft_vocab_size", vocab)
        return (reduced, vocab) if is_int(reduced) and is_int(vocab) else None

    @property
    def layer_types(self) -> list[str]:
        """The stated kind of each layer; all full where nothing is stated."""
        value = self.body.get("layer_types")
        if isinstance(value, list):
            return [item for item in value if isinstance(item, str)]
        count = self.body.get("num_hidden_layers")
        return [FULL] * (count if is_int(count) and 0 < count < MAX_LAYERS else 1)

    @property
    def is_served(self) -> bool:
        """Whether the config can be read as it is, and asks for nothing that DFlash does not compute."""
        return self.parsed is not None and not self.parsed.unserved and self.block_size is not None

    @property
    def trained_causality(self) -> tuple[bool, ...] | None:
        """Causality of each layer as the config states it for its own dialect; None where it cannot be read."""
        return self.parsed.config.causal if self.parsed is not None else None

    @property
    def is_causality_stated(self) -> bool:
        """Whether the config says how its sliding layers attend in the block; other layers have one way only."""
        if SLIDING not in self.layer_types:
            return True
        if self.is_speculators:
            return "sliding_window_non_causal" in self.config
        return self.config.get("is_causal") is not None or self.nested.get("causal") is not None

    def causality_in_words(self, causal: Sequence[bool]) -> str:
        """`the config states 2 of 5`, or that it is only read so."""
        verb = "the config states" if self.is_causality_stated else "the config states none and is read as"
        return f"{verb} {sum(causal)}"

    @property
    def num_target_layers(self) -> int | None:
        """The target's depth: from the target where it is given, else as the draft states it."""
        if self.target is not None:
            return self.target.num_layers
        value = self.stated("num_target_layers")
        return value if is_int(value) and value > 0 else None

    def engine(self, name: str) -> NamedEngine | None:
        """The engine of that name, if the user asked for it."""
        return next((engine for engine in self.engines if engine.name == name), None)

    @property
    def served_name(self) -> str:
        """What an engine is told to load: the reference, or the directory where the reference means nothing to it."""
        return served_name(self.draft_reference or str(self.path), self.path)

    @property
    def command_words(self) -> dict[str, str]:
        """What stands for `{draft}`, `{target}` and `{out}` in a command to paste, quoted for the shell."""
        draft = self.draft_reference or str(self.path)
        stem = PurePath(draft.partition("@")[0]).name.replace(":", "-") or "draft"
        return {
            "draft": shlex.quote(draft),
            "target": shlex.quote(self.target_reference) if self.target_reference else "TARGET",
            "out": shlex.quote(f"{stem}-fixed"),
        }


def open_subject(
    draft: "Location",
    *,
    draft_reference: str | None = None,
    target: TargetSource | None = None,
    target_reference: str | None = None,
    engines: Sequence[NamedEngine] = (),
    num_speculative_tokens: int | None = None,
) -> Subject:
    """Read as much of a draft as can be read, and note the errors that stopped the rest.

    Raises:
        CheckpointNotFound: there is no draft.
    """
    given: dict[str, Any] = {
        "path": draft if isinstance(draft, Path) else draft.path,
        "files": list_files(draft),
        "target_source": target,
        "target_reference": target_reference,
        "draft_reference": draft_reference,
        "engines": tuple(engines),
        "num_speculative_tokens": num_speculative_tokens,
    }
    try:
        checkpoint = open_checkpoint(draft)
    except CheckpointError as error:
        return Subject(config={}, config_error=error, **given)
    tensors, weights_error = _read_headers(checkpoint)
    detection, parsed, parse_error = _parse(checkpoint, frozenset(tensors or ()), num_speculative_tokens)
    return Subject(
        config=checkpoint.config,
        checkpoint=checkpoint,
        tensors=tensors,
        weights_error=weights_error,
        detection=detection,
        parsed=parsed,
        parse_error=parse_error,
        dims=parsed.config if parsed is not None else _guess_dims(checkpoint.config),
        **given,
    )


def _read_headers(checkpoint: Checkpoint) -> tuple[Mapping[str, TensorInfo] | None, CheckpointError | None]:
    try:
        return checkpoint.tensors, None
    except CheckpointError as error:
        return None, error


def _parse(
    checkpoint: Checkpoint, tensor_names: frozenset[str], num_speculative_tokens: int | None
) -> tuple[Detection | None, ParsedConfig | None, CheckpointError | UnsupportedError | None]:
    """The dialect, the config as that dialect reads it, and the error because of which one of them is None.

    A block that is stated nowhere is that of the tokens that engines are to draft, if the user says how many.
    """
    config, detection = checkpoint.config, None
    if num_speculative_tokens is not None and Subject(path=checkpoint.path, config=config).stated("block_size") is None:
        config = {**config, "block_size": num_speculative_tokens + 1}
    try:
        detection = detect_from(checkpoint.config, tensor_names, checkpoint.config_path)
        with naming_file(checkpoint.config_path):
            return detection, detection.format.read_config(config, checkpoint.config_path), None
    except (CheckpointError, UnsupportedError) as error:
        return detection, None, error


def _guess_dims(config: Mapping[str, Any]) -> DraftConfig | None:
    """The draft's sizes where the config states them, with stand-ins for everything shapes do not depend on."""
    subject = Subject(path=Path(), config=config)
    body = subject.body
    if not all(is_int(body.get(key)) and 0 < body[key] < 2**31 for key in BODY_SIZES):
        return None
    if body["num_hidden_layers"] > MAX_LAYERS:
        return None
    fields = {name: body[key] for key, name in BODY_SIZES.items()}
    reduced = config.get("draft_vocab_size")
    try:
        return DraftConfig(
            **fields,
            draft_vocab_size=reduced if is_int(reduced) else fields["vocab_size"],
            rms_norm_eps=1e-6,
            max_position_embeddings=1,
            rope=RopeConfig(theta=1.0),
            block_size=2,
            target_layer_ids=tuple(range(len(subject.taps or (0,)))),
            mask_token_id=0,
            causal=(False,) * fields["num_layers"],
            windows=(None,) * fields["num_layers"],
            attention_bias=body.get("attention_bias") is True,
            has_sinks=subject.nested.get(SINK_KEY) is True,
        )
    except InvalidConfig:
        return None
