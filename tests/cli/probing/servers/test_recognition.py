"""The engine of a server behind another owner, by other signs."""

from typing import Any

import pytest

from dflash_testing.scripted_requests import Renamed
from dflash_testing.scripted_servers import STEPS, L, S, V, probe_script


@pytest.mark.parametrize(
    ("changes", "sign"),
    [
        (V, "metrics named vllm:"),
        (L, "metrics named llamacpp:"),
        ({**S, "has_metrics": False}, "speculative_algorithm at /server_info"),
        ({**S, "has_metrics": False, "old_names": True}, "speculative_algorithm at /get_server_info"),
        ({**L, "has_metrics": False}, "default_generation_settings at /props"),
        ({**STEPS, "has_metrics": False}, "the fields of an answer"),
    ],
)
def test_a_server_behind_another_owner_is_recognised(
    changes: dict[str, Any], sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe_script(monkeypatch, Renamed(**changes), questions=False)
    assert (found.server.engine, found.server.recognised_by) == (changes["style"], sign)
