"""Which findings explain others."""

from dflash_cli.probing.findings.explained_findings import EXPLAINS


def test_no_two_findings_explain_each_other() -> None:
    """Such findings would drop each other, so the fault would have no name."""
    pairs = [(id, other) for id, explained in EXPLAINS.items() for other in explained]
    assert [(id, other) for id, other in pairs if id in EXPLAINS.get(other, ())] == []
