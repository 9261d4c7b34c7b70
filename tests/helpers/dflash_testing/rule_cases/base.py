"""A draft with one fault, and functions that make faults. The other files of this folder list the cases."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.report import Report
from dflash_cli.rules.rule import Finding, Level
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_testing import checkpoints as support
from dflash_testing.families import FAMILIES, own_shapes

Change = Callable[[dict[str, Any]], object]

SPEC = "speculators"
SLIDING = replace(support.SMALL, windows=(16, 16))
MIXED = replace(support.SMALL, windows=(16, None))
YARN = {"rope_type": "yarn", "factor": 64.0}
VERIFIER: dict[str, Any] = {"architectures": []}


CONFIGS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "native": support.native_config, SPEC: support.speculators_config, **FAMILIES
}  # fmt: skip
"""Dialect -> its config."""


def nothing(_: dict[str, Any]) -> None:
    """Change nothing."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A draft with one fault, and the finding that reports the fault.

    rule, severity                  the finding's rule and severity
    key, at                         the finding's location: a dotted key of config.json, or any other location
    names                           values, names and numbers in the finding's message
    config, tensors                 edit the config and the arrays of the draft in place
    target, target_tensors          edit the config and the arrays of the target; if `target` is None, none is given
    files, target_files             files to write beside the draft and beside the target
    spoil                           changes the directory in any other way
    """

    rule: str = ""
    key: str = ""
    at: str = ""
    names: tuple[str, ...] = ()
    severity: str = "error"
    dialect: str = "native"
    shape: support.Shape = support.SMALL
    config: Change = nothing
    tensors: Change = nothing
    target: Change | None = None
    target_tensors: Change = nothing
    files: Mapping[str, Any] = field(default_factory=dict)
    target_files: Mapping[str, Any] = field(default_factory=dict)
    spoil: Callable[[Path], object] = lambda path: None
    engines: str = ""
    level: Level = "headers"
    k: int | None = None
    num_gpus: int = 1
    name: str = "dflash-draft"
    target_name: str | None = None

    @property
    def location(self) -> str:
        return self.at or f"config.json:{self.key}"

    def __str__(self) -> str:
        """The id of the test of this case."""
        return "-".join((self.rule, self.key or self.at, *self.names, *self.engines.split()))

    def reported(self, report: Report) -> list[Finding]:
        """The findings of a report that this case expects."""
        return [
            item
            for item in report.findings
            if (item.severity, item.location) == (self.severity, self.location) and self.is_named(item.id, item.message)
        ]

    def is_named(self, rule: str, message: str) -> bool:
        """Whether a finding of a rule names what is wrong in this case."""
        return rule == self.rule and all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in self.names)


def build(case: Case, path: Path) -> Path:
    """Write the draft."""
    shape = case.shape
    arrays = support.body_arrays(shape)
    if shape.draft_vocab != shape.vocab:
        arrays |= support.reduced_arrays(shape, support.target_arrays(shape))
    config = CONFIGS[case.dialect](shape)
    case.config(config)
    if case.dialect in FAMILIES:
        arrays |= support.random_arrays(own_shapes(config, shape), seed=3)
    case.tensors(arrays)
    support.write_checkpoint(path, config, arrays)
    _write(path, case.files)
    case.spoil(path)
    return path


def check(case: Case, directory: Path) -> Report:
    """Write the draft, and the target if the case has one, and validate."""
    draft = build(case, directory / case.name)
    target = None
    if case.target is not None:
        config, arrays = support.target_config(case.shape), support.target_arrays(case.shape)
        case.target(config)
        case.target_tensors(arrays)
        target = support.write_checkpoint(directory / "target", config, arrays)
        _write(target, case.target_files)
    return validate_draft(
        ValidationPlan(
            draft=draft,
            draft_reference=str(draft),
            target=target,
            target_reference=None if target is None else case.target_name or str(target),
            engines=parse_engines(case.engines),
            level=case.level,
            num_speculative_tokens=case.k,
            tensor_parallel=case.num_gpus,
        )
    )


def nested(**keys: Any) -> Change:
    return lambda config: config["dflash_config"].update(keys)


def top(**keys: Any) -> Change:
    return lambda config: config.update(keys)


def body(**keys: Any) -> Change:
    return lambda config: config["transformer_layer_config"].update(keys)


def without(*names: str, inside: str | None = None) -> Change:
    return lambda config: [(config[inside] if inside else config).pop(name) for name in names]


def outer(**keys: Any) -> Change:
    return lambda config: config["speculators_config"].update(keys)


def method(**keys: Any) -> Change:
    return lambda config: config["speculators_config"]["proposal_methods"][0].update(keys)


def both(*changes: Change) -> Change:
    return lambda config: [change(config) for change in changes]


def add(name: str, *shape: int, dtype: Any = np.float32) -> Change:
    return lambda arrays: arrays.update({name: np.zeros(shape, dtype=dtype)})


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arrays: arrays.update({name: change(arrays[name])})


def rename(old: str, new: str) -> Change:
    def change(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if name.startswith(old)]:
            arrays[new + name.removeprefix(old)] = arrays.pop(name)

    return change


def fuse(arrays: dict[str, Any]) -> None:
    """Store the projections of queries, keys and values as one tensor, and the projections of gate and up as one."""
    for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for name in [name for name in arrays if f".{parts[0]}." in name]:
            names = [name.replace(parts[0], part) for part in parts]
            arrays[name.replace(parts[0], whole)] = np.concatenate([arrays.pop(item) for item in names])


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(content, encoding="utf-8")


def cut(name: str, num_bytes: int) -> Callable[[Path], object]:
    def spoil(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:num_bytes])

    return spoil


def sharded(change: Callable[[dict[str, Any]], object], *, drop: bool = False) -> Callable[[Path], object]:
    """Split the weights over two shards, and edit the index."""

    def spoil(path: Path) -> None:
        from safetensors.numpy import load_file

        arrays = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        config = json.loads((path / "config.json").read_text())
        support.write_sharded(path, config, arrays)
        index_path = path / "model.safetensors.index.json"
        index = json.loads(index_path.read_text())
        change(index)
        index_path.write_text(json.dumps(index))
        if drop:
            (path / "model-00002-of-00002.safetensors").unlink()

    return spoil


def _write(path: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
