"""Adding a dialect is adding one file: a toy one is written, and used through the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_cli.checkpoints.comparison import compare
from dflash_cli.checkpoints.description import describe
from dflash_cli.checkpoints.references import tiny_directory
from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT

TOY = '''"""A dialect with everything inside an object of its own, and taps counted from 1."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, Homes, Json, ParsedConfig
from dflash_cli.formats.native import Native
from dflash_runtime.config import DraftConfig


@FORMATS.register("toy")
class Toy(Native):
    name: ClassVar[str] = "toy"
    title: ClassVar[str] = "DFlash, toy dialect"
    priority: ClassVar[int] = 5
    containers: ClassVar[tuple[str, ...]] = ("toy", "dflash_config")
    homes: ClassVar[Homes] = {
        **{field: tuple(f"toy.{key}" for key in keys) for field, keys in Native.homes.items()},
        "target_layer_ids": ("toy.taps_from_one",),
    }

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return "config.json has toy" if "toy" in config else None

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        inner = dict(config["toy"])
        taps = [layer - 1 for layer in inner.pop("taps_from_one")]
        return super().read_config({**inner, "target_layer_ids": taps}, path)

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        inner = super().write_config(config, carried)
        del inner["dflash_config"]["target_layer_ids"]
        return {"toy": {**inner, "taps_from_one": [layer + 1 for layer in config.target_layer_ids]}}

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[str]:
        yield from super().warnings(config, carried)
        yield "nothing reads toys"
'''

RUN = (
    "import sys, dflash_cli.formats as formats; formats.__path__.append({!r}); from dflash_cli.main import main; main()"
)


class Toys:
    """The command line of a tree in which the toy's file has been added."""

    def __init__(self, folder: Path) -> None:
        (folder / "toy.py").write_text(TOY, encoding="utf-8")
        self.code = RUN.format(str(folder))

    def run(self, *args: object) -> support.Outcome:
        paths = os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "kernels"))
        done = subprocess.run(
            [sys.executable, "-c", self.code, *map(str, args)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1"},
            timeout=120,
            check=False,
        )
        return support.Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    folder = tmp_path / "formats"
    folder.mkdir()
    return Toys(folder)


def test_a_dialect_is_one_file(toys: Toys, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    assert "native, sglang, speculators, toy," in " ".join(toys.run("convert", "--help").out.split())
    there = toys.run("convert", "tiny", out, "--to", "toy")
    assert there.code == 0, there.err
    assert "warning: nothing reads toys" in there.err
    assert "native -> toy" in there.err
    found = toys.run("inspect", out)
    assert found.code == 0, found.err
    assert "DFlash, toy dialect (config.json has toy)" in found.out
    again = toys.run("convert", out, back, "--to", "native", "--target", "tiny")
    assert again.code == 0, again.err
    difference = compare(describe(tiny_directory() / "draft"), describe(back))
    assert difference.fields == {}
    assert difference.num_equal == len(difference.first.checkpoint.tensors) == len(difference.second.checkpoint.tensors)


def test_its_keys_are_told_apart_in_the_manifest(toys: Toys, tmp_path: Path) -> None:
    outcome = toys.run("convert", "tiny", tmp_path / "out", "--to", "toy", "--dry-run")
    assert "derived  dflash_config.target_layer_ids -> toy.taps_from_one" in outcome.out
    assert "moved    hidden_size -> toy.hidden_size" in outcome.out


def test_without_the_file_there_is_no_such_dialect(tmp_path: Path) -> None:
    assert support.invoke("convert", "tiny", tmp_path / "out", "--to", "toy").code == 2
