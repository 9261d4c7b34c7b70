"""CONTRIBUTING.md, "Adding": a target family and a draft family are one file each, and every command takes them.

Each test writes its toy into a folder that it adds to the package, and removes it afterwards.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import dflash_cli.formats
import dflash_runtime.drafts
import dflash_runtime.models.families
from dflash_cli.checkpoints.opening import open_target
from dflash_cli.formats.dialect import FORMATS, all_formats
from dflash_runtime.checkpoint.layout import LAYOUTS
from dflash_runtime.drafts.draft import DRAFTS, draft_families
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.target import TARGETS, target_families
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_runtime.registry import Registry
from dflash_testing import checkpoints as support
from dflash_testing.added_files import run
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses
from dflash_testing.searches import shorten_search

Add = Callable[[ModuleType, str], None]

TARGET = '''
"""A target that continues with the next id: row i of its head is the embedding of id i - 1."""

import torch
from torch.nn import functional

from dflash_runtime.models.layers import Linear
from dflash_runtime.models.target import TARGETS


@TARGETS.register("toy")
class ToyTarget:
    embedding_scale = 1.0
    follows_from_shapes = True

    def __init__(self, config, weights, placement):
        self.config = config
        self.embedding = weights["table"]
        self.head = Linear(self.embedding.roll(1, dims=0))

    def __call__(self, token_ids, positions, attend, taps, wanted=None):
        hidden = functional.embedding(token_ids, self.embedding)
        features = torch.cat([hidden for _ in taps], dim=-1) if taps else None
        return hidden if wanted is None else hidden[wanted], features

    @staticmethod
    def expected_shapes(config):
        return {"table": (config.vocab_size, config.hidden_size)}
'''

READS_ITS_CONFIG = (
    TARGET
    + """
    @staticmethod
    def read_config(config, path):
        from dflash_runtime.checkpoint.targets.hf_config import read_target_config

        return read_target_config({key: value for key, value in config.items() if key != "num_local_experts"}, path)
"""
)

DRAFT = '''
"""A draft that counts on from the anchor in steps of the one number in its file."""

import torch
from torch.nn import functional

from dflash_runtime.checkpoint.layout import LAYOUTS
from dflash_runtime.drafts.draft import DRAFTS


@LAYOUTS.register("toy")
def toy_shapes(config):
    return {"step": (1,)}


@DRAFTS.register("toy")
class ToyDraft:
    target_ids = None

    def __init__(self, config, weights, target, placement):
        self.config = config
        self.step = weights["step"].long()

    def write_context(self, features, positions, cache, slots):
        assert features.shape[-1] == self.config.num_taps * self.config.feature_size

    def logits(self, block_ids, positions, attend, num_drafts=None):
        ahead = torch.arange(1, block_ids.shape[1])[:num_drafts] * self.step
        ids = (block_ids[:, :1] + ahead) % self.config.vocab_size
        return functional.one_hot(ids, self.config.vocab_size).float()
'''

DIALECT = '''
"""The native dialect with the key `toy`, which says that the draft is of the toy family."""

from dataclasses import replace

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import Native


@FORMATS.register("toy")
class Toy(Native):
    name = "toy"
    title = "toy"
    priority = 1
    family = "toy"

    def evidence(self, config, tensor_names):
        return "config.json has toy" if config.get("toy") else None

    def read_config(self, config, path):
        plain = {key: value for key, value in config.items() if key != "toy"}
        reading = super().read_config(plain, path)
        return replace(reading, config=replace(reading.config, family=self.family))

    def write_config(self, config, carried):
        return {**super().write_config(config, carried), "toy": True}
'''

BARE_DIALECT = '''
"""Toy drafts without the keys of a decoder and without a mask token, but with a field of their own."""

from dataclasses import dataclass

from dflash_cli.formats.decoder_body import BODY_FIELDS
from dflash_cli.formats.dialect import FORMATS, Format, ParsedConfig
from dflash_cli.formats.fields import shifted
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.draft_config import DraftConfig


@dataclass(frozen=True, kw_only=True)
class ToyConfig(DraftConfig):
    stride: int


@FORMATS.register("toy")
class Toy(Format):
    name = "toy"
    title = "toy"
    family = "toy"
    priority = 1
    writable = True
    signs = ("toy",)
    containers = ("toy",)
    keys = {
        "block_size": ("toy.ahead",),
        "target_layer_ids": ("toy.taps",),
        "num_target_layers": ("toy.of",),
        "hidden_size": ("toy.width",),
        "vocab_size": ("toy.words",),
    }
    spellings = {"block_size": shifted(-1)}
    unstated = frozenset({*BODY_FIELDS, "mask_token_id", "verifier"})

    def evidence(self, config, tensor_names):
        return "config.json has toy" if "toy" in config else None

    def read_config(self, config, path):
        toy = config["toy"]
        return ParsedConfig(
            config=ToyConfig(
                hidden_size=toy["width"], intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2,
                rms_norm_eps=1.0, max_position_embeddings=64, rope=RopeConfig(theta=1.0), block_size=toy["ahead"] + 1,
                target_layer_ids=tuple(toy["taps"]), mask_token_id=0, vocab_size=toy["words"],
                draft_vocab_size=toy["words"], causal=(False,), windows=(None,), num_target_layers=toy["of"],
                family="toy", stride=toy["stride"],
            )
        )

    def write_config(self, config, carried):
        return {
            "toy": {
                "ahead": config.num_draft_tokens, "taps": list(config.target_layer_ids),
                "of": config.num_target_layers, "stride": config.stride, "width": config.hidden_size,
                "words": config.vocab_size,
            }
        }
'''
BARE_SIZES = {"width": support.SMALL.hidden, "words": support.SMALL.vocab}

COUNTED = [4, 5, 6, 7, 8, 9, 10, 11, 12]
"""The toy target's nine tokens after the prompt [7, 3]."""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Return a function that adds a file to a package, and restore the registries after the test."""
    finders = (all_formats, draft_families, target_families)
    packages: list[ModuleType] = []
    registries: tuple[Registry[object], ...] = (FORMATS, DRAFTS, LAYOUTS, TARGETS)  # type: ignore[assignment]
    for find in finders:
        find()
        find.cache_clear()
    for registry in registries:
        monkeypatch.setattr(registry, "_items", dict(registry._items))

    def write(package: ModuleType, source: str) -> None:
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "added_toy.py").write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        packages.append(package)
        for find in finders:
            find.cache_clear()

    yield write
    monkeypatch.undo()
    for package in packages:
        sys.modules.pop(f"{package.__name__}.added_toy", None)
        vars(package).pop("added_toy", None)
    for find in finders:
        find.cache_clear()


