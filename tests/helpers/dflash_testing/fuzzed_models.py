"""Readers of configs of all families, of tokenizers and of files beside the weights, for `reader_fuzzing`."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

from dflash_cli.checkpoints.description import describe
from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.conversion.destination import check_destination
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_runtime.checkpoint.stored import weight_digests
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_runtime.checkpoint.text.tokenizer import find_stop_ids, find_tokenizer
from dflash_runtime.device.setup.spreading import resolve_spread
from dflash_testing import checkpoints as support
from dflash_testing import families
from dflash_testing.kinds import CASES
from dflash_testing.paths import ROOT
from dflash_testing.reader_fuzzing import Reader, as_json, file_reader

CONFIGS = ROOT / "tests" / "data" / "targets"
TEXT = "def f(a):\n    return a\u00fc \U0001f600"


def of_families(home: Path) -> dict[str, Reader]:
    """Configs of drafts and targets. Headers beside them fit the first one."""
    target = support.make_target(home / "target")

    def drafts(name: str, configs: Iterable[support.Json], path: Path) -> Reader:
        def read(_: Path) -> None:
            describe(path)
            validate_draft(ValidationPlan(draft=path, target=target))

        return Reader([as_json(config) for config in configs], file_reader(path / "config.json", read))

    found = {
        f"{family} config": drafts(family, [make()], families.write_draft(home / family, make()))
        for family, make in families.FAMILIES.items()
    }
    kinds = list(CASES.values())
    found["config of another kind"] = drafts("kind", [case.config for case in kinds], kinds[0].write(home / "kind"))
    return {**found, "config of a target": _target_config(home)}


def _target_config(home: Path) -> Reader:
    """Configs of targets of all families, by the recorded keys of transformers."""
    bases = [file.read_bytes() for file in sorted(CONFIGS.glob("*.json"))]
    folder = home / "recorded"
    folder.mkdir()
    return Reader(bases, file_reader(folder / "config.json", lambda _: how_it_runs(open_target(folder))))


def of_tokenizers(home: Path) -> dict[str, Reader]:
    """Files beside tokenizer.json, one of them changed. An accepted tokenizer can encode and decode a text.

    tokenizer.json itself is left out: the tokenizers library ends the process at some malformed ones.
    """
    sound = tiny_directory() / "target"

    def reader(name: str, *more: bytes) -> Reader:
        folder = home / name
        shutil.copytree(sound, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        file = folder / name
        bases = [file.read_bytes(), *more] if file.exists() else list(more)

        def read(_: Path) -> None:
            tokenizer = find_tokenizer(folder)
            assert tokenizer is not None
            ids = tokenizer.encode(TEXT)
            json.dumps([tokenizer.decode(ids[:20]), tokenizer.eos_token_id, tokenizer.template_digest])

        return Reader(bases, file_reader(file, read))

    target = support.make_target(home / "stops")
    generation = target / "generation_config.json"
    return {
        "tokenizer_config.json": reader("tokenizer_config.json"),
        "special_tokens_map.json": reader("special_tokens_map.json", as_json({"eos_token": {"content": "<|end|>"}})),
        "added_tokens.json": reader("added_tokens.json", as_json({"<|x|>": 600})),
        "generation config": Reader(
            [as_json({"eos_token_id": [1, 2], "temperature": 0.5}), as_json({"eos_token_id": 1})],
            file_reader(generation, lambda _: find_stop_ids(open_target(target))),
        ),
    }


def of_side_files(home: Path) -> dict[str, Reader]:
    """Files that commands find beside weights, or that earlier runs wrote."""
    draft, target = support.make_native(home / "draft"), support.make_target(home / "target")
    converted = home / "converted"
    support.convert(draft, converted, "speculators", target=target)
    manifest = converted / "conversion.json"
    weights = target / "model.safetensors"
    identity = weight_digests.FileIdentity.of(weights)

    def validate(_: Path) -> None:
        validate_draft(ValidationPlan(draft=converted, target=target))
        check_destination(converted, force=True)

    def remembered(data: bytes) -> None:
        """Every entry that is taken has the form of a digest."""
        with patch.dict(os.environ, XDG_CACHE_HOME=str(home / "cache")):
            file = weight_digests._memory_file(identity)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            found = weight_digests.recall(identity)
        assert all(len(digest) == 32 for digest in found.values()), found

    digests = weight_digests.hash_ranges(weights, [(0, 16), (16, 64)])
    memory = as_json({f"{begin}-{end}": digest for (begin, end), digest in digests.items()})
    return {
        "conversion.json": Reader([manifest.read_bytes()], file_reader(manifest, validate)),
        "remembered digests": Reader([memory], remembered),
        "device map": Reader(
            [as_json({"model.layers.0": "cpu", "lm_head": "disk", "": "cpu"})],
            file_reader(home / "map.json", lambda path: resolve_spread(str(path))),
        ),
    }
