"""Names of a target and a draft that contradict each other."""

import pytest

from dflash_cli.probing.findings.draft_fit import unlike_names


@pytest.mark.parametrize(
    ("target", "draft", "unlike"),
    [
        ("org/Chat-8B-Thinking-2509", "org/Chat-8B-Instruct-DFlash-b8", ["thinking and instruct"]),
        ("org/Chat-30B-A3B", "org/Chat-8B-DFlash", ["30b and 8b"]),
        ("org/Chat-8B", "/models/dflash-chat-8b-0.5B", []),
        ("org/Chat-8B-Instruct", "org/Chat-8B-DFlash-b16", []),
        ("/models/target", "/models/draft", []),
        (None, "org/Chat-8B-DFlash", []),
    ],
)
def test_names_contradict_each_other_by_size_or_kind(target: str | None, draft: str, unlike: list[str]) -> None:
    assert unlike_names(target, draft) == unlike
