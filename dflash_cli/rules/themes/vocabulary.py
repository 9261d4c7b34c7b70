"""Rules on the reduced vocabulary: `d2t` holds offsets (target id = j + d2t[j]), `t2d` marks proposable ids."""

from collections.abc import Iterator

from dflash_cli.rules.rule import FIX_INSPECT, FIX_REEXPORT, Problem, Severity, check
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.json_values import is_int


@check(
    "M01",
    effect="vLLM fills the map with zeros, so draft id j is proposed as target id j",
    fix=FIX_REEXPORT,
    source="vLLM 0.33.0 qwen3_dflash.py; vllm-project/vllm#46435",
    outcome="drops",
    stops_runtime=True,
)
def reduced_vocabulary_has_its_map(subject: Subject) -> Iterator[Problem]:
    """A draft with a reduced output vocabulary has an id map (d2t) and its own head."""
    found = subject.stated.vocabulary_sizes
    if found is None or subject.tensors is None:
        return
    reduced, vocab = found
    if reduced > vocab:
        yield Problem(
            subject.expected_at("draft_vocab_size"),
            f"found {reduced}, expected at most the target's {vocab}",
            effect="readers stop at ids past the vocabulary",
            outcome="stops",
        )
    if reduced >= vocab:
        return
    for name, effect in (
        (DRAFT_TO_TARGET, ""),
        (HEAD, "readers cannot compute the logits of the reduced vocabulary"),
    ):
        if name not in subject.tensors:
            yield Problem(
                f"{WEIGHTS}:{name}", f"missing, although draft_vocab_size is {reduced} of {vocab}", effect=effect
            )
    if TARGET_TO_DRAFT not in subject.tensors and DRAFT_TO_TARGET in subject.tensors:
        yield Problem(
            f"{WEIGHTS}:{TARGET_TO_DRAFT}",
            "missing, although d2t is present",
            effect="speculators cannot load the file",
            severity="warning",
            outcome="serves",
        )


@check(
    "M03",
    effect="loading stops at the wrong shape",
    fix=f"{FIX_INSPECT} # lists the shapes; correct vocab_size or draft_vocab_size, or export the draft again",
    source="speculators 0.9.0 models/dflash/core.py",
)
def map_shapes_fit(subject: Subject) -> Iterator[Problem]:
    """d2t, t2d, head and embedding have the sizes of the two vocabularies.

    A tensor of the target's size is accepted even if vocab_size differs, because P02 reports vocab_size.
    """
    found, hidden = subject.stated.vocabulary_sizes, subject.stated.body.get("hidden_size")
    if found is None or subject.tensors is None or not is_int(hidden):
        return
    reduced, vocab = found
    expected = _shapes(reduced, vocab, hidden)
    true_vocab = subject.target.vocab_size if subject.target is not None else vocab
    fitting = _shapes(true_vocab if reduced == vocab else reduced, true_vocab, hidden)
    for name, shape in expected.items():
        info = subject.tensors.get(name)
        if info is not None and info.shape not in (shape, fitting[name]):
            yield Problem(f"{WEIGHTS}:{name}", f"found {list(info.shape)}, expected {list(shape)}")


def _shapes(reduced: int, vocab: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensor name -> its shape, from the sizes of the two vocabularies."""
    return {
        DRAFT_TO_TARGET: (reduced,),
        TARGET_TO_DRAFT: (vocab,),
        HEAD: (reduced, hidden),
        EMBEDDING: (vocab, hidden),
    }


@check(
    "M04",
    "warning",
    effect="readers cast the tensor before they index with it, or stop",
    fix=FIX_REEXPORT,
    source="speculators 0.9.0 train/vocab_mapping.py",
)
def map_types_fit(subject: Subject) -> Iterator[Problem]:
    """The id map d2t is int64, and the mask t2d is bool."""
    expected = {DRAFT_TO_TARGET: ("I64", ("I32",)), TARGET_TO_DRAFT: ("BOOL", ("U8",))}
    for name, (wanted, tolerated) in expected.items():
        info = (subject.tensors or {}).get(name)
        if info is not None and info.dtype != wanted:
            severity: Severity = "warning" if info.dtype in tolerated else "error"
            yield Problem(f"{WEIGHTS}:{name}", f"found {info.dtype}, expected {wanted}", severity=severity)
