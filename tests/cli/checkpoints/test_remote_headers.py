"""The headers of checkpoints on the hub are read at the named revision, in few bytes, without weights."""

import json
import re
import shlex
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_cli.checkpoints import remote_headers
from dflash_runtime.errors import CheckpointError
from dflash_testing import checkpoints as support
from dflash_testing import hub_server as hub
from dflash_testing.refusals import refuses

BIG = support.Shape(hidden=64, inner=256, layers=6, windows=(None,) * 6, vocab=32, draft_vocab=32)


@pytest.fixture(scope="module")
def local_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub.LocalHub]:
    """A sharded draft of several MB, its target, and checkpoints with a fault."""
    home = tmp_path_factory.mktemp("hub")
    with hub.serving() as server:
        sharded = support.write_sharded(
            home / "sharded", support.native_config(BIG), support.body_arrays(BIG), num_shards=3
        )
        server.add("acme/sharded-dflash", sharded)
        server.add("acme/dflash", support.make_native(home / "draft", BIG))
        server.add("acme/target", support.make_target(home / "target", BIG))
        server.add("acme/spec", support.make_speculators(home / "spec", BIG))
        cut = dict(server.repos["acme/dflash"])
        cut["model.safetensors"] = cut["model.safetensors"][:-5]
        server.repos["acme/cut"] = cut
        server.repos["acme/hollow"] = {"README.md": b""}
        shards = sorted(name for name in server.repos["acme/sharded-dflash"] if name.endswith(".safetensors"))
        files = server.repos["acme/sharded-dflash"]
        server.repos["acme/twice"] = {**files, shards[1]: files[shards[0]]}
        server.repos["acme/escape"] = {
            **server.repos["acme/sharded-dflash"],
            "model.safetensors.index.json": json.dumps(
                {"weight_map": {"a": "../../dflash/model.safetensors"}}
            ).encode(),
        }
        yield server


@pytest.fixture
def environment(local_hub: hub.LocalHub, tmp_path: Path) -> dict[str, str]:
    local_hub.forget()
    local_hub.closed.clear()
    local_hub.ranges = True
    return hub.environment(local_hub, tmp_path / "home")


def document(*args: str, env: dict[str, str], code: int = 0) -> dict[str, Any]:
    outcome = hub.run(*args, "--json", env=env)
    assert outcome.code == code, outcome.err
    return dict(json.loads(outcome.out))


@pytest.mark.parametrize("name", ["acme/dflash", "acme/sharded-dflash"])
def test_few_bytes(name: str, local_hub: hub.LocalHub, environment: dict[str, str], tmp_path: Path) -> None:
    outcome = hub.run("validate", name, "--target", "acme/target", "--engine", "vllm", env=environment)
    assert outcome.code == 0, outcome.err
    assert "0 errors, 0 warnings" in outcome.out
    whole = sum(len(data) for repo in (name, "acme/target") for data in local_hub.repos[repo].values())
    assert local_hub.num_bytes < whole / 2
    told = [int(text.replace(",", "")) for text in re.findall(r"read ([\d,]+)(?: of [\d,]+)? bytes in", outcome.err)]
    assert sum(told) == local_hub.num_bytes
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_headers_on_the_hub_equal_a_download(
    local_hub: hub.LocalHub, environment: dict[str, str], tmp_path: Path
) -> None:
    there = document("inspect", "acme/sharded-dflash", "--tensors", env=environment)
    local = tmp_path / "local"
    local.mkdir()
    for name, data in local_hub.repos["acme/sharded-dflash"].items():
        (local / name).write_bytes(data)
    here = document("inspect", str(local), "--tensors", env=environment)
    assert there.pop("path") == f"acme/sharded-dflash@{hub.COMMIT[:12]}"
    here.pop("path")
    assert there == here


def test_a_header_longer_than_the_first_range(environment: dict[str, str], local_hub: hub.LocalHub) -> None:
    """A second request fetches the rest of a long header."""
    arrays = {f"layers.0.padding_{index:05d}.{'x' * 60}": np.zeros(1, np.float32) for index in range(1500)}
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * index, 4 * index + 4]}
        for index, name in enumerate(arrays)
    }
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + bytes(4 * len(arrays))
    local_hub.repos["acme/long"] = {**local_hub.repos["acme/dflash"], "model.safetensors": weights}
    found = document("validate", "acme/long", env=environment, code=3)
    assert "N16" not in {item["id"] for item in found["findings"]}
    ranges = [wanted for path, wanted in local_hub.asked if path.startswith("/cdn/")]
    assert ranges == ["bytes=0-131071", f"bytes=131072-{8 + len(text) - 1}"]


def test_the_revision_is_followed(environment: dict[str, str], local_hub: hub.LocalHub) -> None:
    found = document("validate", "acme/dflash@v2", env=environment)
    assert found["draft"] == f"acme/dflash@{hub.COMMIT[:12]}"
    assert [path for path, _ in local_hub.asked if path.startswith("/api/models/")] == [
        "/api/models/acme/dflash/revision/v2"
    ]
    files = [path for path, _ in local_hub.asked if "/resolve/" in path]
    assert files
    assert all(f"/resolve/{hub.COMMIT}/" in path for path in files)


def test_a_server_without_ranges_is_not_read_whole(environment: dict[str, str], local_hub: hub.LocalHub) -> None:
    local_hub.ranges = False
    outcome = hub.run("validate", "acme/dflash", env=environment)
    assert outcome.code == 0, outcome.err
    told = int(re.findall(r"read ([\d,]+)(?: of [\d,]+)? bytes", outcome.err)[0].replace(",", ""))
    assert told < len(local_hub.repos["acme/dflash"]["model.safetensors"])


