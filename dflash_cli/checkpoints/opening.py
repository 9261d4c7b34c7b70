"""Open drafts and targets from directories, and make the sources that the runtime loads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_cli.formats.dialect import STYLE_FLAGS, Detection, Format, ParsedConfig, detect, is_draft
from dflash_cli.formats.stated import StatedConfig
from dflash_cli.formats.unserved import refuse_unserved
from dflash_runtime.checkpoint.canonical_names import CanonicalCheckpoint, find_quantization, refuse_packed
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.hf_config import BODY_KEYS, read_target_config, read_target_facts
from dflash_runtime.checkpoint.layout import NOT_OWNED, TensorSelection, owned_shapes, select_tensors
from dflash_runtime.checkpoint.pair import DraftSource, TargetSource
from dflash_runtime.config import DraftConfig, TargetFacts
from dflash_runtime.errors import MISSING, InvalidConfig, UnsupportedError, naming_file
from dflash_runtime.notices import Notice

Causality = Literal["causal", "non-causal", "layer-types"]
"""Attention inside a block, instead of the config's. `layer-types`: sliding layers are causal, full layers are not."""

SCALED_EMBEDDINGS = ("gemma", "muse", "minicpm", "granite")
"""Prefixes of the model types of targets that multiply or normalise their embedding."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft on disk in canonical form. `checkpoint` has its tensors under canonical names.

    `quantization` names the key, file or tensor that shows that the weights are quantised. None if they are not.
    """

    checkpoint: Checkpoint
    detection: Detection
    parsed: ParsedConfig
    quantization: str | None = None

    @property
    def config(self) -> DraftConfig:
        return self.parsed.config

    @property
    def format(self) -> Format:
        """The dialect of the draft."""
        return self.detection.format

    @property
    def stated(self) -> StatedConfig:
        """The fields that the config states."""
        return StatedConfig(self.format, self.checkpoint.config)

    @property
    def source(self) -> DraftSource:
        """The draft as the runtime loads it.

        Raises:
            UnsupportedError: see `check_runnable`.
        """
        self.check_runnable()
        return DraftSource(self.config, self.checkpoint)

    def check_runnable(self) -> None:
        """Refuse a draft that the runtime cannot load, or would compute differently than its config says.

        Raises:
            UnsupportedError: the weights are quantised, or a style flag asks for other norms or another rope.
        """
        refuse_packed(self.checkpoint.path, self.quantization)
        for key, value in STYLE_FLAGS.items():
            if any(item.value == value for item in self.stated.statements(key)):
                raise UnsupportedError(
                    f"{key} is {str(value).lower()}, which this runtime does not compute",
                    id="style-not-run",
                    path=self.checkpoint.config_path,
                    field=key,
                    found=value,
                    hint="dflash validate --engine says which engines do",
                )

    def select_tensors(self) -> TensorSelection:
        """The tensors that a reader loads, and the tensors that it skips.

        Tensors of quantised weights, and of a draft with an unserved setting, are not compared with the config.

        Raises:
            TensorMismatch: lists every missing, unexpected and misshapen tensor.
        """
        shapes = {name: info.shape for name, info in self.checkpoint.tensors.items()}
        is_comparable = self.quantization is None and not self.parsed.unserved
        expected = {name: shape for name, shape in shapes.items() if not NOT_OWNED.match(name)}
        return select_tensors(
            owned_shapes(self.config) if is_comparable else expected, shapes, path=self.checkpoint.path
        )


def open_draft(path: str | Path | Checkpoint, *, causality: Causality | None = None) -> DraftCheckpoint:
    """Read a draft of any known dialect. Reads JSON and headers only. `causality` overrules the config.

    Raises:
        CheckpointNotFound, CheckpointError: the draft is absent or malformed.
        UnknownFormat: no dialect recognises the draft.
        UnsupportedError: the config has an unserved setting.
    """
    stored = path if isinstance(path, Checkpoint) else Checkpoint(path)
    draft = read_draft(stored, detect(stored), causality=causality)
    with naming_file(stored.config_path):
        refuse_unserved(draft.parsed.unserved)
    return draft


def read_draft(stored: Checkpoint, detection: Detection, *, causality: Causality | None = None) -> DraftCheckpoint:
    """Read a draft of a known dialect. A draft with an unserved setting may only be described.

    Raises:
        CheckpointError, UnsupportedError: the dialect cannot read the config.
    """
    with naming_file(stored.config_path):
        parsed = detection.format.read_config(stored.config, stored.config_path)
    if causality is not None:
        parsed = override_causality(parsed, causality)
    quantization = find_quantization(stored)
    checkpoint = CanonicalCheckpoint(stored, None if quantization is not None else parsed.config)
    return DraftCheckpoint(checkpoint, detection, parsed, quantization)


def lacks_embedding_scale(draft: StatedConfig, target: TargetFacts) -> bool:
    """Whether the target scales its embedding and the draft does not state an embedding scale."""
    is_stated = draft.value("input_embedding_scale") is not None
    return target.model_type.lower().startswith(SCALED_EMBEDDINGS) and not is_stated


def override_causality(parsed: ParsedConfig, causality: Causality) -> ParsedConfig:
    """The parsed config with another causality than the config states."""
    config = parsed.config
    causal = {
        "causal": (True,) * config.num_layers,
        "non-causal": (False,) * config.num_layers,
        "layer-types": tuple(window is not None for window in config.windows),
    }[causality]
    note = Notice(f"attention is read as {causality}, as --causality says", id="causality-given")
    return replace(
        parsed,
        config=replace(config, causal=causal),
        notes=(*(item for item in parsed.notes if not item.id.startswith("causality")), note),
        has_doubtful_causality=False,
    )


def open_target(path: str | Path | Checkpoint) -> TargetSource:
    """Read a target's config. A target that the runtime does not run is refused later, when a command runs it.

    Raises:
        CheckpointNotFound, CheckpointError: see `errors`.
        UnsupportedError: the directory holds a draft.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    if is_draft(checkpoint.config):
        raise UnsupportedError(
            "is a draft, expected a target", id="draft-as-target", path=checkpoint.path, expected="a target"
        )
    with naming_file(checkpoint.config_path):
        return TargetSource(read_target(checkpoint.config, checkpoint.config_path), checkpoint)


def read_target(config: Mapping[str, Any], path: Path) -> TargetFacts:
    """The `TargetConfig` of a target that the runtime runs, and the `TargetFacts` of any other target.

    `not_known` of the facts names a key that is absent, or lists a value for each layer: another family may be so.

    Raises:
        InvalidConfig: another key holds a wrong value.
    """
    facts = read_target_facts(config, path)
    try:
        return read_target_config(config, path)
    except UnsupportedError:
        return facts
    except InvalidConfig as error:
        is_absent = error.found is MISSING or error.found is None
        is_by_layer = error.field in BODY_KEYS and isinstance(error.found, list)
        if not is_absent and not is_by_layer:
            raise
        return replace(facts, not_known=tuple(dict.fromkeys((*facts.not_known, str(error.field)))))
