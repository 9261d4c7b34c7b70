"""DFlash 2 and DSpark through every command, in both dialects: plain text, one acceptance, one verdict per engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_testing import checkpoints as support
from dflash_testing.checkpoints import REDUCED, SMALL, Shape
from dflash_testing.command_line import Outcome, invoke
from dflash_testing.families import FAMILIES, write_draft

ENGINES = "vllm,sglang,llama.cpp,transformers"
SERVED = {
    "dflash2": {"vllm", "sglang", "llama.cpp", "transformers"},
    "dflash2-speculators": {"vllm"},
    "dspark": {"vllm", "sglang", "llama.cpp"},
    "dspark-speculators": {"vllm", "llama.cpp"},
}
"""Dialect -> the engines that serve the draft in their newest release."""

METHODS = {"dflash2": ("dflash", 3), "dspark": ("dspark", 4)}
"""Family -> the name of its way of drafting, and the number of draft tokens of a block of 4 rows."""


class Pair:
    """A tiny draft of a family, and its target."""

    def __init__(self, folder: Path, name: str, shape: Shape = SMALL, **changes: Any) -> None:
        self.folder, self.name, self.family = folder, name, name.partition("-")[0]
        self.draft = write_draft(folder / "dflash-draft", FAMILIES[name](shape, **changes), shape)
        self.target = support.make_target(folder / "target", shape)
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text("".join(f'{{"prompt_token_ids": [4, 5, 6, {last}]}}\n' for last in (7, 8, 9)))

    def run(self, command: str, *words: object, draft: object = None) -> Outcome:
        which = () if draft == "none" else ("-d", draft or self.draft)
        done = invoke(command, *which, "-t", self.target, "-p", self.prompts, *words)
        assert done.code == 0, done.err
        return done

    def rows(self, *words: object, draft: object = None) -> list[dict[str, Any]]:
        lines = self.run("generate", "-o", "-", "-n", 8, "--ignore-eos", *words, draft=draft).out.splitlines()
        return [json.loads(line) for line in lines]


def converted(pair: Pair, to: str) -> Path:
    out = pair.folder / to
    done = invoke("convert", pair.draft, out, "--to", to, "--target", pair.target, "--target-name", "acme/t")
    assert done.code == 0, done.err
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_the_targets_and_every_dialect_drafts_alike(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name)
    own, plain = pair.rows(), pair.rows("-k", 0, draft="none")
    assert [row["token_ids"] for row in own] == [row["token_ids"] for row in plain]
    for to in ("native", "speculators", "vllm", "sglang"):
        other = pair.rows(draft=converted(pair, to))
        assert [row["acceptance_lengths"] for row in other] == [row["acceptance_lengths"] for row in own], to


@pytest.mark.parametrize("layout", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_head_in_both_layouts(kind: str, layout: bool, tmp_path: Path) -> None:
    pair = Pair(tmp_path, "dspark", markov_head_type=kind, sample_from_anchor=layout)
    own = pair.rows()
    assert [row["token_ids"] for row in own] == [row["token_ids"] for row in pair.rows("-k", 0, draft="none")]
    other = pair.rows(draft=converted(pair, "speculators"))
    assert [row["acceptance_lengths"] for row in other] == [row["acceptance_lengths"] for row in own]
    described = json.loads(invoke("inspect", pair.draft, "--json").out)["config"]
    assert (described["num_draft_tokens"], described["markov"]["head_type"]) == (4 if layout else 3, kind)


def test_a_reduced_vocabulary_of_dspark_runs(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "dspark-speculators", REDUCED)
    assert [row["token_ids"] for row in pair.rows()] == [row["token_ids"] for row in pair.rows("-k", 0, draft="none")]


@pytest.mark.parametrize("name", FAMILIES)
def test_acceptance_is_measured(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name)
    found = json.loads(pair.run("eval-acceptance", "-n", 8, "--ignore-eos", "--json").out)
    assert found["settings"]["num_speculative_tokens"] == METHODS[pair.family][1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_right_draft_has_no_finding_at_any_level(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name)
    for level in ("headers", "weights"):
        done = invoke("validate", pair.draft, "--target", pair.target, "--level", level, "--json")
        assert done.code == 0, done.out
        findings = json.loads(done.out)["findings"]
        assert [item for item in findings if item["severity"] != "info" and item["id"] != "N33"] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_engines_that_serve_it_get_a_command(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name)
    report = json.loads(invoke("validate", pair.draft, "-t", pair.target, "--engine", ENGINES, "--json").out)
    verdicts = {item["engine"].split()[0]: item["outcome"] for item in report["verdicts"]}
    assert {engine for engine, outcome in verdicts.items() if outcome == "serves"} == SERVED[name]
    assert {engine for engine, outcome in verdicts.items() if outcome == "stops"} == verdicts.keys() - SERVED[name]
    method, number = METHODS[pair.family]
    words = {
        "vllm": (f'"method": "{method}"', f'"num_speculative_tokens": {number}'),
        "sglang": (f"--speculative-algorithm {method.upper()}", f"--speculative-num-draft-tokens {number + 1}"),
        "llama.cpp": (f"--spec-type draft-{method}", f"--spec-draft-n-max {number}"),
        "transformers": (f"block_size={number + 1}",),
    }
    if method == "dspark":  # SGLang stops if this option is absent and the config's block_size is another number
        words["sglang"] += (f"--speculative-dspark-block-size {number}",)
    for engine in SERVED[name]:
        done = invoke("serve-command", pair.draft, "--target", pair.target, "--engine", engine)
        assert done.code == 0, done.err
        assert all(word in done.out for word in words[engine]), done.out
    smaller = invoke("serve-command", pair.draft, "--target", pair.target, "--engine", "vllm", "-k", 2)
    assert '"num_speculative_tokens": 2' in smaller.out
    larger = invoke("serve-command", pair.draft, "--target", pair.target, "--engine", "vllm", "-k", number + 1)
    assert (larger.code, larger.error_id) == (2, "too-many-drafts")


@pytest.mark.parametrize(
    ("name", "release", "outcome"),
    [
        ("dflash2", "0.27", "stops"), ("dflash2", "0.28", "serves"),
        ("dflash2-speculators", "0.28", "stops"), ("dflash2-speculators", "0.29", "serves"),
        ("dspark", "0.24", "stops"), ("dspark", "0.25", "serves"),
        ("dspark-speculators", "0.24", "stops"), ("dspark-speculators", "0.26", "drops"),
        ("dspark-speculators", "0.27", "serves"),
    ],
)  # fmt: skip
def test_a_release_of_vllm_serves_what_its_code_has(name: str, release: str, outcome: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name)
    done = invoke("validate", pair.draft, "-t", pair.target, "--engine", f"vllm@{release}", "--json")
    (verdict,) = json.loads(done.out)["verdicts"]
    assert verdict["outcome"] == outcome, done.out


def test_a_corrected_copy_states_every_key_where_engines_look(tmp_path: Path) -> None:
    """SpecForge publishes DSpark with nested keys, where neither vLLM nor SGLang finds them."""
    config = FAMILIES["dspark"]()
    keys = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
            "sample_from_anchor")  # fmt: skip
    config["dflash_config"] |= {key: config.pop(key) for key in keys}
    draft = write_draft(tmp_path / "draft", config)
    target, out = support.make_target(tmp_path / "target"), tmp_path / "out"
    before = invoke("validate", draft, "-t", target, "--engine", "vllm,sglang", "--json")
    assert {item["outcome"] for item in json.loads(before.out)["verdicts"]} == {"stops"}
    invoke("validate", draft, "-t", target, "--engine", "vllm,sglang", "--fix-out", out)
    after = invoke("validate", out, "-t", target, "--engine", "vllm,sglang", "--json")
    assert {item["outcome"] for item in json.loads(after.out)["verdicts"]} == {"serves"}, after.out
