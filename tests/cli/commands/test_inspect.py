"""`dflash inspect` on one checkpoint and on two."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.checkpoints.description import describe_layers
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.commands.inspect import inspect
from dflash_runtime.errors import UsageError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses


def test_a_native_draft(tmp_path: Path) -> None:
    outcome = invoke("inspect", support.make_native(tmp_path / "draft"))
    assert outcome.code == 0
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in outcome.out.splitlines() if "  " in line)
    assert lines["kind"].startswith("DFlash, native ")
    assert {name: re.findall(r"\d+", lines[name]) for name in ("block", "tapped", "mask", "rope", "vocabulary")} == {
        "block": ["4", "3"], "tapped": ["0", "2", "4", "0"], "mask": ["31"], "rope": ["1000000", "128"],
        "vocabulary": ["32"],
    }  # fmt: skip
    assert lines["attention"] == describe_layers(open_draft(tmp_path / "draft").config)


def test_a_reduced_speculators_draft(tmp_path: Path) -> None:
    outcome = invoke("inspect", support.make_speculators(tmp_path / "draft", support.REDUCED))
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in outcome.out.splitlines()[1:])
    assert re.findall(r"\d+", lines["vocabulary"]) == ["32", "12"], "ids of the target, and ids that are proposed"
    assert lines["target"] == "acme/target"
    assert lines["not loaded"].startswith("t2d: ")


def test_a_draft_that_is_not_served_is_described(tmp_path: Path) -> None:
    """Commands that run or convert it refuse it. `inspect` shows sizes, taps and block from the config."""
    nested = {**support.native_config()["dflash_config"], "attention_value_scale": 0.612}
    draft = support.write_checkpoint(
        tmp_path / "draft",
        support.native_config(dflash_config=nested, add_swa_attention_sink_bias=True),
        {**support.body_arrays(), "layers.0.self_attn.attention_sink_bias": np.zeros(4, dtype=np.float32)},
    )
    outcome = invoke("inspect", draft)
    assert outcome.code == 0, outcome.err
    unserved = outcome.out.splitlines()[1]
    assert re.findall(r"(\w+ [\w.]+): ", unserved) == [
        "attention_value_scale 0.612",
        "add_swa_attention_sink_bias true",
    ]
    assert re.search(r"^block +4 .* 3 ", outcome.out, re.MULTILINE)
    document = json.loads(invoke("inspect", draft, "--json").out)
    assert list(document["unserved"]) == ["attention_value_scale", "add_swa_attention_sink_bias"]
    assert invoke("convert", draft, tmp_path / "out", "--to", "native").code == 5
    assert invoke("generate", "x", "-d", draft, "-t", support.make_target(tmp_path / "t"), "-n", 2).code == 5


def test_a_target(tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target")
    outcome = invoke("inspect", target)
    assert outcome.code == 0
    assert "model       qwen3" in outcome.out
    document = json.loads(invoke("inspect", target, "--json").out)
    assert (document["role"], document["dialect"], document["config"]["num_layers"]) == ("target", None, 4)


def test_json_has_the_canonical_fields(tmp_path: Path) -> None:
    draft = support.make_speculators(tmp_path / "draft")
    document = json.loads(invoke("inspect", draft, "--json", "--tensors").out)
    assert document["schema_version"] == 1
    assert document["dialect"] == "speculators"
    assert document["config"]["target_layer_ids"] == [0, 2]
    assert document["config"]["num_draft_tokens"] == 3
    arrays = support.body_arrays()
    assert document["num_parameters"] == sum(array.size for array in arrays.values())
    assert document["num_bytes"] == sum(array.nbytes for array in arrays.values())
    assert {entry["name"] for entry in document["tensors"]} == set(arrays)


def test_tensors_are_listed_on_demand(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    assert "fc.weight" not in invoke("inspect", draft).out
    assert "  fc.weight  F32  [16, 32]" in invoke("inspect", draft, "--tensors").out


@pytest.mark.parametrize(
    ("windows", "causal", "expected"),
    [
        ((None, None), False, "all 2 layers: full attention, non-causal"),
        ((16, None), support.REMOVED, "layer 0: window 16, causal; layer 1: full attention, non-causal"),
        ((16, 16), True, "all 2 layers: window 16, causal"),
    ],
)
def test_layers_in_words(tmp_path: Path, windows: tuple[int | None, ...], causal: object, expected: str) -> None:
    draft = support.make_native(tmp_path / "draft", support.Shape(windows=windows), is_causal=causal)
    assert describe_layers(open_draft(draft).config) == expected


class TestTwo:
    def test_equal(self, tmp_path: Path) -> None:
        one, other = support.make_native(tmp_path / "one"), support.make_native(tmp_path / "other")
        assert invoke("inspect", one, other).out.startswith("no difference")

    def test_fields_keys_and_tensors(self, tmp_path: Path) -> None:
        one = support.make_native(tmp_path / "one")
        arrays = support.body_arrays()
        arrays["norm.weight"] = arrays["norm.weight"] + 1
        config = support.native_config(block_size=8, use_cache=True)
        other = support.write_checkpoint(tmp_path / "other", config, arrays)
        outcome = invoke("inspect", one, other)
        assert outcome.code == 0
        assert [line.split(":")[0] for line in outcome.out.splitlines()[:-1]] == [
            "block size", "use_cache", "tensor norm.weight",
        ]  # fmt: skip
        document = json.loads(invoke("inspect", one, other, "--json").out)
        assert (document["fields"], document["carried"]) == ({"block_size": [4, 8]}, {"use_cache": [None, True]})
        assert document["tensors"]["rewritten"] == ["norm.weight"]
        assert document["tensors"]["num_equal"] == int(outcome.out.splitlines()[-1].split()[0]) == 24

    def test_values_in_plain_words(self, tmp_path: Path) -> None:
        """Objects are compared part by part, attention in one line, without Python syntax."""
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        one = support.make_native(tmp_path / "one", support.Shape(theta=10000.0))
        shape = support.Shape(windows=(16, None), taps=(0, 3))
        config = support.native_config(shape, rope_scaling=yarn, is_causal=support.REMOVED)
        other = support.write_checkpoint(tmp_path / "other", config, support.body_arrays(shape))
        text = invoke("inspect", one, other).out
        *lines, equal = text.splitlines()
        values = [re.findall(r"\d[\d, ]*\d|\d|yarn|default", line.partition(":")[2]) for line in lines]
        assert values == [["2"], ["0", "16", "1"], ["10000", "1000000"], ["default", "yarn"], ["4"], ["32"],
                          ["0, 2", "0, 3"]]  # fmt: skip
        assert equal.startswith("25 ")
        assert not set("[]{}'_") & set(text)

    def test_the_target_that_each_names(self, tmp_path: Path) -> None:
        one, other = support.make_native(tmp_path / "one"), support.make_speculators(tmp_path / "other")
        *lines, _ = invoke("inspect", one, other).out.splitlines()
        assert len(lines) == 3
        for value in ("acme/target", "Qwen3ForCausalLM", " 4 "):
            assert [value in line for line in lines].count(True) == 1

    def test_a_long_group_of_tensors_is_one_line_unless_all_are_asked_for(self, tmp_path: Path) -> None:
        one = support.make_native(tmp_path / "one")
        arrays = {name: array + 1 for name, array in support.body_arrays().items()}
        other = support.write_checkpoint(tmp_path / "other", support.native_config(), arrays)
        first, *names = sorted(arrays)
        changed, equal = invoke("inspect", one, other).out.splitlines()
        assert changed.startswith(f"{len(arrays)} tensors ")
        assert f": {first}, {names[0]}, {names[1]}, ... (--tensors " in changed
        assert equal.startswith("0 ")
        lines = invoke("inspect", one, other, "--tensors").out.splitlines()
        assert {f"tensor {name}" for name in arrays} == {line.split(":")[0] for line in lines[:-1]}

    def test_tensors_of_another_shape(self, tmp_path: Path) -> None:
        one = support.make_native(tmp_path / "one")
        other = support.make_native(tmp_path / "other", support.Shape(taps=(0, 1, 2)))
        lines = invoke("inspect", one, other).out.splitlines()
        (line,) = (line for line in lines if line.startswith("tensor fc.weight: "))
        assert re.findall(r"F32 \[.*?\]", line) == ["F32 [16, 32]", "F32 [16, 48]"]

    def test_across_dialects(self, tmp_path: Path) -> None:
        one = support.make_native(tmp_path / "one")
        other = support.make_speculators(tmp_path / "other", support.REDUCED)
        document = json.loads(invoke("inspect", one, other, "--json").out)
        assert document["dialects"] == ["native", "speculators"]
        assert document["fields"].keys() == {"draft_vocab_size", "num_target_layers", "verifier"}
        assert set(document["tensors"]["only_second"]) == {"lm_head.weight", "d2t", "t2d"}
        assert document["tensors"]["num_equal"] == 25

    def test_a_draft_and_a_target_do_not_compare(self, tmp_path: Path) -> None:
        outcome = invoke("inspect", support.make_native(tmp_path / "a"), support.make_target(tmp_path / "b"))
        assert (outcome.code, outcome.error_id, outcome.field) == (2, "kinds-differ", "REF2")


def test_the_memory_of_a_pair() -> None:
    """2 requests of 100 tokens take 7 pages each, and page 0 is never used."""
    arguments = ("inspect", "tiny", "--target", "tiny", "--max-model-len", 100, "--concurrency", 2)
    found = json.loads(invoke(*arguments, "--gpu-memory", "1GiB", "--json").out)
    assert (found["kind"], found["num_pages"], found["page_size"]) == ("inspect", 15, 16)
    assert found["total_bytes"] == sum(found["parts"].values())
    assert found["gpu"]["gpu_bytes"] == 2**30
    lines = invoke(*arguments).out.splitlines()
    rows = [line.split(maxsplit=1) for line in lines]
    assert [label for label, _ in rows].count("part") == sum(size > 0 for size in found["parts"].values())
    assert not any(label == "fits" for label, _ in rows), "no GPU was named"
    hybrid = ROOT / "tests" / "data" / "pairs" / "hybrid"
    text = invoke("inspect", hybrid / "draft", "-t", hybrid / "target", "--gpu-memory", "1G").out
    assert {"states", "fits"} <= {line.split(maxsplit=1)[0] for line in text.splitlines()}


@pytest.mark.parametrize(
    ("options", "field", "id"),
    [
        ({"max_model_len": 100}, "--max-model-len", "option-needs-another"),
        ({"concurrency": 2}, "--concurrency", "option-needs-another"),
        ({"kv_dtype": "fp8"}, "--kv-dtype", "option-needs-another"),
        ({"gpu_memory": 2**30}, "--gpu-memory", "option-needs-another"),
        ({"other": "tiny:reduced", "target": "tiny"}, "REF2", "memory-of-one-pair"),
        ({"tensors": True, "target": "tiny"}, "--tensors", "memory-of-one-pair"),
    ],
)
def test_options_of_the_memory_estimate_are_refused(options: dict[str, Any], field: str, id: str) -> None:
    with refuses(UsageError, id, field=field):
        inspect(reference="tiny", **options)


def test_more_tokens_than_the_pair_allows_are_refused() -> None:
    with refuses(UsageError, field="max_model_len", found=4096) as refused:
        inspect(reference="tiny", target="tiny", max_model_len=4096)
    assert "2048" in str(refused.value.expected)
