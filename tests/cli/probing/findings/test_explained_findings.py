"""Which findings explain others."""

import pytest

from dflash_cli.probing.findings.explained_findings import EXPLAINS, drop_explained
from dflash_cli.probing.findings.served_finding import ServedFinding


def test_no_two_findings_explain_each_other() -> None:
    """Two findings that explain each other are both dropped, and the fault gets no name."""
    pairs = [(id, other) for id, explained in EXPLAINS.items() for other in explained]
    assert [(id, other) for id, other in pairs if id in EXPLAINS.get(other, ())] == []


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (("acceptance-cliff", "draft-capped"), ["draft-capped"]),
        (("several-replicas", "draft-capped"), ["several-replicas"]),
        (("drafts-by-lookup", "acceptance-falls-with-time"), ["drafts-by-lookup", "acceptance-falls-with-time"]),
    ],
    ids=["cap", "replicas", "lookup"],
)
def test_a_finding_that_follows_from_another_is_dropped(ids: tuple[str, ...], kept: list[str]) -> None:
    found = [ServedFinding(id=id, severity="warning", seen="", follows="", next="") for id in ids]
    assert [item.id for item in drop_explained(found)] == kept
