"""Rules on the block, the tapped layers and the mask token."""

from collections.abc import Iterator

from dflash_cli.checks.base import SPECULATORS_BODY, Problem, Subject, as_object, check, is_int
from dflash_cli.formats.native import SCALES, guess_taps

MASK_EXPECTED = "an integer from 0"


@check("C03")
def block_size_is_one_number(subject: Subject) -> Iterator[Problem]:
    """block_size is stated, the same wherever it is stated, and at least 2."""
    homes = {place: value for place, value in subject.homes("block_size").items() if value is not None}
    if not homes:
        yield Problem(
            subject.place("block_size"),
            "missing",
            effect="readers assume 16 or 8, whatever the draft was trained with",
            fix="state it at the top level and in dflash_config; it counts the anchor",
        )
    if any(value != next(iter(homes.values())) for value in homes.values()):
        stated = ", ".join(f"{place.split(':')[1]} {value}" for place, value in homes.items())
        yield Problem(subject.place("block_size"), f"stated twice with different values: {stated}")
    for place, value in homes.items():
        if not is_int(value) or value < 2:
            yield Problem(place, f"found {value!r}, expected an integer of at least 2: the anchor and a draft token")


@check("C04")
def drafts_one_less_than_the_block(subject: Subject) -> Iterator[Problem]:
    """speculative_tokens is block_size - 1: the block counts the anchor (vllm#39519, speculators#456)."""
    methods = as_object(subject.config.get("speculators_config")).get("proposal_methods")
    block = subject.block_size
    if not isinstance(methods, list) or block is None:
        return
    expected = block if subject.config.get("sample_from_anchor") is True else block - 1
    for index, method in enumerate(methods):
        stated = as_object(method).get("speculative_tokens")
        if stated is not None and stated != expected:
            yield Problem(
                subject.place(f"speculators_config.proposal_methods[{index}].speculative_tokens"),
                f"{stated!r}, expected {expected} for a block of {block}",
                effect="vLLM takes K from here and would draft a block of another length than was trained",
            )


@check("C05")
def taps_are_stated(subject: Subject) -> Iterator[Problem]:
    """The tapped layers are a list of integers (sglang#37475, z-lab/dflash#156)."""
    value = subject.stated(subject.tap_key)
    if value is None:
        yield Problem(subject.tap_place, f"missing{_guess(subject)}", fix="write the layers the draft was trained on")
    elif subject.taps is None:
        yield Problem(subject.tap_place, f"found {value!r}, expected a non-empty list of integers")


