"""`conversion.json` is read as it was written. A malformed one is refused with the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.conversion.manifest import Manifest
from dflash_cli.documents.reading import read_document
from dflash_runtime.documents import to_json
from dflash_runtime.errors import MISSING, CheckpointError
from dflash_testing import checkpoints as support
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
