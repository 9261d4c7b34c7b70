"""The facts of a target: sizes under the names of its type, and types without a decoder."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_runtime.checkpoint.targets.hf_config import read_target_facts
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.errors import CheckpointError, InvalidConfig, UnsupportedError

FILE = Path("target") / "config.json"
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TYPES = recorded_types()
NAMED = {kind: text["names"] for kind, text in TYPES["texts"].items() if SIZES.keys() & text.get("names", {}).keys()}


@pytest.mark.parametrize("kind", NAMED)
def test_sizes_have_the_names_of_their_type(kind: str) -> None:
    config = {NAMED[kind].get(name, name): size for name, size in SIZES.items()}
    facts = read_target_facts({**config, "model_type": kind, "vocab_size": 100}, FILE)
    assert (facts.hidden_size, facts.num_layers, facts.num_heads) == (64, 3, 4)


def test_names_of_other_types_are_not_read() -> None:
    assert len(NAMED) > 20
    with pytest.raises(InvalidConfig) as caught:
        read_target_facts({"emb_dim": 64, "num_hidden_layers": 3, "vocab_size": 100, "model_type": "qwen3"}, FILE)
    assert caught.value.field == "hidden_size"


@pytest.mark.parametrize("kind", TYPES["sizes_elsewhere"])
def test_a_type_with_other_keys_is_refused_not_malformed(kind: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_target_facts({"model_type": kind, "is_encoder_decoder": True}, FILE)
    assert (caught.value.id, caught.value.hint) == ("target-sizes-elsewhere", None)
    with pytest.raises(InvalidConfig):
        read_target_facts({"model_type": "qwen3"}, FILE)


@pytest.mark.slow
def test_no_config_class_of_transformers_has_a_malformed_default() -> None:
    """In both spellings: with all values, and with only the values that differ from the usual ones."""
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != TYPES["transformers"]:
        pytest.skip("the record is of another release")
    malformed, num_read = [], 0
    for kind in sorted(transformers.CONFIG_MAPPING):
        with suppress(Exception):  # a class without defaults
            config = transformers.CONFIG_MAPPING[kind]()
            for uses_diff in (False, True):
                text = json.loads(config.to_json_string(use_diff=uses_diff))
                num_read += 1
                try:
                    read_target_facts({"model_type": kind, **text}, FILE)
                except UnsupportedError:
                    continue
                except CheckpointError as error:
                    malformed.append((kind, error.message))
    assert num_read > 1500
    assert malformed == []


@pytest.mark.parametrize("sizes", [{}, {"vocab_size": None}, {"hidden_size": 64, "num_hidden_layers": {"vision": 5}}])
def test_a_type_without_a_decoder_is_refused_not_malformed(sizes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_target_facts({**sizes, "model_type": "vit"}, FILE)
    assert (caught.value.id, caught.value.field) == ("target-without-causal-model", "model_type")
    with pytest.raises(InvalidConfig):
        read_target_facts({**sizes, "model_type": "qwen3"}, FILE)
