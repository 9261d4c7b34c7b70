"""Files with a server's arguments or serve command, and malformed files."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from dflash_cli.handoff.two_servers.launch import Launch, read_launch
from dflash_cli.handoff.two_servers.server_readers import SGLANG_LAUNCH, VLLM_LAUNCH, read_sglang, read_vllm
from dflash_runtime.errors import UsageError
from dflash_testing import checkpoints as support
from dflash_testing.refusals import refuses

SPECULATIVE = {"method": "dflash", "model": "org/dflash", "num_speculative_tokens": 7}
SPECULATIVE_TEXT = json.dumps(SPECULATIVE)


def read(tmp_path: Path, text: str, keys: Any = VLLM_LAUNCH) -> Launch:
    file = tmp_path / "server.json"
    file.write_text(text)
    return read_launch(file, keys)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"model": "m", "tensor_parallel_size": 2, "speculative_config": SPECULATIVE, "port": 1}),
        json.dumps({"model": "m", "--tensor-parallel-size": "2", "speculative-config": SPECULATIVE_TEXT, "x": 0}),
        json.dumps({"command": f"vllm serve m -tp 2 --speculative-config '{SPECULATIVE_TEXT}' --port 1"}),
        f"A=1 vllm serve m --port=1 \\\n  --tensor-parallel-size=2 -sc '{SPECULATIVE_TEXT}'\n",
        f"docker run --gpus all -e A=1 image:tag vllm serve m -tp 2 --speculative-config '{SPECULATIVE_TEXT}' --port 1",
        "python3 -m vllm.entrypoints.openai.api_server --model m --tensor-parallel-size 2 --enforce-eager "
        "--speculative-config.method dflash --speculative-config.model=org/dflash "
        "--speculative-config.num_speculative_tokens 7",
    ],
)
def test_one_server_in_every_spelling(text: str, tmp_path: Path) -> None:
    launch = read(tmp_path, text)
    assert dict(launch.arguments) == {"target": "m", "tensor_parallel": 2, "speculation": SPECULATIVE}
    assert len(launch.ignored) == 1
    server = read_vllm("prefill", launch, (0, 33))
    assert server.draft is not None
    assert (server.draft.name, server.draft.num_draft_tokens, server.tensor_parallel) == ("org/dflash", 7, 2)


def test_sglang_counts_the_anchor_and_has_aliases(tmp_path: Path) -> None:
    command = (
        "python -m sglang.launch_server --model m --tp 4 --speculative-algorithm DFLASH --speculative-draft-model d "
        "--speculative-dflash-block-size 8 --disaggregation-mode decode --disaggregation-transfer-backend nixl "
        "--disaggregation-decode-enable-radix-cache"
    )
    launch = read(tmp_path, json.dumps({"command": command, "version": "0.5.23.post1"}), SGLANG_LAUNCH)
    server = read_sglang("decode", launch, (0, 5, 23))
    assert server.draft is not None
    assert (server.target, server.draft.name, server.draft.method, server.draft.num_draft_tokens) == (
        "m", "d", "dflash", 7,
    )  # fmt: skip
    assert (server.tensor_parallel, server.connectors[0].name, server.release) == (4, "nixl", (0, 5, 23))
    assert launch.get("radix_cache") is True


def test_a_switch_is_turned_off_by_no(tmp_path: Path) -> None:
    command = "vllm serve m --no-disable-hybrid-kv-cache-manager --port 1"
    assert read(tmp_path, command).get("no_groups") is False


@pytest.mark.parametrize(
    ("text", "field", "found"),
    [
        ('{"block_size": "many"}', "block_size", "many"),
        ('{"block_size": 0}', "block_size", 0),
        ('{"tensor-parallel-size": true}', "tensor_parallel_size", True),
        ('{"model": 3}', "model", 3),
        ('{"speculative_config": [1]}', "speculative_config", [1]),
        ("vllm serve m --speculative-config '{'", "speculative_config", "{"),
        ('{"command": 3}', "command", 3),
        ('{"version": 33}', "version", 33),
    ],
)
def test_an_argument_of_another_type_is_named_with_its_file(text: str, field: str, found: Any, tmp_path: Path) -> None:
    with refuses(UsageError, path=tmp_path / "server.json", field=field, found=found) as caught:
        read(tmp_path, text)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("vllm serve 'm", "unreadable-command"),
        ("nothing here", "no-options"),
        ("", "no-options"),
        ("{", "not-json"),
        ("[]", "json-not-an-object"),
    ],
)
def test_a_file_without_arguments_or_a_command_is_refused_in_one_line(text: str, id: str, tmp_path: Path) -> None:
    with refuses(UsageError, id) as caught:
        read(tmp_path, text)
    assert "server.json" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "field", "found"),
    [
        ({"speculative_config": {"model": 3}}, "speculative_config.model", 3),
        ({"speculative_config": {"num_speculative_tokens": "7"}}, "speculative_config.num_speculative_tokens", "7"),
        ({"kv_transfer_config": {"kv_role": "producer"}}, "kv_transfer_config.kv_role", "producer"),
        (
            {"kv_transfer_config": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": 1}}},
            "kv_transfer_config.kv_connector_extra_config.connectors",
            1,
        ),
    ],
)
def test_fields_inside_an_object_are_checked_too(
    arguments: dict[str, Any], field: str, found: Any, tmp_path: Path
) -> None:
    launch = read(tmp_path, json.dumps(arguments))
    with refuses(UsageError, path=tmp_path / "server.json", field=field, found=found):
        read_vllm("prefill", launch, (0, 33))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=support.json_junk())
def test_junk_is_refused_and_never_crashes(value: Any, tmp_path: Path) -> None:
    document = {"speculative_config": value, "kv_transfer_config": value, "model": value}
    for text in (json.dumps(document), json.dumps(value), json.dumps({"kv_transfer_config": {"kv_connector": value}})):
        with suppress(UsageError):
            read_vllm("decode", read(tmp_path, text), (0, 33))
