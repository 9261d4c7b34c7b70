"""Targets have equal fingerprints if they have equal weights, however files store them."""

from pathlib import Path

import numpy as np

from dflash_cli.checkpoints.checkpoint_identity import TargetFingerprint, target_fingerprint
from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import InvalidConfig
from dflash_testing import checkpoints as support
from dflash_testing.refusals import refuses


def fingerprint(path: Path) -> TargetFingerprint:
    return target_fingerprint(open_target(path))


def test_shards_and_names_of_files_do_not_matter(tmp_path: Path) -> None:
    whole = fingerprint(support.make_target(tmp_path / "one"))
    shards = support.write_sharded(tmp_path / "two", support.target_config(), support.target_arrays(), num_shards=3)
    assert fingerprint(shards) == whole
    assert whole.difference(fingerprint(shards)) is None


def test_other_weights_of_the_same_shapes_differ(tmp_path: Path) -> None:
    whole = fingerprint(support.make_target(tmp_path / "one"))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        arrays = support.target_arrays()
        arrays[name] = arrays[name] + np.float32(1)
        other = fingerprint(support.write_checkpoint(tmp_path / name, support.target_config(), arrays))
        assert other.headers == whole.headers
        assert other.rows != whole.rows
        assert whole.difference(other) is not None


def test_other_tensors_differ(tmp_path: Path) -> None:
    whole = fingerprint(support.make_target(tmp_path / "one"))
    other = fingerprint(support.make_target(tmp_path / "two", support.Shape(target_layers=5)))
    assert whole.headers != other.headers
    assert whole.difference(other) is not None


def test_only_headers_are_compared_if_one_side_has_no_rows(tmp_path: Path) -> None:
    whole = fingerprint(support.make_target(tmp_path / "one"))
    assert whole.difference(TargetFingerprint(whole.headers)) is None
    assert whole.difference(TargetFingerprint("0")) is not None


def test_there_and_back_as_json(tmp_path: Path) -> None:
    whole = fingerprint(support.make_target(tmp_path / "one"))
    assert from_json(TargetFingerprint, to_json(whole)) == whole
    with refuses(InvalidConfig, "wrong-value", field="headers", found=1):
        from_json(TargetFingerprint, {"headers": 1, "rows": None})
