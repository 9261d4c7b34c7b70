"""The fingerprint of a pair: every field of both configs counts, except fields that no KV depends on."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.setup.pair_fingerprint import NOT_IN_DRAFT, NOT_IN_TARGET, fingerprint
from dflash_runtime.draft_config import ConvolutionConfig, DraftConfig, MarkovConfig, SelectorConfig, Verifier
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.target_config import ExpertsConfig, GemmaConfig, OwnCache, RecurrenceConfig, TargetConfig
from dflash_testing.pairs import random_draft, random_llm, random_target

TARGET_CHANGES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_layers": 5, "vocab_size": 98, "num_heads": 2, "num_kv_heads": 4,
    "head_dim": 16, "layer_kinds": ("full",) * 4, "windows": (9, None, None, None), "chunk_size": 7,
    "max_position_embeddings": 512, "rope": RopeConfig(theta=10_000.0, kind="linear", params={"factor": 2.0}),
    "ropes": {"full": RopeConfig(theta=5.0)}, "num_experts": 3, "num_experts_per_token": 2, "nested_in": "text_config",
    "quantization": "awq", "tie_word_embeddings": True, "eos_token_ids": (3,), "dtype": "float16",
    "not_known": ("x",), "intermediate_size": 50, "rms_norm_eps": 0.3, "hidden_act": "gelu", "attention_bias": True,
    "mlp_bias": True, "has_sinks": True, "rotary_dim": 4,
    "recurrence": RecurrenceConfig(
        layers=(0,), num_key_heads=1, num_value_heads=2, key_size=4, value_size=4, num_taps=4
    ),
    "gemma": GemmaConfig(has_equal_kv=True, logit_cap=30.0), "other_kv_shapes": {1: (1, 8)},
    "own_cache": OwnCache(3, 4),
    "experts": ExpertsConfig(num_experts=4, num_chosen=2, intermediate_size=8, has_normalised_scores=True, layers=(0,)),
}  # fmt: skip
DRAFT_CHANGES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 41, "num_layers": 3, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16,
    "rms_norm_eps": 0.3, "max_position_embeddings": 512, "rope": RopeConfig(theta=7.0), "block_size": 6,
    "target_layer_ids": (1, 2), "mask_token_id": 5, "vocab_size": 98, "draft_vocab_size": 50, "causal": (True, False),
    "windows": (8, None), "hidden_act": "gelu", "attention_bias": True, "has_sinks": True, "target_hidden_size": 32,
    "num_target_layers": 4, "verifier": Verifier(name_or_path="x"), "input_embedding_scale": 2.0,
    "has_target_scale": True, "output_multiplier": 2.0, "final_logit_softcapping": 30.0, "sample_from_anchor": True,
    "dtype": "float16", "model_type": "llama", "family": "other", "markov": MarkovConfig(rank=4),
    "logit_scale": 2.0,
    "has_confidence": True, "confidence_reads_token": False, "selector": SelectorConfig(rank=4, top_k=2),
    "convolution": ConvolutionConfig(kernel_size=3, group_size=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    target = random_target()
    return random_llm(target, random_draft(target), 3).pair


def with_target(pair: LoadedPair, **changes: Any) -> LoadedPair:
    return replace(pair, target=SimpleNamespace(config=replace(pair.target.config, **changes)))


def with_draft(pair: LoadedPair, **changes: Any) -> LoadedPair:
    assert pair.draft is not None
    return replace(pair, draft=SimpleNamespace(config=replace(pair.draft.config, **changes)))


def test_every_field_of_a_target_counts_or_is_known_not_to_matter(pair: LoadedPair) -> None:
    whole = fingerprint(pair).digest
    names = {item.name for item in fields(TargetConfig)}
    assert names == TARGET_CHANGES.keys()
    silent = {name for name in names if fingerprint(with_target(pair, **{name: TARGET_CHANGES[name]})).digest == whole}
    # Other fields of the fingerprint state the facts of these two.
    assert silent == NOT_IN_TARGET.keys() - {"other_kv_shapes", "own_cache"}


def test_every_field_of_a_draft_counts_or_is_known_not_to_matter(pair: LoadedPair) -> None:
    whole = fingerprint(pair).digest
    names = {item.name for item in fields(DraftConfig)}
    assert names == DRAFT_CHANGES.keys()
    silent = set()
    for name, value in DRAFT_CHANGES.items():
        more = {"causal": (False,) * 3, "windows": (None,) * 3} if name == "num_layers" else {}
        if fingerprint(with_draft(pair, **{name: value}, **more)).digest == whole:
            silent.add(name)
    assert silent == NOT_IN_DRAFT.keys()


NESTED: list[Any] = [
    RopeConfig(theta=10_000.0, kind="yarn", params={"factor": 2.0}),
    RecurrenceConfig(layers=(0, 2), num_key_heads=1, num_value_heads=2, key_size=4, value_size=4, num_taps=4),
    ExpertsConfig(num_experts=4, num_chosen=2, intermediate_size=8, has_normalised_scores=True, layers=(0,)),
    MarkovConfig(rank=4),
    SelectorConfig(rank=4, top_k=2),
    ConvolutionConfig(kernel_size=3, group_size=2),
]
FIELD_OF = {
    RopeConfig: "rope", RecurrenceConfig: "recurrence", ExpertsConfig: "experts", MarkovConfig: "markov",
    SelectorConfig: "selector", ConvolutionConfig: "convolution",
}  # fmt: skip


def other_values(value: Any) -> list[Any]:
    """Other values of a type. Some of them may be out of range."""
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value * 2, value + 2]
        case str():
            return [f"{value}x", "linear", "gated"]
        case tuple():
            return [(*value, 5), value[:-1], (1,)]
        case dict():
            return [{**value, "x": 1.0}]
        case _:
            return [0.5, 2, "x", {"x": 1.0}, (1,)]


def changed_parts() -> Iterator[tuple[Any, str, Any]]:
    """A part of a config, a field's name, and the part with another value of the field, for every field."""
    for part in NESTED:
        for item in fields(part):
            for value in other_values(getattr(part, item.name)):
                with suppress(InvalidConfig, ValueError, TypeError):
                    yield part, item.name, replace(part, **{item.name: value})