def make_target(path: Path, **changes: Any) -> Path:
    table = np.random.default_rng(0).standard_normal((support.SMALL.vocab, support.SMALL.hidden)).astype(np.float32)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    return support.write_checkpoint(path, support.target_config(model_type="toy", **changes), {"table": table})


def make_draft(path: Path, step: int) -> Path:
    config = support.native_config(toy=True)
    return support.write_checkpoint(path, config, {"step": np.array([step], dtype=np.float32)})


def make_wrong_draft(path: Path) -> Path:
    """Write a DFlash draft that proposes the token least like the one it read last: none is ever accepted."""
    arrays = support.body_arrays()
    return support.write_checkpoint(path, support.native_config(), arrays | {"norm.weight": -arrays["norm.weight"]})


def generate(tmp_path: Path, *options: object) -> dict[str, list[int]]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [7, 3]}\n')
    outcome = invoke(
        "generate", "--prompts", prompts, "--output", "-", "-n", 9, "--ignore-eos", "--device", "cpu", *options
    )
    assert outcome.code == 0, outcome.err
    row: dict[str, list[int]] = json.loads(outcome.out)
    return row


def check_commands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draft: Path,
    target: Path,
    acceptance_len: float,
    causes: list[str],
) -> None:
    """Take a sound pair through the commands: none but `diagnose` finds a fault, and only the rules in `causes`."""
    pair = (draft, "--target", target)
    for level in ("headers", "weights"):
        report = run("validate", *pair, "--level", level)
        assert report["findings"] == [], report["findings"]
    row = generate(tmp_path, "--draft", draft, "--target", target)
    assert row["token_ids"] == COUNTED
    measured = ("--prompts", tmp_path / "prompts.jsonl", "--device", "cpu", "-n", 9, "--ignore-eos")
    assert run("eval-acceptance", *pair, *measured)["acceptance_len"] == acceptance_len
    few = ("--device", "cpu", "--num-prompts", 4, "-n", 12)
    shorten_search(monkeypatch, "taps")
    diagnosis = run("diagnose", *pair, *few, code=3 if causes else 0)
    assert [finding["id"] for finding in diagnosis["report"]["findings"]] == causes
    assert (diagnosis["has_cause"], diagnosis["rule"]) == (False, causes[0] if causes else None)


def test_a_target_family_is_one_file(tmp_path: Path, add: Add) -> None:
    target = make_target(tmp_path / "target")
    refused = invoke("generate", "hello", "--target", target, "-k", 0)
    assert refused.code == 5
    assert "toy" in refused.err
    add(dflash_runtime.models.families, TARGET)
    assert generate(tmp_path, "--target", target, "-k", 0)["token_ids"] == COUNTED


@pytest.mark.parametrize("source", [TARGET, READS_ITS_CONFIG], ids=["common keys", "own keys"])
def test_a_target_family_may_read_its_own_keys(tmp_path: Path, add: Add, source: str) -> None:
    """Without `read_config`, a key that states experts is refused."""
    add(dflash_runtime.models.families, source)
    target = make_target(tmp_path / "target", num_local_experts=4)
    if source == TARGET:
        with refuses(UnsupportedError, "target-not-run", found="toy") as refused:
            find_target_runtime(open_target(target), "native")
        assert "num_local_experts" in refused.value.message
    else:
        assert generate(tmp_path, "--target", target, "-k", 0)["token_ids"] == COUNTED