@check("C06")
def taps_exist(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer exists in the target."""
    depth = subject.num_target_layers
    shift = 1 if subject.is_speculators else 0
    for index, tap in enumerate(subject.taps or ()):
        if tap < 0 or (depth is not None and tap >= depth):
            limit = f"{shift}..{depth - 1 + shift}" if depth is not None else f"{shift} or more"
            hint = "; 0 is the embedding's output" if subject.is_speculators and tap == -1 else ""
            yield Problem(f"{subject.tap_place}[{index}]", f"{tap + shift} is outside the target's {limit}{hint}")


@check("C07")
def taps_ascend(subject: Subject) -> Iterator[Problem]:
    """Tapped layers ascend without repeats (vLLM 0.33.0 interfaces.py sorts and de-duplicates them)."""
    taps = subject.taps or []
    if len(set(taps)) != len(taps):
        yield Problem(
            subject.tap_place,
            f"{subject.stated(subject.tap_key)} repeats a layer",
            effect="vLLM taps each layer once, so fc gets fewer features than it has columns",
        )
    elif taps != sorted(taps):
        yield Problem(
            subject.tap_place,
            f"{subject.stated(subject.tap_key)} does not ascend",
            effect="vLLM sorts the taps and not the columns of fc, which permutes the features",
        )


@check("C08")
def tap_lists_agree(subject: Subject) -> Iterator[Problem]:
    """Where both tap lists are stated, the eagle one is one higher (vllm#40727)."""
    key = "eagle_aux_hidden_state_layer_ids"
    aux = subject.body.get(key, subject.config.get(key))
    if aux is None or subject.taps is None:
        return
    expected = [tap + 1 for tap in subject.taps]
    if aux != expected:
        yield Problem(
            subject.place(key),
            f"{aux}, expected {expected}: one more than the layers whose output is tapped",
            effect="vLLM takes this list, other engines the other one",
        )


@check("C09", "warning")
def taps_were_shifted(subject: Subject) -> Iterator[Problem]:
    """speculators ids are not a native list that was copied without adding one."""
    depth, count = subject.num_target_layers, subject.body.get("num_hidden_layers")
    taps = subject.taps
    if not subject.is_speculators or taps is None or depth is None or not is_int(count) or not 1 <= count < 1000:
        return
    stated = [tap + 1 for tap in taps]
    if stated == guess_taps(depth, count) or stated == guess_taps(depth, len(taps)):
        yield Problem(
            subject.tap_place,
            f"{stated} is the usual native list for {depth} layers; this dialect would say {[i + 1 for i in stated]}",
            effect="if it was copied, every feature comes from one layer too early",
            fix="compare with the draft's training settings",
        )


@check("C10", "warning")
def last_layer_is_not_tapped(subject: Subject) -> Iterator[Problem]:
    """The last layer is not tapped: readers disagree on whether the final norm is applied to it."""
    depth = subject.num_target_layers
    if depth is not None and depth - 1 in (subject.taps or ()):
        yield Problem(
            subject.tap_place,
            f"taps the last of {depth} layers",
            effect="transformers hands out that layer normalised, vLLM and SGLang hand it out raw",
        )


@check("C12")
def mask_token_is_an_id(subject: Subject) -> Iterator[Problem]:
    """mask_token_id is an integer from 0 to the vocabulary's end."""
    homes = subject.homes("mask_token_id")
    value = subject.stated("mask_token_id")
    place = next(iter(homes), subject.place("mask_token_id"))
    vocab_size = subject.body.get("vocab_size")
    if not homes:
        yield Problem(place, f"missing, expected {MASK_EXPECTED}", effect="engines stop, or fill in another token")
    elif value is None:
        yield Problem(place, f"null, expected {MASK_EXPECTED}", effect="vLLM stops with a TypeError")
    elif not is_int(value) or value < 0:
        yield Problem(place, f"found {value!r}, expected {MASK_EXPECTED}")
    elif is_int(vocab_size) and value >= vocab_size:
        yield Problem(place, f"{value} is outside the vocabulary of {vocab_size}")


@check("C13")
def mask_token_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """mask_token_id is the same in both places."""
    homes = {place: value for place, value in subject.homes("mask_token_id").items() if value is not None}
    if any(value != next(iter(homes.values())) for value in homes.values()):
        stated = ", ".join(f"{place.split(':')[1]} {value}" for place, value in homes.items())
        yield Problem(next(iter(homes)), f"stated twice with different values: {stated}")


@check("C14", "warning")
def mask_token_is_spare(subject: Subject) -> Iterator[Problem]:
    """The mask is no token that text contains."""
    value = subject.stated("mask_token_id")
    if not is_int(value):
        return
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        stated = subject.body.get(key)
        if value in (stated if isinstance(stated, list) else [stated]):
            yield Problem(
                subject.place("mask_token_id"),
                f"{value} is also {key}",
                effect="the draft cannot tell a masked position from the real token",
            )


@check("C28", "info")
def embeddings_are_not_tied(subject: Subject) -> Iterator[Problem]:
    """tie_word_embeddings says nothing in a draft, which has no embedding."""
    if subject.body.get("tie_word_embeddings") is True:
        yield Problem(
            subject.body_place("tie_word_embeddings"),
            "true in a file without an embedding",
            effect="none while loading; a program that saves the draft again may leave out a tensor",
        )


@check("C37", "warning")
def draft_is_as_wide_as_its_target(subject: Subject) -> Iterator[Problem]:
    """target_hidden_size equals hidden_size; only vLLM serves a draft of another width than its target."""
    stated, width = subject.config.get("target_hidden_size"), subject.body.get("hidden_size")
    if stated is not None and stated != width:
        yield Problem(
            subject.place("target_hidden_size"),
            f"{stated!r} beside hidden_size {width!r}",
            effect="SGLang, the z-lab reference and speculators itself size fc by hidden_size",
            severity=subject.severity_for("sglang"),
        )


@check("C29", "warning")
def scales_are_not_served(subject: Subject) -> Iterator[Problem]:
    """Scales are stated only where engines apply them (vLLM 0.33.0 reads them for DFlash 2 alone)."""
    neutral = {"input_embedding_scale": (1,), "output_multiplier": (1,), "final_logit_softcapping": (0,)}
    for key in SCALES:
        value = subject.stated(key)
        if value is not None and value not in neutral[key]:
            yield Problem(
                next(iter(subject.homes(key))),
                f"{value}",
                effect="vLLM ignores it for DFlash, and the speculators dialect cannot state it",
                severity=subject.severity_for("vllm"),
            )


@check("C35")
def anchor_is_not_sampled(subject: Subject) -> Iterator[Problem]:
    """The draft does not predict at the anchor (vllm#54154)."""
    for place, value in (
        (subject.place("sample_from_anchor"), subject.config.get("sample_from_anchor")),
        (subject.place("dflash_config.sample_from_anchor"), subject.nested.get("sample_from_anchor")),
        (
            subject.place(f"{SPECULATORS_BODY}.dflash_config.sample_from_anchor"),
            as_object(as_object(subject.config.get(SPECULATORS_BODY)).get("dflash_config")).get("sample_from_anchor"),
        ),
    ):
        if value is True:
            yield Problem(
                place,
                "true: the draft also predicts at the anchor, as DSpark does",
                effect="vLLM refuses it for DFlash; served as DFlash every prediction is off by one position",
            )


def _guess(subject: Subject) -> str:
    depth, count = subject.num_target_layers, subject.body.get("num_hidden_layers")
    if subject.is_speculators or depth is None or not is_int(count) or not 1 <= count < 1000:
        return ""
    return f"; engines would guess {guess_taps(depth, count)}"
