"""The files that say how a server is started: arguments, commands, and what is no such file."""

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
    assert dict(launch.arguments) == {"model": "m", "tensor_parallel_size": 2, "speculative_config": SPECULATIVE}
    assert len(launch.ignored) == 1
    server = read_vllm("prefill", launch, (0, 33))
    assert server.draft is not None
    assert (server.draft.name, server.draft.num_draft_tokens, server.tensor_parallel) == ("org/dflash", 7, 2)


def test_sglang_counts_the_anchor_and_has_two_words_for_much(tmp_path: Path) -> None:
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
    assert launch.get("disaggregation_decode_enable_radix_cache") is True


def test_a_switch_is_turned_off_by_no(tmp_path: Path) -> None:
    command = "vllm serve m --no-disable-hybrid-kv-cache-manager --port 1"
    assert read(tmp_path, command).get("disable_hybrid_kv_cache_manager") is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"block_size": "many"}', 'server.json: block_size: found "many", expected a positive whole number'),
        ('{"block_size": 0}', "server.json: block_size: found 0, expected a positive whole number"),
        ('{"tensor-parallel-size": true}', "tensor_parallel_size: found true, expected a positive whole number"),
        ('{"model": 3}', "server.json: model: found 3, expected a text"),
        ('{"speculative_config": [1]}', "server.json: speculative_config: found [1], expected an object"),
        ("vllm serve m --speculative-config '{'", 'speculative_config: found "{", expected an object'),
        ('{"command": 3}', "server.json: command: found 3, expected a text"),
        ("vllm serve 'm", "server.json: the command cannot be read: No closing quotation"),
        ("nothing here", "server.json: found no options, expected a JSON object of arguments or a serve command"),
        ("", "server.json: found no options"),
        ("{", "server.json: not valid JSON"),
        ("[]", "server.json: found a JSON list, expected an object"),
        ('{"version": 33}', "server.json: version: found 33, expected a text"),
    ],
)
def test_what_is_no_such_file_is_said_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read(tmp_path, text)
    assert message in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_config": {"model": 3}}, "speculative_config.model: found 3, expected a text"),
        (
            {"speculative_config": {"num_speculative_tokens": "7"}},
            "num_speculative_tokens: found '7', expected a",
        ),
        ({"kv_transfer_config": {"kv_role": "producer"}}, "kv_role: found 'producer', expected one of kv_producer"),
        (
            {"kv_transfer_config": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": 1}}},
            "kv_transfer_config.kv_connector_extra_config.connectors: found 1, expected a list of objects",
        ),
    ],
)
def test_what_is_within_an_object_is_checked_too(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read_vllm("prefill", read(tmp_path, json.dumps(arguments)), (0, 33))
    assert message in raised.value.message


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=support.json_junk())
def test_junk_is_refused_and_never_crashes(value: Any, tmp_path: Path) -> None:
    document = {"speculative_config": value, "kv_transfer_config": value, "model": value}
    for text in (json.dumps(document), json.dumps(value), json.dumps({"kv_transfer_config": {"kv_connector": value}})):
        with suppress(UsageError):
            read_vllm("decode", read(tmp_path, text), (0, 33))
