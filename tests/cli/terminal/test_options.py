"""Options that several commands share."""

import pytest

from dflash_cli.terminal.parameters import parse_size
from dflash_runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("700", 700),
        ("2mb", 2 * 2**20),
        ("512M", 512 * 2**20),
        ("5GB", 5 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("1T", 2**40),
    ],
)
def test_every_unit_is_a_power_of_1024(text: str, expected: int) -> None:
    assert parse_size(text, "--max-shard-size") == expected


@pytest.mark.parametrize("text", ["", "0", "-5GB", "5 apples", "GB", "nan", "1e30G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"--kv-memory .*expected a size such as 512M or 20G, in units of 1,024"):
        parse_size(text, "--kv-memory")
