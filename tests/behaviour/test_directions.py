"""Every direction of conversion: dialect -> canonical -> dialect and dialect -> native -> dialect, on random drafts.

`support` writes the sources, without the code under test. The facts on a dialect's class and `LAYERS` say which drafts
the dialect can state, so a needless refusal fails a test just as a loss does.
"""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.verify import differing_fields
from dflash_cli.formats.dialect import Format, writable_formats
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.checkpoint.stored.safetensors_header import read_header
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import LossyConversion, UnsupportedError
from dflash_testing import checkpoints as support
from dflash_testing import dialects
from dflash_testing.command_line import invoke
from dflash_testing.dialects import named_dialect
from dflash_testing.paths import ROOT

SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "logit_scale": 1.0}
WRITABLE = [item.name for item in writable_formats("dflash")]
IN_FOLDERS = [item.name for item in writable_formats("dflash") if not item.one_file]
"""Dialects with a config.json. `test_gguf_drafts.py` has the round trips of the others."""

ROPES: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": support.REMOVED, "rope_parameters": {"rope_theta": 1234567.5, "rope_type": "default"}},
]


def is_ascending(config: DraftConfig) -> bool:
    return list(config.target_layer_ids) == sorted(set(config.target_layer_ids))


def states_causality(config: DraftConfig) -> bool:
    default = tuple(window is not None for window in config.windows)
    return len(set(config.causal)) == 1 or config.causal == default


def scales(config: DraftConfig) -> set[str]:
    return {name for name, off in SCALES.items() if getattr(config, name) != off}


def full_layers_see_ahead(config: DraftConfig) -> bool:
    """Whether no full layer is causal, and all sliding layers have the same causality."""
    sliding = {causal for causal, window in zip(config.causal, config.windows, strict=True) if window is not None}
    full = {causal for causal, window in zip(config.causal, config.windows, strict=True) if window is None}
    return True not in full and len(sliding) < 2


LAYERS: dict[str, Callable[[DraftConfig], bool]] = {
    "speculators": full_layers_see_ahead,
    "mlx": lambda config: states_causality(config) and not config.attention_bias,
    "gguf": lambda config: config.is_causal is not None and not config.attention_bias,
}
"""Dialect -> whether it can state a draft's layers, for dialects that differ from the native one in this."""


def can_state(dialect: Format, config: DraftConfig) -> bool:
    """Whether a dialect can state everything of a draft, by the facts on its class and `LAYERS`."""
    is_full = config.draft_vocab_size == config.vocab_size
    is_as_wide = config.target_hidden_size in (None, config.hidden_size)
    return (
        LAYERS.get(dialect.name, states_causality)(config)
        and not scales(config) & dialect.unstated
        and not (config.has_sinks and "has_sinks" in dialect.unstated)
        and (is_full or dialect.keeps_head)
        and (is_as_wide or "target_hidden_size" not in dialect.unstated)
        and (is_ascending(config) or not dialect.sorts_taps)
    )


