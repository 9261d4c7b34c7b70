"""The facts of a target: sizes under the names of its type, and types without a decoder."""

from pathlib import Path

import pytest

from dflash_runtime.checkpoint.targets.hf_config import read_target_facts
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.errors import InvalidConfig, UnsupportedError

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


@pytest.mark.parametrize("sizes", [{}, {"vocab_size": None}, {"hidden_size": 64, "num_hidden_layers": {"vision": 5}}])
def test_a_type_without_a_decoder_is_refused_not_malformed(sizes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_target_facts({**sizes, "model_type": "vit"}, FILE)
    assert (caught.value.id, caught.value.field) == ("target-without-causal-model", "model_type")
    with pytest.raises(InvalidConfig):
        read_target_facts({**sizes, "model_type": "qwen3"}, FILE)