CHANGED_PARTS = list(changed_parts())


@pytest.mark.parametrize("part", NESTED, ids=lambda part: type(part).__name__)
def test_every_field_of_every_part_counts(pair: LoadedPair, part: Any) -> None:
    """Ropes, recurrence, routing of experts, and the parts of draft families."""
    field = FIELD_OF[type(part)]
    assert pair.draft is not None
    holders = [(with_target, pair.target.config), (with_draft, pair.draft.config)]
    ways = [change for change, config in holders if hasattr(config, field)]
    cases = [(name, other) for whole, name, other in CHANGED_PARTS if whole is part]
    assert {name for name, _ in cases} == {item.name for item in fields(part)}
    assert ways
    for change in ways:
        whole = fingerprint(change(pair, **{field: part})).digest
        silent = [other for _, other in cases if fingerprint(change(pair, **{field: other})).digest == whole]
        assert not silent


def test_ropes_of_each_kind_of_layer_count(pair: LoadedPair) -> None:
    ropes = {"full_attention": RopeConfig(theta=5.0), "sliding_attention": RopeConfig(theta=7.0)}
    exchanged = dict(zip(ropes, reversed(ropes.values()), strict=True))
    assert fingerprint(with_target(pair, ropes=ropes)).digest != fingerprint(with_target(pair, ropes=exchanged)).digest


def test_a_config_that_transformers_reads_counts(pair: LoadedPair) -> None:
    def hosted(**code_config: Any) -> LoadedPair:
        target = SimpleNamespace(config=pair.target.config, code_config=code_config)
        return replace(pair, target=target)

    found = fingerprint(hosted(residual_multiplier=0.5, _name_or_path="x"))
    assert found.digest == fingerprint(hosted(residual_multiplier=0.5, _name_or_path="y")).digest
    differences = found.differences(fingerprint(hosted(residual_multiplier=0.7)).fields)
    assert differences == {"target config.residual_multiplier": (0.5, 0.7)}
