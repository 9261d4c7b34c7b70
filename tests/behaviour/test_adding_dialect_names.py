"""Adding a dialect that renames everything is adding one file too.

No key of the invented dialect is spelled as in this project: each decoder key has a name and a container of its own,
taps are counted down from the target's last layer, the block leaves the anchor out, and causality is a word.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_testing.added_files import Change, check_location, check_return, converted_to, run
from dflash_testing.edits import falsify

PEAK = '''"""Peak drafts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.decoder_body import BODY_FIELDS, write_body
from dflash_cli.formats.dialect import FORMATS, Format, Json, ParsedConfig
from dflash_cli.formats.fields import Keys, Spelling, look_up, shifted, with_keys
from dflash_cli.formats.stated import StatedConfig
from dflash_runtime.checkpoint.targets.hf_config import read_body
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import InvalidConfig

NAMES = {
    "hidden_size": "net.width",
    "intermediate_size": "net.inner",
    "num_hidden_layers": "net.depth",
    "num_attention_heads": "net.heads.queries",
    "num_key_value_heads": "net.heads.groups",
    "head_dim": "net.heads.size",
    "rms_norm_eps": "net.eps",
    "max_position_embeddings": "net.reach",
    "rope_theta": "net.base",
    "vocab_size": "net.words",
    "hidden_act": "net.gate",
    "dtype": "net.number",
    "model_type": "net.like",
}
WRITTEN = ("target_layer_ids", "block_size", "mask_token_id", "causal")
ORDERS = {"forward": True, "both ways": False}


@FORMATS.register("peak")
class Peak(Format):
    name: ClassVar[str] = "peak"
    title: ClassVar[str] = "DFlash, peak dialect"
    priority: ClassVar[int] = 5
    writable: ClassVar[bool] = True
    signs: ClassVar[tuple[str, ...]] = ("peak",)
    containers: ClassVar[tuple[str, ...]] = ("net", "heads", "spec")
    decoder_names: ClassVar[Mapping[str, str]] = NAMES
    keys: ClassVar[Keys] = {
        **{field: tuple(NAMES[key] for key in keys if key in NAMES) for field, keys in BODY_FIELDS.items()},
        "target_layer_ids": ("spec.down",),
        "num_target_layers": ("spec.of",),
        "block_size": ("spec.guesses",),
        "mask_token_id": ("spec.hole",),
        "causal": ("spec.order",),
    }
    spellings: ClassVar[Mapping[str, Spelling]] = {
        "block_size": shifted(-1),
        "causal": Spelling(
            read=lambda value: ORDERS.get(value, value),
            write=lambda value: next((word for word, flag in ORDERS.items() if flag is value), value),
        ),
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

    def spelling_of(self, field: str, config: Mapping[str, Any]) -> Spelling:
        depth = look_up(config, "spec.of")
        if field != "target_layer_ids" or not isinstance(depth, int):
            return super().spelling_of(field, config)

        def turned(value: Any) -> Any:
            return [depth - item for item in value] if isinstance(value, list | tuple) else value

        return Spelling(read=turned, write=turned)

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return "config.json has peak" if "peak" in config else None

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        stated = StatedConfig(self, config)
        values = {field: stated.value(field) for field in WRITTEN}
        if not isinstance(values["causal"], bool):
            raise InvalidConfig(stated.key("causal"), values["causal"], "an order", path=path)
        body = read_body(stated.body, path)
        words = require_int(stated.body, "vocab_size", path)
        return ParsedConfig(
            config=DraftConfig(
                **body,
                vocab_size=words,
                draft_vocab_size=words,
                windows=(None,) * body["num_layers"],
                causal=(values["causal"],) * body["num_layers"],
                block_size=values["block_size"],
                target_layer_ids=tuple(values["target_layer_ids"]),
                mask_token_id=values["mask_token_id"],
                num_target_layers=stated.value("num_target_layers"),
                has_target_scale=True,
                model_type=stated.body.get("model_type", "qwen3"),
            )
        )

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        body = write_body(config)
        decoder = {key: body[name] for name, key in NAMES.items() if name in body}
        stated = StatedConfig(self, with_keys({"peak": 1}, {**decoder, "spec.of": config.num_target_layers}))
        changes = stated.change("causal", config.is_causal)
        for field in WRITTEN[:-1]:
            changes |= stated.change(field, getattr(config, field))
        return with_keys(stated.config, changes)
'''


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundled draft in the peak dialect, while the dialect's file is added."""
    with converted_to("peak", PEAK, tmp_path_factory.mktemp("peak")) as draft:
        yield draft


def test_a_draft_comes_back_from_it_unchanged(converted: Path, tmp_path: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["spec"] == {"down": [6, 4, 3, 2], "of": 6, "guesses": 7, "hole": 3, "order": "both ways"}
    assert config["net"]["heads"] == {"queries": 8, "groups": 2, "size": 32}
    check_return(converted, tmp_path / "back")


@pytest.mark.parametrize("target", [(), ("--target", "tiny")], ids=["alone", "with-target"])
@pytest.mark.parametrize("level", ["headers", "weights"])
def test_a_sound_draft_has_no_findings(converted: Path, target: tuple[str, ...], level: str) -> None:
    assert run("validate", converted, *target, "--level", level)["findings"] == []


@pytest.mark.parametrize(
    ("rule", "location", "change"),
    [
        ("C03", "spec.guesses", lambda config: config["spec"].update(guesses=0)),
        ("C12", "spec.hole", lambda config: config["spec"].update(hole=5000)),
        ("C06", "spec.down[0]", lambda config: config["spec"].update(down=[7, 2])),
        ("C06", "spec.down[1]", lambda config: config["spec"].update(down=[6, 0])),
        ("C18", "spec.order", lambda config: config["spec"].update(order="sideways")),
        ("C22", "net.base", lambda config: config["net"].pop("base")),
        ("C32", "net.width", lambda config: config["net"].pop("width")),
        ("C38", "net.heads.queries", lambda config: config["net"]["heads"].update(queries=7)),
    ],
)
def test_a_fault_is_located_under_its_keys(
    converted: Path, tmp_path: Path, rule: str, location: str, change: Change
) -> None:
    check_location(falsify(converted, tmp_path / "draft", change), rule, location)


def test_a_fault_is_repaired_under_its_keys(converted: Path, tmp_path: Path) -> None:
    draft = falsify(converted, tmp_path / "draft", lambda config: config["net"]["heads"].pop("size"))
    report = run("validate", draft, "--fix-out", tmp_path / "copy")
    assert {"C47", "C32"} <= set(report["repaired"]["fixed"])
    assert report["repaired"]["left"] == []
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["net"]["heads"]["size"] == 32
