"""CONTRIBUTING.md, "Adding": a target family and a draft family are one file each, used through the command line.

Each toy is written into a folder that stands in for the package's own, and is gone afterwards.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import dflash_cli.formats
import dflash_runtime.drafts
import dflash_runtime.models
from dflash_cli.formats.dialect import FORMATS, all_formats
from dflash_runtime.drafts.draft import DRAFTS, draft_families
from dflash_runtime.models.target import TARGETS, target_families
from dflash_runtime.registry import Registry
from dflash_testing import checkpoints as support

Add = Callable[[ModuleType, str], None]

TARGET = '''
"""A target that says the id after the last one: each row of its head is the embedding of the id before."""

import torch
from torch.nn import functional

from dflash_runtime.models.layers import Linear
from dflash_runtime.models.target import TARGETS


@TARGETS.register("toy")
class ToyTarget:
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

DRAFT = '''
"""A draft that counts on from the anchor by the one number its file holds."""

import torch
from torch.nn import functional

from dflash_runtime.drafts.draft import DRAFTS


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

    @staticmethod
    def expected_shapes(config):
        return {"step": (1,)}
'''

DIALECT = '''
"""Configs that say `toy`, read as the native dialect, of the toy family."""

from dataclasses import replace

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import Native


@FORMATS.register("toy")
class Toy(Native):
    name = "toy"
    title = "toy"
    priority = 1

    def evidence(self, config, tensor_names):
        return "it says toy" if config.get("toy") else None

    def read_config(self, config, path):
        plain = {key: value for key, value in config.items() if key != "toy"}
        reading = super().read_config(plain, path)
        return replace(reading, config=replace(reading.config, family="toy"))
'''


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Write a file into a package, as far as the registries can tell."""
    finders = (all_formats, draft_families, target_families)
    packages: list[ModuleType] = []
    registries: tuple[Registry[object], ...] = (FORMATS, DRAFTS, TARGETS)  # type: ignore[assignment]
    for find, registry in zip(finders, registries, strict=True):
        find()
        monkeypatch.setattr(registry, "_items", dict(registry._items))
        find.cache_clear()

    def write(package: ModuleType, source: str) -> None:
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "added_toy.py").write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        packages.append(package)

    yield write
    monkeypatch.undo()
    for package in packages:
        sys.modules.pop(f"{package.__name__}.added_toy", None)
        vars(package).pop("added_toy", None)
    for find in finders:
        find.cache_clear()


def make_target(path: Path) -> Path:
    table = np.random.default_rng(0).standard_normal((support.SMALL.vocab, support.SMALL.hidden)).astype(np.float32)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    return support.write_checkpoint(path, support.target_config(model_type="toy"), {"table": table})


def make_draft(path: Path, step: int) -> Path:
    config = support.native_config(toy=True)
    return support.write_checkpoint(path, config, {"step": np.array([step], dtype=np.float32)})


def generate(tmp_path: Path, *options: object) -> dict[str, list[int]]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [7, 3]}\n')
    outcome = support.invoke(
        "generate", "--prompts", prompts, "--output", "-", "-n", 9, "--ignore-eos", "--device", "cpu", *options
    )
    assert outcome.code == 0, outcome.err
    row: dict[str, list[int]] = json.loads(outcome.out)
    return row


def test_a_target_family_is_one_file(tmp_path: Path, add: Add) -> None:
    target = make_target(tmp_path / "target")
    refused = support.invoke("generate", "hello", "--target", target, "-k", 0)
    assert refused.code == 5
    assert "does not run toy targets" in refused.err
    target_families.cache_clear()
    add(dflash_runtime.models, TARGET)
    assert generate(tmp_path, "--target", target, "-k", 0)["token_ids"] == [4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(("step", "lengths"), [(1, [4, 4]), (2, [1] * 8)])
def test_a_draft_family_is_one_file_and_a_dialect_that_names_it(
    tmp_path: Path, add: Add, step: int, lengths: list[int]
) -> None:
    """Counting in ones it is always right, in twos always wrong; the text is the target's either way."""
    add(dflash_runtime.models, TARGET)
    add(dflash_cli.formats, DIALECT)
    pair = ("--target", make_target(tmp_path / "target"), "--draft", make_draft(tmp_path / "draft", step))
    refused = support.invoke("generate", "hello", *pair)
    assert refused.code == 5
    assert "unknown draft family 'toy' (known: dflash)" in refused.err
    draft_families.cache_clear()
    add(dflash_runtime.drafts, DRAFT)
    row = generate(tmp_path, *pair)
    assert row["token_ids"] == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert row["acceptance_lengths"] == lengths


def test_nothing_of_the_toys_is_left() -> None:
    assert "toy" not in target_families()
    assert "toy" not in draft_families()
    assert "toy" not in {item.name for item in all_formats()}
