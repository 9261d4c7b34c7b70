"""`conversion.json` names the source and the target without paths of this machine."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash_cli.checkpoints.checkpoint_identity import TargetFingerprint, target_fingerprint
from dflash_cli.checkpoints.opening import open_target
from dflash_cli.conversion.manifest import Origin, without_paths
from dflash_runtime.documents import from_json
from dflash_testing import checkpoints as support
from dflash_testing.command_line import run_main

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_local_source_and_its_target(tmp_path: Path) -> None:
    source, target = support.make_native(tmp_path / "draft"), support.make_target(tmp_path / "target")
    out = tmp_path / "out"
    outcome = run_main("convert", source, out, "--to", "speculators", f"--target={target}", "--verify", "logits")
    assert outcome.code == 0, outcome.err
    text = (out / "conversion.json").read_text()
    found = json.loads(text)
    assert str(tmp_path) not in text
    assert str(tmp_path) not in (out / "config.json").read_text()
    assert found["source"] == {"name": "draft", "repo": None, "commit": None}
    assert from_json(TargetFingerprint, found["target"]["fingerprint"]) == target_fingerprint(open_target(target))
    assert found["argv"][:3] == ["dflash", "convert", "draft"]
    assert "--target=target" in found["argv"]
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found["date"])).total_seconds()) < 600
    assert (found["logits"]["max_difference"], found["logits"]["same_best_share"]) == (0, 1)
    assert "100.00%" in outcome.err


@pytest.mark.parametrize("name", ["acme/draft", "draft"])
def test_a_source_in_the_hubs_cache(name: str, tmp_path: Path) -> None:
    home = tmp_path / f"models--{name.replace('/', '--')}"
    snapshot = support.make_native(home / "snapshots" / COMMIT)
    (snapshot / "README.md").write_text("# A draft\n")
    assert Origin.of(snapshot) == Origin(name, name, COMMIT)
    manifest = support.convert(snapshot, tmp_path / "out", "native")
    assert manifest["source"] == {"name": name, "repo": name, "commit": COMMIT}
    assert manifest["target"] is None
    assert manifest["argv"] == []
    assert f"from `{name}` at {COMMIT}" in (tmp_path / "out" / "README.md").read_text()


def test_arguments_without_paths() -> None:
    given = ["convert", "/home/me/a", "~/b/c", "org/repo@v1", "../d", "--target=/e/f", "--to=native", "-t", "/"]
    cut = ["convert", "a", "c", "org/repo@v1", "../d", "--target=f", "--to=native", "-t", ""]
    assert without_paths(given) == cut
