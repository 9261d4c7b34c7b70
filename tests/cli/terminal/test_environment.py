"""A result states the command without its secrets."""

import pytest

from dflash_cli.terminal.environment import REDACTED, describe_environment, redacted
from dflash_testing.command_line import run_main


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--hf-token", "abc", "-n", "8"], ["--hf-token", REDACTED, "-n", "8"]),
        (["--api-key=abc"], [f"--api-key={REDACTED}"]),
        (["x", "hf_" + "a" * 30], ["x", REDACTED]),
        (["https://me:pass@host/v1"], [f"https://{REDACTED}@host/v1"]),
        (["--stop-token-id", "7", "--max-new-tokens=8"], ["--stop-token-id", "7", "--max-new-tokens=8"]),
        (["org/draft@main", "https://host/a@b"], ["org/draft@main", "https://host/a@b"]),
    ],
)
def test_secrets_are_left_out_and_nothing_else(argv: list[str], expected: list[str]) -> None:
    assert redacted(argv) == expected


def test_every_variable_that_turns_the_hub_off_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", "")
    shown = describe_environment("0").variables
    assert {name: shown[name] for name in values} == {**values, "HF_TOKEN": "set"}


def test_a_variable_that_this_program_sets_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets it if the user has not."""
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    assert "TRANSFORMERS_VERBOSITY" not in run_main("env").out
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    assert "TRANSFORMERS_VERBOSITY info" in run_main("env").out
