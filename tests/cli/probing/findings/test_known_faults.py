"""The release that selects the rules for a running server."""

import pytest

from dflash_cli.probing.findings.known_faults import _name


@pytest.mark.parametrize(
    ("engine", "release", "judged"),
    [
        ("vllm", "0.24.0+cu130", "vllm@0.24"),
        ("vllm", "0.33.0rc1", "vllm@0.33"),
        ("vllm", "0.99.1", "vllm"),
        ("vllm", None, "vllm"),
        ("sglang", "0.5.23.post1", "sglang@0.5.23"),
        ("llama.cpp", "b10902-0a1b2c3", "llama.cpp"),
    ],
)
def test_a_servers_release_maps_to_the_release_that_rules_know(engine: str, release: str | None, judged: str) -> None:
    assert _name(engine, release) == judged