def test_every_command_takes_a_target_of_the_new_family(
    tmp_path: Path, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(dflash_runtime.models.families, TARGET)
    target = make_target(tmp_path / "target")
    described = run("inspect", target)
    assert (described["role"], described["config"]["model_type"]) == ("target", "toy")
    draft = make_wrong_draft(tmp_path / "draft")
    check_commands(tmp_path, monkeypatch, draft, target, acceptance_len=1.0, causes=["R06"])


@pytest.mark.parametrize(("step", "lengths"), [(1, [4, 4]), (2, [1] * 8)])
def test_a_draft_family_is_one_file_and_a_dialect_that_names_it(
    tmp_path: Path, add: Add, step: int, lengths: list[int]
) -> None:
    """Steps of one are always right and steps of two always wrong. The text is the target's either way."""
    add(dflash_runtime.models.families, TARGET)
    add(dflash_cli.formats, DIALECT)
    pair = ("--target", make_target(tmp_path / "target"), "--draft", make_draft(tmp_path / "draft", step))
    refused = invoke("generate", "hello", *pair)
    assert refused.code == 5
    assert "toy" in refused.err
    add(dflash_runtime.drafts, DRAFT)
    row = generate(tmp_path, *pair)
    assert row["token_ids"] == COUNTED
    assert row["acceptance_lengths"] == lengths


def test_every_command_takes_a_draft_of_the_new_family(
    tmp_path: Path, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, source in (
        (dflash_runtime.models.families, TARGET),
        (dflash_cli.formats, DIALECT),
        (dflash_runtime.drafts, DRAFT),
    ):
        add(package, source)
    target, draft = make_target(tmp_path / "target"), make_draft(tmp_path / "draft", 1)
    described = run("inspect", draft)
    assert (described["dialect"], described["config"]["family"]) == ("toy", "toy")
    assert described["num_parameters"] == 1
    run("convert", draft, tmp_path / "copy", "--to", "toy")
    support.assert_same_tensors(draft, tmp_path / "copy")
    check_commands(tmp_path, monkeypatch, tmp_path / "copy", target, acceptance_len=4.0, causes=[])


@pytest.mark.parametrize("options", [(), ("--verify", "none"), ("--dry-run",)], ids=["verified", "unverified", "dry"])
def test_a_draft_of_another_family_is_not_converted_to_a_dialect_without_it(
    tmp_path: Path, add: Add, options: tuple[str, ...]
) -> None:
    add(dflash_cli.formats, DIALECT)
    add(dflash_runtime.drafts, DRAFT)
    for source, dialect, family in (("toy", "native", "toy"), ("dflash", "toy", "dflash")):
        draft = make_draft(tmp_path / source, 1) if source == "toy" else support.make_native(tmp_path / source)
        outcome = invoke("convert", draft, tmp_path / "out", "--to", dialect, *options)
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "other-family", "family")
        assert outcome.error is not None
        assert (outcome.error.path, outcome.error.found) == (draft / "config.json", family)
        assert ("--to toy" in str(outcome.error.hint)) == (source == "toy")
        assert not (tmp_path / "out").exists()


def test_a_family_may_have_neither_decoder_nor_mask_and_fields_of_its_own(tmp_path: Path, add: Add) -> None:
    for package, source in (
        (dflash_runtime.models.families, TARGET),
        (dflash_cli.formats, BARE_DIALECT),
        (dflash_runtime.drafts, DRAFT.replace('weights["step"].long()', "config.stride")),
    ):
        add(package, source)
    target, draft = make_target(tmp_path / "target"), tmp_path / "draft"
    config = {"toy": {"ahead": 3, "taps": [0, 1], "of": support.SMALL.target_layers, "stride": 1, **BARE_SIZES}}
    support.write_checkpoint(draft, config, {"step": np.ones(1, dtype=np.float32)})
    run("convert", draft, tmp_path / "copy", "--to", "toy")
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == config
    for level in ("headers", "weights"):
        assert run("validate", tmp_path / "copy", "--target", target, "--level", level)["findings"] == []
    row = generate(tmp_path, "--draft", tmp_path / "copy", "--target", target)
    assert (row["token_ids"], row["acceptance_lengths"]) == (COUNTED, [4, 4])


def test_a_field_of_a_family_that_its_dialect_loses_is_found(tmp_path: Path, add: Add) -> None:
    add(dflash_cli.formats, BARE_DIALECT.replace('"stride": config.stride', '"stride": 1'))
    add(dflash_runtime.drafts, DRAFT)
    config = {"toy": {"ahead": 3, "taps": [0, 1], "of": support.SMALL.target_layers, "stride": 2, **BARE_SIZES}}
    draft = support.write_checkpoint(tmp_path / "draft", config, {"step": np.ones(1, dtype=np.float32)})
    outcome = invoke("convert", draft, tmp_path / "out", "--to", "toy")
    assert outcome.code == 3
    assert "stride" in outcome.err
    assert not (tmp_path / "out").exists()


def test_the_toys_are_removed() -> None:
    assert "toy" not in target_families()
    assert "toy" not in draft_families()
    assert "toy" not in LAYOUTS
    assert "toy" not in {item.name for item in all_formats()}
