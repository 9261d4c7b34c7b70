"""Folders of the runtime import only lower folders, and the folders below the models work without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_testing.paths import ROOT
from dflash_testing.published_pairs import TARGETS

PACKAGE = ROOT / "runtime" / "dflash_runtime"
ROOMS = (
    "phrases whole_files line_process notices errors read_files json_values key_marks json_types registry documents "
    "config_parts draft_config target_config engine_config",
    "checkpoint",
    "scheduling",
    "kv_transfer ranks",
    "models",
    "drafts",
    "device",
)
"""From bottom to top. A room (folder or module) imports only itself and lower rooms. All other modules are on top."""

TORCH_FREE = ("checkpoint", "scheduling")
PLAIN = {"dflash_kernels.logits.temperature", "dflash_kernels.mixtures.mxfp4_block"}
"""The modules of the kernels that import nothing."""
LEVELS = {name: level for level, names in enumerate(ROOMS) for name in names.split()}


def room(module: str) -> str:
    """`dflash_runtime.device.storage.kv` -> `device`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """The modules that a file imports, and whether it imports them at once."""
    tree = ast.parse(file.read_text())
    later = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef) or (isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test))
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in later) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node not in later


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_downwards(file: Path) -> None:
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    level = LEVELS.get(own, len(ROOMS))
    for module, _ in imports(file):
        if module.startswith("dflash_runtime"):
            assert LEVELS.get(room(module), len(ROOMS)) <= level, f"{own} imports {module}"


def test_every_room_exists() -> None:
    names = {item.name.removesuffix(".py") for item in PACKAGE.iterdir()}
    assert set(LEVELS) <= names
    assert names - set(LEVELS) - {"__init__", "__pycache__"} == {
        "engine",
        "engine_setup",
        "llm",
        "lossless",
        "metrics",
        "prompts",
        "rank_main",
        "rank_messages",
        "rank_processes",
        "transfers",
        "warm_up",
        "py.typed",
    }


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_torch_is_imported_only_inside_functions(folder: str) -> None:
    for file in (PACKAGE / folder).rglob("*.py"):
        at_once = {module.split(".")[0] for module, is_at_once in imports(file) if is_at_once and module not in PLAIN}
        assert not at_once & {"torch", "numpy", "transformers", "safetensors", "dflash_kernels"}, file.name


SHAPES = """
import json
from pathlib import Path
from dflash_runtime.checkpoint.targets.hf_config import read_target_config
from dflash_runtime.models.target import target_families
num_listed = 0
for file in map(Path, FILES):
    config = json.loads(file.read_text("utf-8"))
    family = target_families()._items.get(config["model_type"])
    if family is not None and "quantization_config" not in config:
        shapes = family.expected_shapes(getattr(family, "read_config", read_target_config)(config, file))
        num_listed += len(shapes) > 20
assert num_listed >= 9, num_listed
"""
"""Lists the tensors of the published targets in FILES."""


def test_checkpoints_scheduling_and_the_tensors_of_targets_need_no_torch() -> None:
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for folder in TORCH_FREE
        for file in sorted((PACKAGE / folder).rglob("*.py"))
    ]
    code = (
        f"import sys; sys.modules['torch'] = None; sys.path[:0] = {[str(PACKAGE.parent), str(ROOT / 'kernels')]!r}\n"
        f"for name in {modules!r}: __import__(name)\n"
        f"FILES = {[str(file) for file in sorted(TARGETS.glob('*.json'))]!r}{SHAPES}"
        "kernels = {name for name, module in sys.modules.items()\n"
        "           if name.startswith('dflash_kernels.') and not hasattr(module, '__path__')}\n"
        f"assert kernels <= {PLAIN!r} and 'numpy' not in sys.modules\n"
    )
    assert len(modules) > 10
    subprocess.run([sys.executable, "-c", code], check=True)