def test_a_cut_file_is_a_finding(environment: dict[str, str]) -> None:
    found = document("validate", "acme/cut", env=environment, code=3)
    assert [(item["id"], item["location"]) for item in found["findings"]] == [("N16", "model.safetensors")]


def test_no_config_is_a_finding(environment: dict[str, str]) -> None:
    found = document("validate", "acme/hollow", env=environment, code=3)
    assert [item["id"] for item in found["findings"]] == ["S19"]


def test_an_index_that_points_elsewhere_is_a_finding(environment: dict[str, str], local_hub: hub.LocalHub) -> None:
    found = document("validate", "acme/escape", env=environment, code=3)
    assert [item["id"] for item in found["findings"]] == ["N12"]
    assert not [path for path, _ in local_hub.asked if "acme/dflash" in path]


def test_a_tensor_in_another_shard_than_the_index_says_is_a_finding(environment: dict[str, str]) -> None:
    found = document("validate", "acme/twice", env=environment, code=3)
    (finding,) = [item for item in found["findings"] if item["id"] == "N12"]
    assert "model-00001-of-00003.safetensors" in finding["message"]


def test_weights_that_are_gated_though_the_repository_is_listed(
    environment: dict[str, str], local_hub: hub.LocalHub
) -> None:
    local_hub.closed.add("model.safetensors")
    found = hub.refusal("inspect", "acme/dflash", env=environment)
    assert (found["code"], found["id"], found["path"]) == (4, "hub-gated", "acme/dflash")
    assert "HF_TOKEN" in found["hint"]


def test_two_drafts_are_compared_by_their_headers(environment: dict[str, str], local_hub: hub.LocalHub) -> None:
    outcome = hub.run("inspect", "acme/dflash", "acme/spec", env=environment)
    assert outcome.code == 0, outcome.err
    assert "--values" in outcome.err
    assert local_hub.num_bytes < 600_000  # of two files of 1.4 MB each
    same = document("inspect", "acme/dflash", "acme/sharded-dflash", env=environment)
    assert (same["is_equal"], same["tensors"]["num_equal"]) == (None, 0)
    assert same["tensors"]["num_not_compared"] > 40


def test_values_of_two_drafts_are_compared_on_demand(environment: dict[str, str]) -> None:
    found = document("inspect", "acme/dflash", "acme/sharded-dflash", "--values", env=environment)
    assert found["tensors"]["num_not_compared"] == 0
    assert found["tensors"]["num_equal"] + len(found["tensors"]["rewritten"]) > 40


def test_a_cached_copy_is_read_offline(environment: dict[str, str]) -> None:
    assert hub.run("validate", "acme/dflash", "--fix-out", "nowhere", env=environment).code == 0
    outcome = hub.run("inspect", "acme/dflash", env={**environment, "HF_HUB_OFFLINE": "1"})
    assert outcome.code == 0, outcome.err


def test_serve_command_reads_headers_and_names_the_repositories(
    environment: dict[str, str], local_hub: hub.LocalHub
) -> None:
    outcome = hub.run("serve-command", "acme/dflash@v2", "--target", "acme/target", "-e", "vllm", env=environment)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("vllm serve acme/target ")
    config = json.loads(shlex.split(outcome.out)[-1])
    assert (config["model"], config["revision"]) == ("acme/dflash", "v2")
    assert not [path for path, wanted in local_hub.asked if path.endswith(".safetensors") and wanted is None]


def test_serve_command_takes_the_target_that_the_draft_names(environment: dict[str, str]) -> None:
    outcome = hub.run("serve-command", "acme/spec", "-e", "vllm", env=environment)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("vllm serve acme/target ")


@pytest.mark.parametrize("level", ["headers", "weights"])
def test_the_target_that_a_draft_names_is_read_by_its_headers(
    level: str, environment: dict[str, str], local_hub: hub.LocalHub, tmp_path: Path
) -> None:
    """Its weights are not downloaded, even if the draft's weights are read, so its head is not compared."""
    head = support.target_arrays(BIG)["lm_head.weight"]
    draft = support.make_speculators(tmp_path / "dflash", BIG, extra={"lm_head.weight": head + 1})
    local_hub.asked.clear()
    outcome = hub.run("validate", draft, "--level", level, "-e", "vllm", env=environment)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "acme/target" in outcome.out
    assert "0 errors" in outcome.out
    assert "acme/target" in outcome.err
    ranges = [wanted for path, wanted in local_hub.asked if path.endswith(".safetensors") and "/cdn/" in path]
    assert ranges == ["bytes=0-131071"]


class TestAnswersOfAHostileHub:
    @pytest.mark.parametrize("total", ["9" * 5000, "²", "-1", "*", ""])
    def test_a_size_that_is_none_is_not_read(self, total: str) -> None:
        answer = SimpleNamespace(headers={"Content-Range": f"bytes 0-1/{total}", "Content-Length": total})
        assert remote_headers._whole_size(answer, 7) == 7
        assert remote_headers._whole_size(SimpleNamespace(headers={"Content-Range": "bytes 0-1/12"}), 7) == 12

    @pytest.mark.parametrize("commit", [None, 7, "", "../x", "a\nb", "a" * 65])
    def test_a_listing_without_a_commit_is_refused(self, commit: object) -> None:
        data = json.dumps({"sha": commit, "siblings": []}).encode()
        with refuses(CheckpointError, "hub-without-commit", field="sha"):
            remote_headers.parse_listing(data, "org/x", "https://hub/x", remote_headers.Traffic())
