"""The strict reader of JSON: each fault in a text has its own error."""

import subprocess
from pathlib import Path

import pytest

from dflash_runtime.checkpoint.stored.strict_json import parse_json, read_json
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import finite, is_number
from dflash_testing.refusals import refuses

PATH = Path("some.json")


class TestJson:
    def test_a_config_may_hold_numbers_that_are_not_finite(self) -> None:
        """Published configs of Nemotron-H do, in a key that dflash does not read. A number that is read is finite."""
        found = parse_json(
            b'{"time_step_limit": [0.0, Infinity], "block_size": NaN, "big": 1e999}', PATH, is_config=True
        )
        assert found["time_step_limit"] == [0.0, float("inf")]
        assert not is_number(found["block_size"])
        assert finite(found)["time_step_limit"] == [0.0, "Infinity"]

    @pytest.mark.parametrize(
        ("text", "id", "found"),
        [
            (b"", "not-json", None),
            (b"[1]", "json-not-an-object", "list"),
            (b'{"a": Infinity}', "json-constant", "Infinity"),
            (b'{"a": 1e999}', "json-number-too-large", "1e999"),
            (b'{"a": ' + b"9" * 30 + b"}", "json-number-too-large", "9" * 30),
            (b'{"a": -' + b"9" * 5000 + b"}", "json-number-too-large", "-" + "9" * 19),
            (b"\xef\xbb\xbf{}", "json-byte-order-mark", None),
            (b'{"a": {"b": 1, "b": 2}}', "json-duplicate-key", "b"),
            (b'{"\xff": 1}', "json-not-utf8", 2),
            (b'{"a": "\\ud800"}', "json-half-surrogate", None),
            (b'{"a":' * 65 + b"1" + b"}" * 65, "json-too-deep", None),
            (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "json-too-deep", None),
        ],
    )
    def test_strictness(self, text: bytes, id: str, found: object) -> None:
        with refuses(CheckpointError, id, path=PATH, found=found):
            parse_json(text, PATH)

    def test_deep_nesting_stops_no_parser(self) -> None:
        """Python releases differ in whether the depth or the missing end is noticed first."""
        with refuses(CheckpointError, path=PATH) as caught:
            parse_json(b'{"a":' * 100_000, PATH)
        assert caught.value.id in ("json-too-deep", "not-json")

    def test_a_byte_order_mark_has_a_hint_that_works(self, tmp_path: Path) -> None:
        path = tmp_path / "it's a config.json"
        path.write_bytes(b"\xef\xbb\xbf{}")
        with refuses(CheckpointError, "json-byte-order-mark") as caught:
            read_json(path)
        assert caught.value.hint is not None
        subprocess.run(caught.value.hint.partition(": ")[2], shell=True, check=True)
        assert path.read_bytes() == b"{}"

    def test_numbers_stay_numbers(self) -> None:
        assert parse_json(b'{"a":' * 64 + b"1" + b"}" * 64, PATH)
        assert parse_json(b'{"a": 1e-6, "b": -3}', PATH) == {"a": 1e-6, "b": -3}
