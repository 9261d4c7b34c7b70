"""The subject of rules: a draft as far as it can be read, its target, and the engines that the user named."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.pair_references import served_name
from dflash_cli.checkpoints.references import list_files, open_checkpoint
from dflash_cli.formats.detection import Detection, Unrecognised, detect_from
from dflash_cli.formats.dialect import Format, ParsedConfig
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.kind_reading import KindReading
from dflash_cli.formats.stated import MAX_LAYERS, StatedConfig
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.gguf_checkpoint import is_plain
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import CheckpointError, InvalidConfig, UnsupportedError, naming_file
from dflash_runtime.json_values import is_int
from dflash_runtime.target_config import TargetFacts

if TYPE_CHECKING:
    import torch

    from dflash_cli.checkpoints.references import Location

CONFIG_FILE = "config.json"
WEIGHTS = "model.safetensors"
"""The locations of findings about the config and about the weights, whatever the names of the files."""

UNRECOGNISED = Unrecognised()

BODY_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
"""Decoder key -> field of `DraftConfig`, for the sizes that determine tensor shapes."""


class NamedEngine(Protocol):
    """A serving engine that the user named, at one release. `release` is empty for an engine without releases."""

    @property
    def name(self) -> str: ...

    @property
    def release(self) -> tuple[int, ...]: ...

    def served_causality(self, subject: "Subject") -> tuple[bool, ...] | None:
        """Causality of each layer as the engine serves it; None if it is not known."""

    def loads_config(self, subject: "Subject") -> bool | None:
        """Whether the engine's own code accepts the config; None if that code is not modelled for it."""

    def served_layout(self, subject: "Subject") -> bool | None:
        """Whether the engine serves blocks of the draft anchor-first; None if it is not known."""

    def judges(self, dialect: Format) -> bool:
        """Whether it is known if the engine serves drafts of this kind and family."""

    def serves_kind(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """Whether the engine has a model for a draft of another kind or family."""

    def refuses_kind(self, dialect: Format, config: Mapping[str, Any]) -> str | None:
        """The reason why the engine does not serve a draft of another kind; None if it serves it."""

    def ignores_extra_tensor(self, name: str) -> bool:
        """Whether the engine loads a file with a tensor of that name, which the config does not ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPlan:
    """A draft to check, with a target, and engines on `tensor_parallel` GPUs. References are the words of the user."""

    draft: "Location"
    draft_reference: str | None = None
    target: "Location | None" = None
    target_reference: str | None = None
    engines: Sequence[NamedEngine] = ()
    level: Literal["headers", "weights", "run"] = "headers"
    ignored: Collection[str] = ()
    num_speculative_tokens: int | None = None
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A draft, its target and the named engines. A broken draft lacks parts, and an error says why:

    config      empty if config.json cannot be read (`config_error`)
    detection   None if no dialect recognises the config (`parse_error`)
    parsed      None if the dialect cannot read the config (`parse_error`)
    dims        None if the config does not state the sizes of the draft
    tensors     None if the headers cannot be read (`weights_error`)

    In `known`, rules keep results that other rules need too.
    """

    plan: ValidationPlan
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
    known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The directory of the draft."""
        draft = self.plan.draft
        return draft if isinstance(draft, Path) else draft.path

    @property
    def target(self) -> TargetFacts | None:
        return self.target_source.facts if self.target_source is not None else None

    @property
    def target_checkpoint(self) -> Checkpoint | None:
        return self.target_source.checkpoint if self.target_source is not None else None

    @property
    def target_json(self) -> Mapping[str, Any]:
        """The target's config.json; empty without a target."""
        return self.target_checkpoint.config if self.target_checkpoint is not None else {}

    @property
    def format(self) -> Format:
        """The dialect of the draft, which reads and locates its fields."""
        return self.detection.format if self.detection is not None else UNRECOGNISED

    @property
    def is_other_kind(self) -> bool:
        """Whether the draft is of a kind that dflash does not run. Engines may serve it."""
        return bool(self.format.difference)

    @property
    def num_trained_drafts(self) -> int | None:
        """The number of draft tokens in training; None if the block size is not known."""
        if self.parsed is not None:
            return self.parsed.config.num_draft_tokens
        block = self.stated.block_size
        is_anchor_first = self.format.samples_from_anchor and self.stated.value("sample_from_anchor") is not False
        return None if block is None else block - (not is_anchor_first)

    @property
    def kind_reading(self) -> KindReading | None:
        """A draft of another kind as the table of its kind reads it; None if no table is known."""
        shapes = {name: info.shape for name, info in (self.tensors or {}).items()}
        return KindReading(self.format, self.config, shapes) if isinstance(self.format, Kind) else None

    @property
    def dialect(self) -> str | None:
        return self.detection.format.name if self.detection is not None else None

    @property
    def stated(self) -> StatedConfig:
        """The fields of the config."""
        return StatedConfig(self.format, self.config)

    def load(self, name: str) -> "torch.Tensor | None":
        """The tensor of a canonical name, None if the draft lacks it or has it in a quantised type of GGUF."""
        info = (self.tensors or {}).get(name)
        if self.checkpoint is None or info is None or not is_plain(info.dtype):
            return None
        return self.checkpoint.load(name)

    def location(self, key: str) -> str:
        """The location of a dotted key of the config."""
        return f"{CONFIG_FILE}:{key}"

    def in_file(self, location: str) -> str:
        """A location as the user sees it: in a GGUF file, config and weights are one file."""
        file, colon, rest = location.partition(":")
        is_own = bool(self.format.one_file) and self.checkpoint is not None and file in (CONFIG_FILE, WEIGHTS)
        return f"{self.checkpoint.config_path.name}{colon}{rest}" if is_own and self.checkpoint else location

    def at(self, field: str) -> str:
        """The location of the key that states a field; if none does, of the key to add."""
        return self.location(self.stated.key(field))

    def expected_at(self, field: str) -> str:
        """The location of the key to add for a field, whether or not another key states it."""
        return self.location(self.format.new_key(field))

    def body_at(self, key: str) -> str:
        """The location of a key of the decoder."""
        return self.location(self.format.decoder_key(key))

    @property
    def is_served(self) -> bool:
        """Whether the config can be read and asks only for computations of DFlash."""
        return self.parsed is not None and not self.parsed.unserved and self.stated.block_size is not None

    @property
    def trained_causality(self) -> tuple[bool, ...] | None:
        """Causality of each layer as its own dialect reads the config; None if the config cannot be read."""
        return self.parsed.config.causal if self.parsed is not None else None

    def causality_in_words(self, causal: Sequence[bool]) -> str:
        """`the config states 2`, or how many layers are read as causal if the config states no causality."""
        states = self.stated.states_causality
        verb = "the config states" if states else "the config states no causality and is read as"
        return f"{verb} {sum(causal)}"

    @property
    def num_target_layers(self) -> int | None:
        """The number of layers of the target if it is given, else the number that the draft states."""
        if self.target is not None:
            return self.target.num_layers
        value = self.stated.value("num_target_layers")
        return value if is_int(value) and value > 0 else None

    def engine(self, name: str) -> NamedEngine | None:
        """The engine of that name, if the user asked for it."""
        return next((engine for engine in self.plan.engines if engine.name == name), None)

    @property
    def served_name(self) -> str:
        """The name that an engine loads the draft by: the reference, or the directory if no engine can resolve it."""
        return served_name(self._draft_reference, self.path)

    @property
    def command_words(self) -> dict[str, str]:
        """The words for `{draft}`, `{target}` and `{out}` in a command, quoted for the shell."""
        draft, target = self._draft_reference, self.plan.target_reference
        stem = PurePath(draft.partition("@")[0]).name.replace(":", "-") or "draft"
        return {
            "draft": shlex.quote(draft),
            "target": shlex.quote(target) if target else "TARGET",
            "out": shlex.quote(f"{stem}-fixed"),
        }

    @property
    def _draft_reference(self) -> str:
        return self.plan.draft_reference or str(self.path)


def open_subject(plan: ValidationPlan) -> Subject:
    """Read as much of a draft as possible. The subject keeps the errors that stopped the rest.

    Raises:
        CheckpointNotFound: the draft or the target is absent.
        CheckpointError, UnsupportedError: the target cannot be read.
    """
    target = open_target(open_checkpoint(plan.target)) if plan.target is not None else None
    files = list_files(plan.draft)
    try:
        checkpoint = open_checkpoint(plan.draft)
    except CheckpointError as error:
        return Subject(plan=plan, config={}, files=files, config_error=error, target_source=target)
    tensors, weights_error = _read_headers(checkpoint)
    detection, parsed, parse_error = _parse(checkpoint, frozenset(tensors or ()), plan.num_speculative_tokens)
    stated = StatedConfig(detection.format if detection is not None else UNRECOGNISED, checkpoint.config)
    return Subject(
        plan=plan,
        config=checkpoint.config,
        checkpoint=checkpoint,
        files=files,
        tensors=tensors,
        weights_error=weights_error,
        detection=detection,
        parsed=parsed,
        parse_error=parse_error,
        dims=parsed.config if parsed is not None else _guess_sizes(stated),
        target_source=target,
    )


def _read_headers(checkpoint: Checkpoint) -> tuple[Mapping[str, TensorInfo] | None, CheckpointError | None]:
    try:
        return checkpoint.tensors, None
    except CheckpointError as error:
        return None, error


def _parse(
    checkpoint: Checkpoint, tensor_names: frozenset[str], num_speculative_tokens: int | None
) -> tuple[Detection | None, ParsedConfig | None, CheckpointError | UnsupportedError | None]:
    """The dialect, the config as the dialect reads it, and the error if one of the two is None.

    If the config states no block size and the user says how many tokens to draft, the block has one row more, unless it
    is anchor-first.
    """
    detection = None
    try:
        detection = detect_from(checkpoint.config, tensor_names, checkpoint.config_path)
        stated = StatedConfig(detection.format, checkpoint.config)
        config = checkpoint.config
        if num_speculative_tokens is not None and stated.value("block_size") is None:
            is_anchor_first = detection.format.samples_from_anchor and stated.value("sample_from_anchor") is not False
            config = stated.with_value("block_size", num_speculative_tokens + (not is_anchor_first))
        with naming_file(checkpoint.config_path):
            return detection, detection.format.read_config(config, checkpoint.config_path), None
    except (CheckpointError, UnsupportedError) as error:
        return detection, None, error


def _guess_sizes(stated: StatedConfig) -> DraftConfig | None:
    """The sizes that the config states, with stand-ins for fields that no tensor shape depends on.

    None for a draft of another family than DFlash: the settings of such a family determine tensors too.
    """
    body = stated.body
    if stated.format.family != Format.family or not all(is_int(body.get(key)) for key in BODY_SIZES):
        return None
    reduced = stated.value("draft_vocab_size")
    return stand_in(
        {name: body[key] for key, name in BODY_SIZES.items()},
        len(stated.taps or (0,)),
        attention_bias=body.get("attention_bias") is True,
        has_sinks=stated.value("has_sinks") is True,
        **({"draft_vocab_size": reduced} if is_int(reduced) else {}),
    )


def stand_in(sizes: Mapping[str, int], num_taps: int, **fields: Any) -> DraftConfig | None:
    """A config with the sizes and stand-ins for fields that no tensor shape depends on; None if a size is wrong."""
    if not all(0 < size < 2**31 for size in sizes.values()) or sizes["num_layers"] > MAX_LAYERS:
        return None
    try:
        return DraftConfig(
            **{"draft_vocab_size": sizes["vocab_size"], **sizes, **fields},
            rms_norm_eps=1e-6,
            max_position_embeddings=1,
            rope=RopeConfig(theta=1.0),
            block_size=2,
            target_layer_ids=tuple(range(num_taps)),
            mask_token_id=0,
            causal=(False,) * sizes["num_layers"],
            windows=(None,) * sizes["num_layers"],
        )
    except InvalidConfig:
        return None
