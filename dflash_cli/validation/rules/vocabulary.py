"""Rules on the reduced vocabulary: `d2t` holds offsets (target id = j + d2t[j]), `t2d` marks the ids that are kept."""

from collections.abc import Iterator

from dflash_cli.validation.rule import FIX_INSPECT, FIX_REEXPORT, Problem, Severity, check
from dflash_cli.validation.rules.tensors import WEIGHTS
from dflash_cli.validation.subject import Subject
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.json_values import is_int


@check(
    "M01",
    effect="vLLM takes zeros for the map: draft id j is then proposed as target id j",
    fix=FIX_REEXPORT,
    source="vLLM 0.33.0 qwen3_dflash.py; vllm-project/vllm#46435",
    outcome="drops",
    stops_runtime=True,
)
def reduced_vocabulary_has_its_map(subject: Subject) -> Iterator[Problem]:
    """A reduced vocabulary has d2t and a head of its own."""
    found = subject.vocabulary_sizes
    if found is None or subject.tensors is None:
        return
    reduced, vocab = found
    if reduced > vocab:
        yield Problem(subject.location("draft_vocab_size"), f"{reduced} is more than the target's {vocab}")
    if reduced >= vocab:
        return
    for name, effect in (
        (DRAFT_TO_TARGET, ""),
        (HEAD, "there is nothing to compute the reduced logits with"),
    ):
        if name not in subject.tensors:
            yield Problem(f"{WEIGHTS}:{name}", f"missing, with draft_vocab_size {reduced} of {vocab}", effect=effect)
    if TARGET_TO_DRAFT not in subject.tensors and DRAFT_TO_TARGET in subject.tensors:
        yield Problem(
            f"{WEIGHTS}:{TARGET_TO_DRAFT}",
            "missing beside d2t",
            effect="speculators cannot load the file",
            severity="warning",
            outcome="serves",
        )


@check("M03", effect="loading stops at the shape", fix=FIX_INSPECT, source="speculators 0.9.0 models/dflash/core.py")
def map_shapes_fit(subject: Subject) -> Iterator[Problem]:
    """d2t, t2d, head and embedding have the vocabularies' sizes."""
    found, hidden = subject.vocabulary_sizes, subject.body.get("hidden_size")
    if found is None or subject.tensors is None or not is_int(hidden):
        return
    reduced, vocab = found
    expected = {
        DRAFT_TO_TARGET: (reduced,),
        TARGET_TO_DRAFT: (vocab,),
        HEAD: (reduced, hidden),
        EMBEDDING: (vocab, hidden),
    }
    for name, shape in expected.items():
        info = subject.tensors.get(name)
        if info is not None and info.shape != shape:
            yield Problem(f"{WEIGHTS}:{name}", f"{list(info.shape)}, expected {list(shape)}")


@check(
    "M04",
    "warning",
    effect="readers that index with it cast it first, or stop",
    fix=FIX_REEXPORT,
    source="speculators 0.9.0 train/vocab_mapping.py",
)
def map_types_fit(subject: Subject) -> Iterator[Problem]:
    """d2t is int64 and t2d is bool."""
    expected = {DRAFT_TO_TARGET: ("I64", ("I32",)), TARGET_TO_DRAFT: ("BOOL", ("U8",))}
    for name, (wanted, tolerated) in expected.items():
        info = (subject.tensors or {}).get(name)
        if info is not None and info.dtype != wanted:
            severity: Severity = "warning" if info.dtype in tolerated else "error"
            yield Problem(f"{WEIGHTS}:{name}", f"{info.dtype}, expected {wanted}", severity=severity)
