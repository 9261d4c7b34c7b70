"""Open drafts and targets from directories, and make the sources that the runtime loads."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_cli.formats.detection import Detection, detect, is_draft
from dflash_cli.formats.dialect import STYLE_FLAGS, Format, ParsedConfig
from dflash_cli.formats.stated import StatedConfig
from dflash_cli.formats.unserved import refuse_unserved
from dflash_runtime.checkpoint.canonical_names import CanonicalCheckpoint, find_quantization, refuse_packed
from dflash_runtime.checkpoint.layout import NOT_OWNED, TensorSelection, owned_shapes, select_tensors
from dflash_runtime.checkpoint.pair import COPY_TARGET, DraftSource, TargetSource
from dflash_runtime.checkpoint.quantised.fp8_format import read_fp8_format, refuse_unless_fp8
from dflash_runtime.checkpoint.stored.element_types import refuse_wrong_dtypes
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.gguf_checkpoint import GgufCheckpoint, open_stored
from dflash_runtime.checkpoint.targets.hf_config import BODY_KEYS, read_target_config, read_target_facts
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, InvalidConfig, UnsupportedError, UsageError, hinting, naming_file
from dflash_runtime.notices import Notice
from dflash_runtime.target_config import TargetFacts

logger = logging.getLogger(__name__)

Causality = Literal["causal", "non-causal", "layer-types"]
"""Attention inside a block, instead of the config's. `layer-types`: sliding layers are causal, full layers are not."""

Layout = Literal["anchor-first", "fill-in"]
"""The rows of a DSpark block that predict a token: every row the token after it, or each mask its own token."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Readings of a draft that the user states instead of its config; None leaves the config's."""

    causality: Causality | None = None
    layout: Layout | None = None

    @property
    def settings(self) -> dict[str, str | None]:
        """The overrides as settings of a result. The layout is absent unless it was given."""
        return {"causality": self.causality, **({} if self.layout is None else {"layout": self.layout})}


NO_OVERRIDES = Overrides()

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
            UnsupportedError: the weights are quantised, a style flag asks for other norms or another rope, or the
                layout of a block is not known.
        """
        if self.quantization is not None and refuse_unless_fp8(self.checkpoint) is None:
            refuse_packed(self.checkpoint.path, self.quantization)
        self.refuse_unknown_layout()
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

    def refuse_unknown_layout(self) -> None:
        """Refuse a draft if its config lacks the layout of a block.

        Raises:
            UnsupportedError: the layout is not known.
        """
        if self.parsed.has_unknown_layout:
            raise UnsupportedError(
                "sample_from_anchor is missing, so the layout of a block is not known, and engines differ",
                id="layout-not-stated",
                path=self.checkpoint.config_path,
                field="sample_from_anchor",
                expected="true (anchor-first) or false (fill-in)",
                hint="--layout anchor-first (N rows draft N tokens) or --layout fill-in (N rows draft N - 1); "
                "the trainer of the draft knows which",
            )

    def select_tensors(self) -> TensorSelection:
        """The tensors that a reader loads, and the tensors that it skips.

        Tensors of quantised weights, and of a draft with an unserved setting, are not compared with the config.

        Raises:
            TensorMismatch: lists every missing, unexpected and misshapen tensor, or every matrix of integers.
        """
        shapes = {name: info.shape for name, info in self.checkpoint.tensors.items()}
        is_comparable = self.quantization is None and not self.parsed.unserved
        expected = {name: shape for name, shape in shapes.items() if not NOT_OWNED.match(name)}
        found = select_tensors(
            owned_shapes(self.config) if is_comparable else expected, shapes, path=self.checkpoint.path
        )
        if is_comparable:
            refuse_wrong_dtypes((self.checkpoint.tensors[name] for name in found.load), self.checkpoint.path)
        return found


def open_draft(path: str | Path | Checkpoint, *, overrides: Overrides = NO_OVERRIDES) -> DraftCheckpoint:
    """Read a draft of any known dialect. Reads JSON and headers only. `overrides` overrule the config.

    Raises:
        CheckpointNotFound, CheckpointError: the draft is absent or malformed.
        UnknownFormat: no dialect recognises the draft.
        UnsupportedError: the config has an unserved setting.
        UsageError: an override that the draft's family does not have.
    """
    stored = path if isinstance(path, Checkpoint) else open_stored(path)
    draft = read_draft(stored, detect(stored), overrides=overrides)
    with naming_file(stored.config_path):
        refuse_unserved(draft.parsed.unserved)
    return draft


def read_draft(stored: Checkpoint, detection: Detection, *, overrides: Overrides = NO_OVERRIDES) -> DraftCheckpoint:
    """Read a draft of a known dialect. A draft with an unserved setting may only be described.

    Raises:
        CheckpointError, UnsupportedError: the dialect cannot read the config.
        UsageError: an override that the draft's family does not have.
    """
    with naming_file(stored.config_path):
        parsed = detection.format.read_config(stored.config, stored.config_path)
    if overrides.causality is not None:
        parsed = override_causality(parsed, overrides.causality)
    if overrides.layout is not None:
        parsed = _override_layout(parsed, overrides.layout, detection.format)
    quantization = find_quantization(stored)
    is_fp8 = quantization is not None and read_fp8_format(stored) is not None
    checkpoint = CanonicalCheckpoint(stored, None if quantization is not None else parsed.config, is_renamed=is_fp8)
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


def _override_layout(parsed: ParsedConfig, layout: Layout, dialect: Format) -> ParsedConfig:
    """The parsed config with another layout of a block than the config states."""
    if not dialect.samples_from_anchor:
        raise UsageError(
            f"--layout {layout}: only DSpark drafts have two layouts, and this is {dialect.title}",
            id="layout-of-other-family",
            field="--layout",
            found=layout,
            hint="leave out --layout",
        )
    note = Notice(f"blocks are read as {layout}, as --layout says", id="layout-given")
    return replace(
        parsed,
        config=replace(parsed.config, sample_from_anchor=layout == "anchor-first"),
        notes=(*parsed.notes, note),
        has_unknown_layout=False,
    )


def open_target(path: str | Path | Checkpoint) -> TargetSource:
    """Read a target's config. A target that the runtime does not run is refused later, when a command runs it.

    Raises:
        CheckpointNotFound, CheckpointError: see `errors`.
        UnsupportedError: the directory holds a draft.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_stored(path)
    if is_draft(checkpoint.config) or isinstance(checkpoint, GgufCheckpoint):
        raise UnsupportedError(
            "is a draft, expected a target", id="draft-as-target", path=checkpoint.path, expected="a target",
            hint="--target names the model that the draft was trained for; did you swap the two?",
        )  # fmt: skip
    with hinting(COPY_TARGET), naming_file(checkpoint.config_path):
        facts = read_target(checkpoint.config, checkpoint.config_path)
    logger.info("%s: a target of type %s", checkpoint.config_path, facts.model_type)
    return TargetSource(facts, checkpoint)


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
