"""`conversion.json` is read as it was written. A malformed one is refused with the field."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from dflash_cli.conversion.manifest import Manifest
from dflash_cli.documents.reading import read_document
from dflash_runtime.documents import to_json
from dflash_runtime.errors import MISSING, CheckpointError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("conversion")
    source, target = support.make_native(folder / "draft"), support.make_target(folder / "target")
    return support.convert(source, folder / "out", "speculators", target=target)


def read(document: dict[str, Any]) -> Manifest:
    return read_document(Manifest, json.dumps(document).encode(), Path("conversion.json"), error=CheckpointError)


def test_a_manifest_is_read_as_it_was_written(document: dict[str, Any]) -> None:
    manifest = read(document)
    assert to_json(manifest) == document
    assert (manifest.verified, manifest.logits) == ("roundtrip", None)
    assert manifest.target is not None
    assert manifest.config[0].from_ is not None


UNEXPLAINED = {"from": "a", "to": None, "change": "dropped"}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "another tool": ({"tool": "other"}, "wrong-value", "tool"),
    "another kind": ({"kind": "convert"}, "wrong-value", "kind"),
    "no weights": ({"weights": MISSING}, "missing-key", "weights"),
    "a change without a reason": ({"config": [UNEXPLAINED]}, "missing-key", "config[0].why"),
    "an unknown change": (
        {"tensors": [{"from": "a", "to": None, "change": "lost", "why": ""}]},
        "wrong-value",
        "tensors[0].change",
    ),
    "a number for a name": ({"source": {"name": 1, "repo": None, "commit": None}}, "wrong-value", "source.name"),
    "an unknown key": ({"destination": "out"}, "unknown-key", "destination"),
    "a text for a time": ({"timings": {"copy_s": "1"}}, "wrong-value", "timings.copy_s"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_manifest_is_refused_with_the_field(name: str, document: dict[str, Any]) -> None:
    changes, id, field = WRONG[name]
    changed = {key: value for key, value in (document | changes).items() if value is not MISSING}
    with refuses(CheckpointError, id, field=field, path="conversion.json"):
        read(changed)


def test_every_unknown_key_and_the_metadata_of_headers_are_named(tmp_path: Path) -> None:
    """By `inspect`, by `validate` and by conversion.json. A number that is not finite is carried."""
    config = support.native_config(time_step_limit=[0.0, float("inf")])
    config["dflash_config"] |= {"thresh_head_direct_len": False, "is_causal": True}
    draft = tmp_path / "draft"
    draft.mkdir()
    support.write_config(draft, config)
    save_file(support.body_arrays(), draft / "model.safetensors", metadata={"format": "pt", "epoch": "3"})
    unknown = {"time_step_limit", "dflash_config.thresh_head_direct_len", "dflash_config.is_causal"}
    found = json.loads(invoke("inspect", draft, "--json").out)
    assert unknown <= found["carried"].keys()
    assert found["metadata"] == {"epoch": "3"}
    findings = json.loads(invoke("validate", draft, "--json").out)["findings"]
    named = {item["location"].partition(":")[2] for item in findings if item["id"] == "C49"}
    assert named == {*unknown, "__metadata__.epoch"}
    manifest = support.convert(draft, tmp_path / "out", "native")
    changes = {item["from"]: item["change"] for item in manifest["config"]}
    assert {changes[key] for key in unknown} == {"kept"}
    assert changes["__metadata__.epoch"] == "dropped"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["time_step_limit"] == [0.0, float("inf")]