@st.composite
def sources(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a native config with every setting that some dialect can state, and keys that no dialect knows."""
    windows = draw(st.sampled_from([(None, None), (16, 16), (16, None)]))
    shape = support.Shape(
        hidden=draw(st.sampled_from([8, 16])),
        heads=draw(st.sampled_from([2, 4])),
        kv_heads=draw(st.sampled_from([1, 2])),
        taps=tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(_often_sorted))),
        target_layers=draw(st.integers(6, 9)),
        block=draw(st.integers(2, 16)),
        mask=draw(st.integers(0, 31)),
        bias=draw(st.booleans()),
        windows=windows,
    )
    changes: dict[str, Any] = dict(draw(st.sampled_from(ROPES)))
    changes["is_causal"] = draw(st.sampled_from([False, True, support.REMOVED]))
    scaled = {
        "input_embedding_scale": 2.5,
        "output_multiplier": 0.2,
        "final_logit_softcapping": 20.0,
        "logit_scale": 3.0,
    }
    for name, value in scaled.items():
        if draw(st.integers(0, 5)) == 0:
            changes[name] = value
    if draw(st.integers(0, 3)) == 0:
        changes["target_hidden_size"] = draw(st.sampled_from([12, shape.hidden]))
    if draw(st.integers(0, 3)) == 0:
        changes["draft_vocab_size"] = 12
    if draw(st.booleans()):
        changes["use_cache"] = True
    config = support.native_config(shape, **changes)
    if draw(st.integers(0, 3)) == 0:
        config["dflash_config"]["attention_sink_bias"] = True
    if draw(st.booleans()):
        config["dflash_config"]["future_setting"] = [1]
    return config


def _often_sorted(taps: list[int]) -> list[int]:
    return taps if sum(taps) % 4 == 0 else sorted(taps)


def arrays_for(config: DraftConfig) -> support.Arrays:
    """Return random arrays of the shapes that the config needs, and a valid id map."""
    shapes = owned_shapes(config)
    arrays = support.random_arrays({name: shape for name, shape in shapes.items() if name != "d2t"})
    if "d2t" in shapes:
        ids = np.linspace(0, config.vocab_size - 1, config.draft_vocab_size).astype(np.int64)
        arrays["d2t"] = ids - np.arange(config.draft_vocab_size)
        arrays["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    return arrays


@pytest.mark.parametrize("name", WRITABLE)
@settings(max_examples=60, deadline=None)
@given(source=sources())
def test_dialect_to_canonical_to_dialect(name: str, source: dict[str, Any]) -> None:
    dialect = named_dialect(name)
    config = named_dialect("native").read_config(source, Path("config.json")).config
    if "verifier" not in dialect.unstated:
        config = dialects.with_verifier(config)
    if not is_ascending(config):  # sorting taps changes tensors, which the next test covers
        return
    if not can_state(dialect, config):
        with pytest.raises(LossyConversion):
            dialect.write_config(config, {})
        return
    written = json.loads(json.dumps(dialect.write_config(config, {})))
    parsed = dialect.read_config(written, Path("config.json"))
    assert differing_fields(config, parsed.config, ignored=lost_by(name)) == []
    assert json.loads(json.dumps(dialect.write_config(parsed.config, parsed.carried))) == written


def lost_by(name: str) -> frozenset[str]:
    """A width that equals the draft's own is what leaving it out means."""
    return named_dialect(name).unstated & {"target_hidden_size"}


@pytest.mark.parametrize("name", IN_FOLDERS)
@settings(max_examples=25, deadline=None)
@given(source=sources())
def test_dialect_to_native_to_dialect(name: str, source: dict[str, Any]) -> None:
    """Convert whole checkpoints on disk, through another dialect if the native one cannot state the draft."""
    with tempfile.TemporaryDirectory() as directory:
        go_there_and_back(name, source, Path(directory))


def go_there_and_back(name: str, source: dict[str, Any], work: Path) -> None:
    config = named_dialect("native").read_config(source, Path("config.json")).config
    metadata = {"trained_with": "steps=10"}
    support.write_checkpoint(work / "source", source, arrays_for(config), metadata=metadata)
    if not can_state(named_dialect(name), config):
        with pytest.raises((LossyConversion, UnsupportedError)):
            support.convert(work / "source", work / "there", name, verifier="acme/target")
        assert not (work / "there").exists()
        return
    middle = next(middle for middle in ("native", "vllm", "speculators") if can_state(named_dialect(middle), config))
    support.convert(work / "source", work / "there", name, verifier="acme/target")
    support.convert(work / "there", work / "back", middle, verifier="acme/target")
    support.convert(work / "back", work / "again", name, verifier="acme/target")
    there = open_draft(work / "there")
    ignored = frozenset({"verifier"}) | lost_by(name)
    assert differing_fields(config, there.config, ignored=ignored) == []
    assert differing_fields(config, open_draft(work / "back").config, ignored=ignored | {"target_hidden_size"}) == []
    first, second = (json.loads((work / name / "config.json").read_text()) for name in ("there", "again"))
    if config.target_hidden_size == config.hidden_size:  # the native dialect leaves this width out
        first["target_hidden_size"] = second["target_hidden_size"] = None
    assert first == second
    carried, kept = (open_draft(work / name).parsed.carried for name in ("source", "back"))
    assert {**kept, **carried} == kept
    for directory in ("there", "back", "again"):
        support.assert_same_tensors(work / "source", work / directory)
        found: dict[str, str] = {}
        read_header(work / directory / "model.safetensors", found)
        assert found == {**metadata, "format": "pt"}


@pytest.mark.parametrize("name", [name for name in WRITABLE if name != "speculators"])
def test_a_key_without_a_home_is_left_out_only_on_demand(name: str, tmp_path: Path) -> None:
    """A key that only this dialect's top level has may be a part of the draft. Null states nothing."""
    source = support.make_speculators(tmp_path / "source", num_target_layers=4, future_setting=2, max_anchors=9, x=None)
    args = ("convert", source, tmp_path / "out", "--to", name)
    refused = invoke(*args)
    assert (refused.code, refused.error_id, refused.field) == (5, "keys-lost", "future_setting")
    assert refused.error is not None
    assert refused.error.found == ("future_setting",)
    assert not (tmp_path / "out").exists()
    assert "keys-lost" in invoke(*args, "--allow-lossy").notices


@pytest.mark.parametrize("scale", [None, 1.0, 4.0])
def test_an_embedding_scale_keeps_its_meaning(scale: float | None, tmp_path: Path) -> None:
    """A native draft that states none is fed with the target's scale, a speculators draft with rows as they are."""
    target = support.make_target(tmp_path / "target", model_type="gemma3_text")
    stated: dict[str, Any] = {} if scale is None else {"input_embedding_scale": scale}
    source = support.make_native(tmp_path / "source", **stated)
    args = ("convert", source, tmp_path / "out", "--to", "speculators", "--target", target, "--target-name", "a/b")
    outcome = invoke(*args)
    if scale != 1.0:
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "scale-ignored", "input_embedding_scale")
        return
    assert outcome.code == 0, outcome.err
    support.convert(tmp_path / "out", tmp_path / "back", "native", target=target)
    assert open_draft(tmp_path / "back").config.has_target_scale is False
    assert open_draft(source).config.has_target_scale is False


MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "z-lab, April 2026": dialects.zlab,
    "z-lab 0.1.0": dialects.zlab_010,
    "SpecForge": dialects.specforge,
    "Model-Optimizer": dialects.model_optimizer,
    "NeMo Automodel": dialects.automodel,
    "flat (MLX)": dialects.mlx,
    "speculators": lambda: support.speculators_config(num_target_layers=4),
    "speculators, reduced head": lambda: support.speculators_config(support.REDUCED, num_target_layers=4),
    "JetSpec": lambda: support.native_config(is_causal=True),
}
"""The rows of the table in docs/explanation/formats.md."""

REFUSED = {
    ("speculators, reduced head", "native"): "lm_head.weight",
    ("speculators, reduced head", "sglang"): "lm_head.weight",
    ("speculators, reduced head", "mlx"): "lm_head.weight",
    ("speculators, reduced head", "gguf"): "lm_head.weight",
    ("z-lab 0.1.0", "gguf"): "causality",
    ("JetSpec", "speculators"): "speculators",
}
"""Directions that would lose something, and a name in the refusal. All others keep every field and byte."""


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("origin", MAKERS)
def test_direction(origin: str, name: str, tmp_path: Path) -> None:
    config = MAKERS[origin]()
    shape = support.REDUCED if "reduced" in origin else support.SMALL
    extra = support.reduced_arrays(shape, support.target_arrays(shape)) if "reduced" in origin else {}
    source = support.write_checkpoint(tmp_path / "source", config, {**support.body_arrays(shape), **extra})
    outcome = invoke("convert", source, tmp_path / "out", "--to", name, "--target-name", "acme/target")
    named = REFUSED.get((origin, name))
    if named is not None:
        assert outcome.code == 5
        assert named in outcome.err
        with pytest.raises(LossyConversion):
            support.convert(source, tmp_path / "out", name, verifier="acme/target")
        return
    assert outcome.code == 0, outcome.err
    before, after = open_draft(source).config, open_draft(tmp_path / "out").config
    assert differing_fields(before, after, ignored=frozenset({"verifier", "dtype"})) == []
    assert after.dtype == "float32"  # the dtype of the tensors, not of the source's config
    if named_dialect(name).one_file:
        support.convert(tmp_path / "out", tmp_path / "back", "native")
    support.assert_same_tensors(source, tmp_path / ("back" if named_dialect(name).one_file else "out"))


def test_the_table_in_the_documents_has_the_same_refusals() -> None:
    """docs/explanation/formats.md has a row for each source and a column for each result, and marks refusals."""
    text = (ROOT / "docs" / "explanation" / "formats.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    header = next(row for row in rows if row[0] == "from \\ to")
    columns = [re.sub(r"[^a-z]", "", cell) for cell in header[1:]]
    assert sorted(columns) == sorted(WRITABLE)
    table = {row[0]: row[1:] for row in rows if row[0] in MAKERS}
    assert table.keys() == MAKERS.keys()
    for origin, cells in table.items():
        for name, cell in zip(columns, cells, strict=True):
            assert cell.startswith("refused") == ((origin, name) in REFUSED), (origin, name)
