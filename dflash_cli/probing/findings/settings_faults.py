"""Faults and facts that the server's own settings show."""

from collections.abc import Iterator

from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding


@rule("settings")
def find_settings(evidence: Evidence) -> Iterator[ServedFinding]:
    """A finding for each setting that changes answers or costs speed."""
    facts = evidence.facts
    if facts.has_prefix_cache is False:
        yield ServedFinding(
            id="prefix-cache-off",
            severity="warning",
            seen="the server's settings say that the prefix cache is off",
            follows="each request computes its whole prompt; engines switch the cache off for some pairs of a hybrid "
            "target and a draft. Whether the draft or a user did so is not visible from outside",
            next="look for the prefix cache in the server's log, and compare with a start without the draft",
        )
    if facts.is_quantised:
        yield ServedFinding(
            id="quantised-kv",
            severity="info",
            seen=f"keys and values are stored as {facts.kv_dtype}",
            follows="taps and verification read rounded values; acceptance may be lower than unquantised",
            next="compare with a server that stores keys and values unquantised: --beside URL",
        )
    if facts.lossy is not None:
        yield ServedFinding(
            id="verification-lossy",
            severity="warning",
            seen=f"the server's settings: {facts.lossy}",
            follows="draft tokens are accepted that the target alone would not choose, so answers do not follow the "
            "target's distribution, and acceptance says nothing about the draft",
            next="start the server with thresholds of 1.0, an exact method and no simulated acceptance",
        )
