"""Adding a dialect is adding one file: an invented dialect goes through every command that takes a draft.

The invented dialect shares only the decoder's keys with this project's dialects, and holds them in a container. It
counts layers from 1, leaves the anchor out of the block, nests the mask token, and states causality inverted.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_cli.diagnosis import alternatives
from dflash_testing.added_files import Change, check_location, check_return, converted_to, run, run_with
from dflash_testing.command_line import invoke
from dflash_testing.edits import falsify
from dflash_testing.searches import shorten_search

TOY = '''"""Toy drafts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.decoder_body import BODY_FIELDS, BODY_KEYS, carried_keys, plain_keys, write_body
from dflash_cli.formats.dialect import FORMATS, Format, Json, ParsedConfig
from dflash_cli.formats.fields import Keys, Spelling, shifted, with_keys
from dflash_cli.formats.stated import StatedConfig
from dflash_runtime.checkpoint.targets.hf_config import read_body, read_windows
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import InvalidConfig, LossyConversion

WRITTEN = ("target_layer_ids", "num_target_layers", "block_size", "mask_token_id")


def inverted(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


@FORMATS.register("toy")
class Toy(Format):
    name: ClassVar[str] = "toy"
    title: ClassVar[str] = "DFlash, toy dialect"
    priority: ClassVar[int] = 5
    writable: ClassVar[bool] = True
    signs: ClassVar[tuple[str, ...]] = ("toy_version",)
    containers: ClassVar[tuple[str, ...]] = ("taps", "drafting", "mask", "decoder")
    body: ClassVar[str] = "decoder."
    keys: ClassVar[Keys] = {
        **{field: tuple(f"decoder.{key}" for key in keys) for field, keys in BODY_FIELDS.items()},
        "target_layer_ids": ("taps.after_layers",),
        "num_target_layers": ("taps.of",),
        "block_size": ("drafting.proposals",),
        "mask_token_id": ("drafting.mask.token",),
        "causal": ("sees_later_positions",),
    }
    spellings: ClassVar[Mapping[str, Spelling]] = {
        "target_layer_ids": shifted(1),
        "block_size": shifted(-1),
        "causal": Spelling(read=inverted, write=inverted),
    }
    unstated: ClassVar[frozenset[str]] = frozenset(
        {
            "verifier",
            "target_hidden_size",
            "has_sinks",
            "input_embedding_scale",
            "output_multiplier",
            "final_logit_softcapping",
        }
    )

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return "config.json has toy_version" if "toy_version" in config else None

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        stated = StatedConfig(self, config)
        values = {field: stated.value(field) for field in (*WRITTEN, "causal")}
        for field, value in values.items():
            if value is None:
                raise InvalidConfig(stated.key(field), value, "a value", path=path)
        body = read_body(stated.body, path)
        return ParsedConfig(
            config=DraftConfig(
                **body,
                vocab_size=require_int(stated.body, "vocab_size", path),
                draft_vocab_size=require_int(stated.body, "vocab_size", path),
                windows=read_windows(stated.body, body["num_layers"], path),
                causal=(values["causal"],) * body["num_layers"],
                block_size=values["block_size"],
                target_layer_ids=tuple(values["target_layer_ids"]),
                mask_token_id=values["mask_token_id"],
                num_target_layers=values["num_target_layers"],
                has_target_scale=True,
                model_type=stated.body.get("model_type", "qwen3"),
            ),
            carried=carried_keys(stated.body, BODY_KEYS),
        )

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        if config.is_causal is None:
            raise LossyConversion("causality that differs between layers")
        stated = StatedConfig(self, {"toy_version": 1, "decoder": {**plain_keys(carried), **write_body(config)}})
        changes = stated.change("causal", config.is_causal)
        for field in WRITTEN:
            changes |= stated.change(field, getattr(config, field))
        return with_keys(stated.config, changes)
'''

ROPE = ("rope_theta", "rope_parameters")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundled draft in the toy dialect, while the toy's file is added."""
    with converted_to("toy", TOY, tmp_path_factory.mktemp("toy")) as draft:
        yield draft


def test_it_is_listed_and_inspected(converted: Path) -> None:
    assert "toy" in invoke("convert", "--help").out
    found, bundled = run("inspect", converted), run("inspect", "tiny")
    assert (found["dialect"], bundled["dialect"]) == ("toy", "native")
    assert found["config"] == bundled["config"]


def test_a_process_of_its_own_finds_it(converted: Path) -> None:
    outcome = run_with("dflash_cli.formats", converted.parent, "inspect", converted, "--json")
    assert json.loads(outcome.out)["dialect"] == "toy"


def test_a_draft_comes_back_from_it_unchanged(converted: Path, tmp_path: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["taps"] == {"after_layers": [1, 3, 4, 5], "of": 6}
    assert config["drafting"] == {"proposals": 7, "mask": {"token": 3}}
    assert config["sees_later_positions"] is True
    check_return(converted, tmp_path / "back")


def test_the_manifest_says_where_each_key_went(converted: Path) -> None:
    changes = {item["from"]: item for item in json.loads((converted / "conversion.json").read_text())["config"]}
    moved = {
        "dflash_config.target_layer_ids": ("taps.after_layers", "derived"),
        "dflash_config.mask_token_id": ("drafting.mask.token", "renamed"),
        "hidden_size": ("decoder.hidden_size", "moved"),
    }
    assert {key: (changes[key]["to"], changes[key]["change"]) for key in moved} == moved


@pytest.mark.parametrize("target", [(), ("--target", "tiny")], ids=["alone", "with-target"])
@pytest.mark.parametrize("level", ["headers", "weights"])
def test_a_sound_draft_has_no_findings(converted: Path, target: tuple[str, ...], level: str) -> None:
    report = run("validate", converted, *target, "--level", level)
    assert (report["dialect"], report["findings"]) == ("toy", [])


def test_engines_that_do_not_read_it_are_named(converted: Path) -> None:
    engines = {"vllm", "transformers", "sglang", "llama.cpp"}
    report = run("validate", converted, "--engine", ",".join(engines), code=3)
    assert {verdict["outcome"] for verdict in report["verdicts"]} == {"stops"}
    assert {item["location"] for item in report["findings"]} == {"config.json:toy_version"}
    assert {engine for item in report["findings"] for engine in item["engines"]} == engines


@pytest.mark.parametrize(
    ("rule", "location", "change"),
    [
        ("C03", "drafting.proposals", lambda config: config["drafting"].pop("proposals")),
        ("C03", "drafting.proposals", lambda config: config["drafting"].update(proposals=0)),
        ("C12", "drafting.mask.token", lambda config: config["drafting"]["mask"].update(token=5000)),
        ("C05", "taps.after_layers", lambda config: config["taps"].pop("after_layers")),
        ("C06", "taps.after_layers[0]", lambda config: config["taps"].update(after_layers=[0, 2])),
        ("C06", "taps.after_layers[1]", lambda config: config["taps"].update(after_layers=[1, 7])),
        ("C18", "sees_later_positions", lambda config: config.update(sees_later_positions="no")),
        ("C22", "decoder.rope_theta", lambda config: [config["decoder"].pop(key) for key in ROPE]),
        ("C38", "decoder.num_attention_heads", lambda config: config["decoder"].update(num_attention_heads=7)),
    ],
)
def test_a_fault_is_located_under_its_keys(
    converted: Path, tmp_path: Path, rule: str, location: str, change: Change
) -> None:
    check_location(falsify(converted, tmp_path / "draft", change), rule, location)


def test_a_fault_is_repaired_under_its_keys(converted: Path, tmp_path: Path) -> None:
    draft = falsify(converted, tmp_path / "draft", lambda config: config["decoder"].pop("head_dim"))
    report = run("validate", draft, "--fix-out", tmp_path / "copy")
    assert report["repaired"]["dialect"] == "toy"
    assert {"C47", "C32"} <= set(report["repaired"]["fixed"])
    assert report["repaired"]["left"] == []
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["decoder"]["head_dim"] == 32


def test_it_accepts_as_much_as_the_draft_it_was_made_from(converted: Path) -> None:
    options = ("--target", "tiny", "--num-prompts", 4, "-n", 24, "--device", "cpu")
    made, bundled = run("eval-acceptance", converted, *options), run("eval-acceptance", "tiny", *options)
    assert made["num_accepted_tokens"] == bundled["num_accepted_tokens"] > 0
    assert made["acceptance_len"] == bundled["acceptance_len"]


def test_a_wrong_value_is_diagnosed_under_its_key(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_search(monkeypatch, "taps")
    monkeypatch.setattr(alternatives, "FAMILIES", alternatives.FAMILIES[:1])
    draft = falsify(converted, tmp_path / "draft", lambda config: config["taps"].update(after_layers=[2, 4, 5, 6]))
    options = ("--target", "tiny", "--num-prompts", 8, "-n", 32, "--device", "cpu")
    found = run("diagnose", draft, *options, code=3)
    (finding,) = [item for item in found["report"]["findings"] if item["id"] == found["rule"]]
    assert (found["rule"], finding["location"]) == ("R01", "config.json:taps.after_layers")
    assert "[1, 3, 4, 5]" in found["sentence"]


def test_without_the_file_there_is_no_such_dialect(tmp_path: Path) -> None:
    outcome = run_with("dflash_cli.formats", tmp_path, "convert", "tiny", tmp_path / "out", "--to", "toy")
    assert outcome.code == 2
