"""Drop findings that another finding explains, so that one fault has one name.

A server that drafts for a quarter of its answers also leaves JSON answers without drafts. Only the first is a fault.
"""

from collections.abc import Mapping, Sequence

from dflash_cli.probing.findings.served_finding import ServedFinding

KINDS = ("structured-output", "tool-call", "sampled-answers", "default-settings")
NOT_DRAFTED = {f"{kind}-not-drafted" for kind in KINDS}
REJECTED = {f"{kind}-rejected" for kind in KINDS}
LOW = {"acceptance-low-everywhere", "acceptance-falls-within-answers", "second-turn-lowers-acceptance", *REJECTED}
LATER = {"acceptance-falls-with-load", "acceptance-falls-with-context", "second-turn-lowers-acceptance"}
"""Findings that compare a later condition with the first run."""
FAILING = {"structured-output-fails", "tool-call-fails", "requests-fail"}
"""Findings on requests that get no answer. The server may start anew after one."""
SHAPES = {"acceptance-stops", "acceptance-cliff"}
"""Findings on positions. Positions that are never drafted look like positions that are never accepted."""
UNSTEADY = {
    "answers-not-greedy", "answers-not-repeatable", "answers-change-with-load", "prefix-cache-changes-answers",
    "second-turn-changes-answers", "default-settings-change-answers", "answers-change-beside-sampled", "seeds-ignored",
}  # fmt: skip
"""Findings on changed answers. They follow where one request alone gets other answers by chance."""
UNREPEATABLE = {
    "answers-not-repeatable", "answers-change-each-time", "temperature-zero-ignored", "replicas-answer-differently",
}  # fmt: skip
"""Findings which say that the load is not the reason of changed answers."""
EXPLAINS: Mapping[str, set[str]] = {
    "counters-reset": {"counters-incomplete", "counters-contradict", "counters-miscount"},
    "answers-from-a-store": {
        "counters-incomplete", "counters-miscount", "draft-off-under-load", "partly-drafted", "prefix-cache-unused",
        "second-turn-not-cached", "seeds-ignored", *NOT_DRAFTED,
    },
    **{id: {"counters-reset", "counters-incomplete"} for id in FAILING},
    "prompts-cut": {
        "acceptance-falls-with-context", "long-prompts-loop", "prefix-cache-mostly-missed", "prefix-cache-unused",
        "prefix-cache-changes-answers", "answers-not-repeatable", "second-turn-not-cached",
        "second-turn-changes-answers", "second-turn-lowers-acceptance",
    },
    "prefix-cache-mostly-missed": {"second-turn-not-cached"},
    "answers-in-reasoning": {"tool-call-stream-broken"},
    "chats-go-on": {"text-stream-broken", "stop-string-missed"},
    "acceptance-falls-with-time": {
        *LATER, "draft-fails-on-some-prompts", "repeat-lowers-acceptance", "acceptance-near-zero",
        "acceptance-low-everywhere", *REJECTED,
    },
    "requests-refused": {"requests-fail"},
    "repeat-raises-acceptance": {"acceptance-falls-within-answers"},
    "repeat-lowers-acceptance": {"acceptance-falls-with-load", "acceptance-falls-within-answers", *REJECTED},
    "answers-not-repeatable": {"answers-change-with-load", "answers-change-beside-sampled", "seeds-ignored"},
    "answers-change-with-load": {"answers-change-beside-sampled"},
    "temperature-zero-ignored": UNSTEADY,
    "answers-change-each-time": UNSTEADY,
    "replicas-answer-differently": {*UNSTEADY, "logprobs-wrong", "draft-fails-on-some-prompts"},
    "counters-contradict": {*SHAPES, *LOW, "acceptance-near-zero", "counters-incomplete", "counters-miscount"},
    "foreign-traffic": {"counters-miscount"},
    "active-adapter-lowers-acceptance": {
        "acceptance-low-everywhere", "acceptance-near-zero", "draft-fails-on-some-prompts", *REJECTED,
    },
    "answers-repeat-one-token": {*SHAPES, *LOW, *LATER, "acceptance-near-zero", "temperature-ignored",
        "structured-output-broken", "tool-call-broken", "tool-call-off-schema"},
    "several-replicas": {
        "foreign-traffic", "counters-reset", "counters-incomplete", "counters-contradict", "counters-miscount",
        "partly-drafted", "draft-off-under-load", "prefix-cache-unused", "second-turn-not-cached",
        "acceptance-falls-within-answers", "acceptance-falls-with-time",
        "draft-fails-on-some-prompts", "draft-capped", *SHAPES, *LATER, *NOT_DRAFTED,
    },
    "draft-not-engaged": NOT_DRAFTED,
    "draft-capped": SHAPES,
    "draft-off-under-load": {"acceptance-falls-with-load"},
    "partly-drafted": {
        "acceptance-falls-with-load", "draft-off-under-load", "acceptance-falls-within-answers",
        "second-turn-lowers-acceptance", *NOT_DRAFTED,
    },
    "drafts-by-lookup": {
        "partly-drafted", "draft-off-under-load", "draft-capped", "acceptance-near-zero", "acceptance-stops",
        "acceptance-cliff", "acceptance-falls-with-context", "prefix-cache-lowers-acceptance",
        "repeat-lowers-acceptance", *LOW, *NOT_DRAFTED,
    },
    "acceptance-near-zero": LOW - {"acceptance-falls-within-answers"},
    "acceptance-falls-within-answers": {"acceptance-near-zero", "acceptance-low-everywhere", *REJECTED},
    "acceptance-falls-with-context": {"second-turn-lowers-acceptance"},
    "prefix-cache-lowers-acceptance": {"acceptance-falls-with-time", "second-turn-lowers-acceptance"},
    "prefix-cache-changes-answers": {
        "second-turn-changes-answers", "answers-not-repeatable", "answers-change-with-load",
        "answers-change-beside-sampled",
    },
    "answers-not-greedy": {
        "logprobs-wrong",
        "structured-output-broken", "tool-call-broken", "tool-call-off-schema", "second-turn-changes-answers",
        "default-settings-change-answers",
    },
}  # fmt: skip
"""Id of a finding -> ids of findings that follow from it."""


def drop_explained(findings: Sequence[ServedFinding]) -> list[ServedFinding]:
    """The findings that no other finding explains. A fact (info) explains nothing."""
    explained = {id for item in findings if item.severity != "info" for id in EXPLAINS.get(item.id, ())}
    return [item for item in findings if item.id not in explained]
