"""Rules are added by their decorator alone, and their findings are in the order of their subjects."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dflash_cli.probing.findings import evidence as table
from dflash_cli.probing.findings.evidence import Evidence, find_all, rule
from dflash_cli.probing.findings.replicas import FOREIGN
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.registry import Registry


def test_a_rule_is_added_by_its_decorator_and_its_subject_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    table.RULES.discover(table.PACKAGE)
    assert {subject for subject, _ in table.RULES.values()} == set(table.SUBJECTS)
    monkeypatch.setattr(table, "RULES", Registry("rule of a probe"))

    @rule("settings")
    def find_later(evidence: Evidence) -> Iterator[ServedFinding]:
        yield replace(FOREIGN, id="later")

    @rule("drafting")
    def find_model(evidence: Evidence) -> Iterator[ServedFinding]:
        yield replace(FOREIGN, id=evidence.facts.model)

    facts = ServerFacts(engine="vllm", release=None, model="m", is_drafting=True)
    assert [item.id for item in find_all(Evidence(facts=facts, runs=()))] == ["m", "later"]
