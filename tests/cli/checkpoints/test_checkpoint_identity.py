"""The digest of a checkpoint does not depend on its folder, and changes with every part that decides a result."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_cli.checkpoints.checkpoint_identity import Identity, identify, may_name_one_target, published_name
from dflash_cli.checkpoints.references import TINY_TARGET_NAME, tiny_directory
from dflash_runtime.checkpoint.stored import digests
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.documents import to_json
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config


def of(path: Path, reference: str = "x") -> Identity:
    return identify(Checkpoint(path), reference)


def flip(path: Path, offset: int) -> None:
    """Change one byte and leave the time of writing as it was."""
    file = path / "model.safetensors"
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_copy_is_the_same_and_has_no_path_in_it(tmp_path: Path) -> None:
    support.make_native(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, second = of(tmp_path / "a"), of(tmp_path / "b")
    assert first.digest == second.digest
    assert (first.name, first.commit, first.modified_ns) == ("a", None, None)
    assert str(tmp_path) not in json.dumps(to_json(first))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert of(tmp_path / "link") == first


@pytest.mark.parametrize(
    "change",
    [
        lambda path: flip(path, -1),
        lambda path: flip(path, -2000),
        lambda draft: edit_config(draft, rope_theta=5.0),
        lambda path: (path / "chat_template.jinja").write_text("{{ messages }}"),
        lambda path: (path / "generation_config.json").write_text("{}"),
    ],
    ids=["last byte", "a weight", "config", "template", "generation config"],
)
def test_any_change_changes_the_digest(change: Callable[[Path], object], tmp_path: Path) -> None:
    path = support.make_native(tmp_path / "a")
    before = of(path)
    change(path)
    assert of(path).digest != before.digest


def test_other_files_do_not_change_the_identity(tmp_path: Path) -> None:
    path = support.make_native(tmp_path / "a")
    before = of(path)
    (path / "README.md").write_text("about")
    (path / "conversion.json").write_text("{}")
    assert of(path) == before


def test_large_weights_are_sampled_by_tensor_and_dated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "WHOLE_CHECKPOINT_BYTES", 10)
    monkeypatch.setattr(digests, "SAMPLE_BYTES", 8)
    path = support.make_native(tmp_path / "a")
    before = of(path)
    assert before.modified_ns is not None
    for info in Checkpoint(path).tensors.values():
        flip(path, info.begin)
        assert of(path).digest != before.digest, info.name
        flip(path, info.begin)
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert of(path) != before


def test_a_snapshot_of_the_hub_has_its_name_and_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    path = tmp_path / "hub" / "models--my-org--my--draft" / "snapshots" / commit
    path.parent.mkdir(parents=True)
    support.make_native(path)
    found = of(path, "my-org/my--draft")
    assert (found.name, found.commit, found.modified_ns) == ("my-org/my--draft", commit, None)


CACHED = f"hub/models--Qwen--Qwen3-8B/snapshots/{'a' * 40}"


def test_names_of_one_target_are_not_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the name that a trainer on another machine wrote: the path of a snapshot that is not here."""
    monkeypatch.chdir(tmp_path)
    bundled = str(tiny_directory() / "target")
    Path(CACHED).mkdir(parents=True)
    Path("linked").symlink_to(CACHED)
    Path("models/Qwen3-8B").mkdir(parents=True)
    of_tiny = ("tiny", TINY_TARGET_NAME, bundled, f"{bundled}/")
    of_qwen = (
        "Qwen/Qwen3-8B", "qwen/qwen3-8b@main", CACHED, f"{CACHED}/", "linked", "models/Qwen3-8B", f"/root/{CACHED}",
    )  # fmt: skip
    for names in (of_tiny, of_qwen):
        assert all(may_name_one_target(first, second) for first in names for second in names)
    assert not any(may_name_one_target(first, second) for first in of_tiny for second in of_qwen)
    assert {published_name(name) for name in of_tiny} == {TINY_TARGET_NAME}
    assert [published_name(name) for name in (*of_qwen[2:5], "models/Qwen3-8B")] == ["Qwen/Qwen3-8B"] * 3 + [None]


def test_a_conversion_and_its_check_name_the_target_alike(tmp_path: Path) -> None:
    draft, target = support.make_native(tmp_path / "draft"), support.make_target(tmp_path / CACHED)
    converted = ("convert", draft, tmp_path / "out", "--to", "speculators", "--target", target)
    assert invoke(*converted).code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-8B"
    document = json.loads(invoke("validate", tmp_path / "out", "--target", target, "--json").out)
    assert "P08" not in {item["id"] for item in document["findings"]}
