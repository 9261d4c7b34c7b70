"""`t2d` is computed from `d2t`, because speculators cannot load a reduced draft without `t2d`."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke

SHAPE = support.REDUCED
EXPECTED = support.reduced_arrays(SHAPE, support.target_arrays(SHAPE))["t2d"]


def make(path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {**support.body_arrays(SHAPE), **support.reduced_arrays(SHAPE, support.target_arrays(SHAPE))}
    for name, array in changes.items():
        arrays.pop(name) if array is None else arrays.update({name: array})
    return support.write_checkpoint(path, support.speculators_config(SHAPE, num_target_layers=4), arrays)


def offsets(dtype: type = np.int64) -> np.ndarray:
    return (support.kept_ids(SHAPE) - np.arange(SHAPE.draft_vocab)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_a_missing_map_is_computed(dtype: type, tmp_path: Path) -> None:
    manifest = support.convert(make(tmp_path / "source", t2d=None, d2t=offsets(dtype)), tmp_path / "out", "speculators")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["t2d"].dtype == np.bool_
    assert found["t2d"].tolist() == EXPECTED.tolist()
    entry = next(item for item in manifest["tensors"] if item["to"] == "t2d")
    assert (entry["from"], entry["change"]) == (None, "derived")
    assert invoke("validate", tmp_path / "out").code == 0


def test_a_map_that_agrees_is_copied(tmp_path: Path) -> None:
    manifest = support.convert(make(tmp_path / "source"), tmp_path / "out", "speculators")
    assert next(item for item in manifest["tensors"] if item["to"] == "t2d")["change"] == "kept"


def test_a_map_that_contradicts_is_replaced_with_a_warning(tmp_path: Path) -> None:
    outcome = invoke("convert", make(tmp_path / "source", t2d=~EXPECTED), tmp_path / "out", "--to", "speculators")
    assert load_file(tmp_path / "out" / "model.safetensors")["t2d"].tolist() == EXPECTED.tolist()
    assert outcome.notices == ("inverse-map-contradicts",)


@pytest.mark.parametrize(("row", "offset", "id"), [(1, -1, "id-map-repeats"), (3, 1000, "id-map-outside")])
def test_a_wrong_map_is_refused(row: int, offset: int, id: str, tmp_path: Path) -> None:
    spoiled = offsets()
    spoiled[row] = offset
    source = make(tmp_path / "source", t2d=None, d2t=spoiled)
    outcome = invoke("convert", source, tmp_path / "out", "--to", "speculators")
    assert (outcome.code, outcome.error_id, outcome.field) == (3, id, "d2t")


def test_engines_that_do_not_need_it_get_no_map(tmp_path: Path) -> None:
    support.convert(make(tmp_path / "source", t2d=None), tmp_path / "out", "vllm")
    assert "t2d" not in load_file(tmp_path / "out" / "model.safetensors")
