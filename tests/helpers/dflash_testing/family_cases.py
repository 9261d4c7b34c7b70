"""Configs of DFlash 2, DSpark and quantised drafts in which one key, or a few, are stated, absent, null or mistyped.

The cases of tests/golden/family_verdicts.py and tests/behaviour/test_family_verdicts.py. A case is a base with changes,
as in `config_cases`. Its tensors are those of its base.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_testing import checkpoints as support
from dflash_testing import families
from dflash_testing.config_cases import ABSENT, BODY, FULL, GREEDY, METHODS, SHAPE, SLIDING, WINDOWED, changed
from dflash_testing.families import CONVOLVED, MARKOV

FLAT = {key: value for key, value in MARKOV.items() if key != "sample_from_anchor"}
NESTED_MARKOV = {
    **dict.fromkeys(MARKOV, ABSENT), "architectures": ["DSparkDraftModel"],
    **{f"dflash_config.{key}": value for key, value in FLAT.items()},
}  # fmt: skip
PREFIXED = {
    "dflash_config": ABSENT, "block_size": ABSENT, "markov_rank": ABSENT, "markov_head_type": ABSENT,
    "dspark_block_size": 4, "dspark_noise_token_id": 63, "dspark_target_layer_ids": [0, 2], "dspark_markov_rank": 3,
    "dspark_markov_head_type": "vanilla",
}  # fmt: skip
NO_CONFIDENCE = {"enable_confidence_head": False, "confidence_head_with_markov": False}
SPECULATORS_WINDOWED = {
    f"{BODY}layer_types": [SLIDING] * 2, f"{BODY}sliding_window": 16, f"{BODY}use_sliding_window": True,
}  # fmt: skip

BASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dflash2": ("dflash2", {}),
    "dflash2 sliding": ("dflash2", WINDOWED),
    "dflash2-speculators": ("dflash2-speculators", {}),
    "dspark": ("dspark", {}),
    "dspark fill-in": ("dspark", {"sample_from_anchor": False}),
    "dspark nested": ("dspark", NESTED_MARKOV),
    "dspark prefixed": ("dspark", PREFIXED),
    "dspark gated": ("dspark", {"markov_head_type": "gated"}),
    "dspark rnn": ("dspark", {"markov_head_type": "rnn"}),
    "dspark plain": ("dspark", {"markov_rank": 0, **NO_CONFIDENCE}),
    "dspark blind": ("dspark", {"confidence_head_with_markov": False}),
    "dspark sliding": ("dspark", WINDOWED),
    "dspark-speculators": ("dspark-speculators", {}),
}
"""Base -> the dialect in `families.FAMILIES`, and the changes that the tensors of the base have too."""

COUNTS: tuple[Any, ...] = (ABSENT, None, "2", 2.0, 0, -1, True)
LAYOUTS: tuple[Any, ...] = (ABSENT, None, True, False, "false", 0)
SCALES: tuple[Any, ...] = (None, 1, 0.5, 0, -1, "2")
MASKS: tuple[Any, ...] = (ABSENT, None, "63", 62.5, -1, 0, 64)
TAPS: tuple[Any, ...] = (ABSENT, None, [], [0], [2, 0], [0, 3], [0, 9], "0,2")

DFLASH2: Mapping[str, tuple[Any, ...]] = {
    **{f"dflash_config.{key}": (*COUNTS, 1, 3, 4, 5) for key in CONVOLVED},
    **{key: (value, None, 3) for key, value in CONVOLVED.items()},
    "dflash_config.input_embedding_scale": SCALES, "dflash_config.output_multiplier": SCALES,
    "dflash_config.final_logit_softcapping": SCALES, "input_embedding_scale": (2.0, None, "x"),
    "output_multiplier": (0.5, None, "x"), "final_logit_softcapping": (20.0, None, "x"), "logit_scale": (None, 0.5),
    "dflash_config.logit_scale": (0.5,), "is_causal": LAYOUTS, "dflash_config.causal": LAYOUTS,
    "dflash_config.block_size": (ABSENT, None, "4", 0, 8), "block_size": (ABSENT, None, "4", 8, 4.5),
    "dflash_config.mask_token_id": MASKS, "mask_token_id": (63, 62, None), "pard_token": (62,),
    "dflash_config.target_layer_ids": TAPS, "target_layer_ids": ([0, 2], [0, 1]),
    "draft_vocab_size": (None, 64, 32), "vocab_size": (ABSENT, 32, 128), "num_target_layers": (ABSENT, 0, 8),
    "dflash_config.sample_from_anchor": (None, False, True), "sample_from_anchor": (True, False),
    "architectures": (
        ["DFlashDraftModel"], ["Qwen3DFlash2DraftModel"], ["MiniMaxDFlash2DraftModel"], ["DFlash2BeamDraftModel"], None,
        "DFlash2DraftModel",
    ),
    "model_type": ("llama", "dflash2", None), "dflash_config": (ABSENT, None, []),
    "dflash_config.projector_type": ("dflash2", "domino"), "dflash_config.nonsense": (1,),
}  # fmt: skip
"""Key -> its values on the base `dflash2`."""

ATTENTION: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (None, True, False, "false", 0), "dflash_config.causal": (None, True, False),
    "layer_types": ([SLIDING, FULL], [FULL] * 2, ABSENT), "sliding_window": (ABSENT, None, 1), "use_sliding_window": (
        False, ABSENT,
    ),
}  # fmt: skip
"""Key -> its values on the bases with windows, which state no causality."""

DSPARK: Mapping[str, tuple[Any, ...]] = {
    "sample_from_anchor": LAYOUTS, "dspark_bonus_anchor": LAYOUTS, "dflash_config.sample_from_anchor": LAYOUTS[1:],
    "dflash_config.dspark_bonus_anchor": (True, False), "markov_rank": (*COUNTS, 4),
    "dflash_config.markov_rank": (None, 3, 4, 0), "dspark_markov_rank": (3, 4, 0, None),
    "markov_head_type": (ABSENT, None, "gated", "Vanilla", "nonsense", 1),
    "dflash_config.markov_head_type": (None, "vanilla", "gated"), "dspark_markov_head_type": ("vanilla", "gated"),
    "dspark_draft_topk": (None, 1, 3, 64, 65, 0, -1, "3", 3.0, True), "dflash_config.dspark_draft_topk": (3,),
    "enable_confidence_head": (ABSENT, None, False, "false", 0), "confidence_head_with_markov": LAYOUTS,
    "dflash_config.enable_confidence_head": (False,), "dflash_config.confidence_head_with_markov": (False,),
    "block_size": (ABSENT, None, "4", 8, 1, 0, 4.5), "dflash_config.block_size": (None, 8, "4"),
    "dspark_block_size": (None, 8, "4", 0), "dflash_config.mask_token_id": MASKS, "mask_token_id": (63, 62, None),
    "dspark_noise_token_id": (62, None, "62"), "pard_token": (62,), "ptd_token_id": (62,),
    "dflash_config.target_layer_ids": TAPS, "target_layer_ids": ([0, 2], [0, 1]),
    "dspark_target_layer_ids": ([0, 2], [0, 1], [0], [], None), "eagle_aux_hidden_state_layer_ids": ([1, 3], [1, 2]),
    "draft_vocab_size": (None, 64, 32, 128), "vocab_size": (ABSENT, 32, 128), "num_target_layers": (ABSENT, 8),
    "logit_scale": (None, 0.5, "x"), "dflash_config.input_embedding_scale": (2.0,), "output_multiplier": (0.5,),
    "is_causal": LAYOUTS, "dflash_config.causal": (None, True, False), "target_hidden_size": (64, 32, 0),
    "architectures": (
        ["DSparkDraftModel"], ["DFlashDraftModel"], ["LingDSparkModel"], ["Gemma4DSparkModel"], ["Other"], None,
        ["Qwen3DSparkModel", "Other"],
    ),
    "model_type": ("llama", "dspark", None), "dflash_config": (ABSENT, None, []), "dspark_config": (
        {"markov_rank": 4}, {"markov_head_type": "gated"}, {"mask_token_id": 62},
    ),
    "dflash_config.projector_type": ("dspark", "nonsense"), "nonsense": (1,),
}  # fmt: skip
"""Key -> its values on the base `dspark`."""

DSPARK_ELSEWHERE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(("dspark fill-in", {key: value}) for key in ("dspark_bonus_anchor", "block_size") for value in (True, False, 8)),
    ("dspark fill-in", {"sample_from_anchor": ABSENT, "dspark_bonus_anchor": True}),
    ("dspark fill-in", {"sample_from_anchor": ABSENT, "dflash_config.sample_from_anchor": False}),
    ("dspark fill-in", {"sample_from_anchor": ABSENT, "dflash_config.dspark_bonus_anchor": True}),
    *(("dspark nested", {key: value}) for key, value in MARKOV.items()),
    ("dspark nested", FLAT), ("dspark nested", {**FLAT, "sample_from_anchor": False}),
    ("dspark nested", {**FLAT, "dflash_config.markov_rank": None}),
    ("dspark nested", {**FLAT, "architectures": ["Qwen3DSparkModel"]}),
    *(("dspark prefixed", {key: ABSENT}) for key in PREFIXED if key.startswith("dspark_")),
    ("dspark prefixed", {"markov_rank": 3}), ("dspark prefixed", {"markov_rank": 3, "markov_head_type": "vanilla"}),
    ("dspark prefixed", {"markov_rank": 3, "target_layer_ids": [0, 2], "block_size": 8}),
    ("dspark prefixed", {"markov_rank": 3, "mask_token_id": 62}),
    ("dspark gated", {"markov_head_type": "vanilla"}), ("dspark gated", {"dspark_draft_topk": 3}),
    ("dspark rnn", {"sample_from_anchor": False}), ("dspark rnn", {"markov_head_type": "RNN"}),
    ("dspark plain", {"markov_rank": ABSENT}), ("dspark plain", {"markov_rank": None}),
    ("dspark plain", {"enable_confidence_head": True}), ("dspark plain", {"sample_from_anchor": ABSENT}),
    ("dspark plain", {"architectures": ["DFlashDraftModel"]}), ("dspark plain", {"dspark_draft_topk": 3}),
    ("dspark blind", {"confidence_head_with_markov": ABSENT}), ("dspark blind", {"confidence_head_with_markov": True}),
    ("dspark blind", {"confidence_head_with_markov": None}),
)  # fmt: skip
"""Bases with changes of DSpark."""

SPECULATORS: Mapping[str, tuple[Any, ...]] = {
    "architectures": (ABSENT, None, [], ["Other"], "x"), "model_type": ("qwen3",), "speculators_config": (ABSENT, {}),
    "speculators_model_type": (None, "dflash", "nonsense"),
    METHODS: ([], [{"proposal_type": "greedy"}], [{**GREEDY, "speculative_tokens": 7}]),
    "transformer_layer_config": (ABSENT, None), f"{BODY}model_type": (ABSENT, "llama"), f"{BODY}head_dim": (ABSENT,),
    f"{BODY}vocab_size": (ABSENT, 32, 128), f"{BODY}rms_norm_eps": (ABSENT, 1e-5), f"{BODY}rope_theta": (ABSENT, 10000),
    f"{BODY}is_causal": (None, True, False), f"{BODY}dflash_config": ({"causal": True}, {"block_size": 8}),
    f"{BODY}mask_token_id": (62,), f"{BODY}block_size": (8,), f"{BODY}logit_scale": (0.5,),
    "aux_hidden_state_layer_ids": (ABSENT, None, [], [1], [3, 1], [1, 1], [0, 2], [1, 4], [1, 5], "1,3"),
    "mask_token_id": MASKS, "block_size": (ABSENT, None, "4", 1, 8), "draft_vocab_size": (ABSENT, None, 32, 128),
    "target_hidden_size": (ABSENT, 64, 32, 0), "sliding_window_non_causal": (ABSENT, None, False, "false"),
    "sample_from_anchor": LAYOUTS, "is_causal": (True, False), "dflash_config": ({"causal": True},),
    "tie_word_embeddings": (True,), "logit_scale": (0.5,), "nonsense": (1,),
}  # fmt: skip
"""Key -> its values on the two bases of the speculators dialect."""

OF_DFLASH2: Mapping[str, tuple[Any, ...]] = {
    **{key: (*COUNTS, 1, 3, 4, 5) for key in CONVOLVED},
    **{f"{BODY}{key}": (3,) for key in CONVOLVED},
    f"{BODY}dflash_config": (dict(CONVOLVED),),
    "input_embedding_scale": (2.0,),
    "output_multiplier": (0.5,),
    f"{BODY}input_embedding_scale": (2.0,),
    "speculators_model_type": ("dspark",),
}
"""Key -> its values on the base `dflash2-speculators`."""

OF_DSPARK: Mapping[str, tuple[Any, ...]] = {
    "markov_rank": (*COUNTS, 4), f"{BODY}markov_rank": (4,), f"{BODY}sample_from_anchor": (True, False),
    "markov_head_type": (ABSENT, None, "gated", "nonsense"), "enable_confidence_head": (ABSENT, None, False, 0),
    "confidence_head_with_markov": LAYOUTS, "dspark_draft_topk": (3,), f"{BODY}dspark_draft_topk": (None, 3, 65, 0),
    "dspark_bonus_anchor": (True, False), "architectures": (["Qwen3DSparkModel"], ["Qwen3OmniDSparkModel"]),
    "speculators_model_type": ("dflash2",), "use_aux_hidden_state": (False, True),
}  # fmt: skip
"""Key -> its values on the base `dspark-speculators`."""

SPECULATORS_TOGETHER: tuple[Mapping[str, Any], ...] = (
    *({**SPECULATORS_WINDOWED, "sliding_window_non_causal": flag} for flag in (ABSENT, True, False)),
    {**SPECULATORS_WINDOWED, "sliding_window_non_causal": False, f"{BODY}is_causal": False},
    {**SPECULATORS_WINDOWED, f"{BODY}layer_types": [SLIDING, FULL]},
    {**SPECULATORS_WINDOWED, f"{BODY}use_sliding_window": False},
)
"""Changes of several keys, on both bases of the speculators dialect."""


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A config with the tensors of its base."""

    base: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in self.changes.items())
        return f"{self.base}: {said or 'as it is'}".replace(f'"{ABSENT}"', "absent")

    @property
    def family(self) -> str:
        """`dflash2` or `dspark`."""
        return BASES[self.base][0].removesuffix("-speculators")

    @property
    def is_speculators(self) -> bool:
        return BASES[self.base][0].endswith("-speculators")

    @property
    def config(self) -> dict[str, Any]:
        """The draft's config."""
        dialect, base = BASES[self.base]
        return changed(families.FAMILIES[dialect](SHAPE), {**base, **self.changes})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a tensor -> its shape."""
        dialect, base = BASES[self.base]
        plain = families.FAMILIES[dialect](SHAPE)
        stated = {**plain, **{key: value for key, value in base.items() if key in MARKOV and value != ABSENT}}
        return {**support.body_shapes(replace(SHAPE)), **families.own_shapes(stated, SHAPE)}


def all_cases() -> dict[str, FamilyCase]:
    """Name -> case, each config once."""
    return {case.name: case for case in _cases()}


def _cases() -> Iterator[FamilyCase]:
    for base in BASES:
        yield FamilyCase(base=base)
    for base, table in (
        ("dflash2", DFLASH2), ("dspark", DSPARK), ("dflash2 sliding", ATTENTION), ("dspark sliding", ATTENTION),
        ("dflash2-speculators", {**SPECULATORS, **OF_DFLASH2}), ("dspark-speculators", {**SPECULATORS, **OF_DSPARK}),
        ("dflash2-speculators", SPECULATORS), ("dspark-speculators", SPECULATORS),
    ):  # fmt: skip
        for key, values in table.items():
            for value in values:
                yield FamilyCase(base=base, changes={key: value})
    for base, changes in DSPARK_ELSEWHERE:
        yield FamilyCase(base=base, changes=changes)
    for base in ("dflash2-speculators", "dspark-speculators"):
        for changes in SPECULATORS_TOGETHER:
            yield FamilyCase(base=base, changes=changes)
