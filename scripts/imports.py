"""Print which folder imports which, by level, and every import cycle.

python scripts/imports.py

A room is a folder of modules. A package's own folder counts as two rooms, base and top. The package's other rooms
import modules of the base, and modules of the top import the other rooms. Each folder in a folder of `NESTED` is a room
too. The lowest level is 1.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "dflash_kernels": "kernels/dflash_kernels",
    "dflash_runtime": "runtime/dflash_runtime",
    "dflash_cli": "dflash_cli",
}

WINGS: Mapping[str, frozenset[str]] = {
    "checkpoint": frozenset(("formats", "checkpoints", "rules", "engines", "conversion")),
    "measuring": frozenset(
        ("generation", "acceptance", "comparing", "tuning", "probing", "publishing", "handoff", "workers")
    ),
}
"""Wing of `dflash_cli` -> its folders. The checkpoint wing never imports the measuring wing."""

NESTED = frozenset(("dflash_cli/probing",))
"""Folders with folders that have levels of their own."""

LOWER: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dflash_kernels": {"base": ("launch", "launch_config", "early_launch")},
    "dflash_runtime": {
        "base": (
            "errors",
            "registry",
            "config_parts",
            "draft_config",
            "target_config",
            "engine_config",
            "json_values",
            "notices",
            "phrases",
            "whole_files",
            "read_files",
            "documents",
            "json_types",
            "key_marks",
        )
    },
    "dflash_cli": {"base": ("version",)},
}
"""Package -> the modules in the base of its own folder. The remaining modules of that folder are the top."""


def room_of(module: str) -> str:
    """The room of a module: `cli/formats` for `dflash_cli.formats.native`, `cli (top)` for `dflash_cli.main`.

    A module in a folder of `NESTED`, such as `dflash_cli.probing.runs.run_load`, is in `cli/probing/runs`.
    """
    package, *rest = module.split(".")
    short = package.removeprefix("dflash_")
    head = rest[0] if rest else ""
    if (ROOT / PACKAGES[package] / head).is_dir() and head:
        is_inner = f"{package}/{head}" in NESTED and (ROOT / PACKAGES[package] / "/".join(rest[:2])).is_dir()
        return "/".join((short, *rest[: 2 if is_inner else 1]))
    group = next((name for name, members in LOWER[package].items() if head in members), "top")
    return f"{short} ({group})"


def modules() -> Mapping[str, Path]:
    """Dotted name -> file, for every module of the three packages."""
    return {
        ".".join((package, *file.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__"): file
        for package, folder in PACKAGES.items()
        for file in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def import_statements(file: Path) -> tuple[tuple[str, str | None], ...]:
    """The (module, name) of every absolute import in a file. The name is None for `import module`."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
    return tuple(found)


def imported(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of this project that a file imports, also inside functions and for type checking."""
    for module, name in import_statements(file):
        inner = f"{module}.{name}"
        yield inner if inner in known else module


def arrows() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(room, imported room) -> the (module, imported module) pairs between them."""
    known = modules()
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, file in known.items():
        for other in imported(file, known):
            if other in known and room_of(name) != room_of(other):
                found.setdefault((room_of(name), room_of(other)), []).append((name, other))
    return found


def imports() -> dict[str, set[str]]:
    """Module -> the modules of this project that it imports, also inside functions and for type checking."""
    known = modules()
    return {name: {other for other in imported(file, known) if other in known} for name, file in known.items()}


def circles(below: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that import each other in a cycle, each sorted."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*below[start]]
        while waiting:
            item = waiting.pop()
            if item not in seen:
                seen.add(item)
                waiting += below.get(item, ())
        return seen

    reach = {name: reached(name) for name in below}
    groups = {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in below}
    return sorted(sorted(group) for group in groups if group)


def wings_of(module: str, known: Mapping[str, Path]) -> set[str]:
    """The wings of `dflash_cli` that a module imports."""
    folders = {other.split(".")[1] for other in imported(known[module], known) if other.startswith("dflash_cli.")}
    return {wing for wing, rooms in WINGS.items() if folders & rooms}


def floors(edges: Mapping[tuple[str, str], object]) -> dict[str, int]:
    """Room -> level: one above the highest room that it imports. Rooms in a cycle are left out."""
    rooms = {room for edge in edges for room in edge}
    below = {room: {other for one, other in edges if one == room} for room in rooms}
    placed: dict[str, int] = {}
    while ready := [room for room in rooms - placed.keys() if below[room] <= placed.keys()]:
        placed |= {room: 1 + max((placed[other] for other in below[room]), default=0) for room in ready}
    return placed


def reduced(edges: Mapping[tuple[str, str], object]) -> dict[str, list[str]]:
    """Room -> the rooms that it imports, without rooms that its other imports reach. Cycles are not allowed."""
    below = {room: {other for one, other in edges if one == room} for edge in edges for room in edge}

    def reached(room: str) -> set[str]:
        return below[room].union(*(reached(other) for other in below[room]))

    return {
        room: sorted(others - set[str]().union(*(reached(other) for other in others))) for room, others in below.items()
    }


def draw() -> str:
    """The rooms from the highest level down, each with its imports. Imports of imports are allowed but not listed."""
    edges = arrows()
    placed = floors(edges)
    rooms = {room for edge in edges for room in edge}
    in_circles = sorted(rooms - placed.keys())
    nearest = reduced(edges) if not in_circles else {}
    lines = [
        f"{placed[room]:>2}  {room:22} {', '.join(nearest.get(room, []))}".rstrip()
        for room in sorted(placed, key=lambda room: (-placed[room], room))
    ]
    folders = {room.partition(" ")[0] for room in rooms}
    height = max(placed.values(), default=0)
    lines.append(
        f"{len(folders)} folders on {height} levels, {len(edges)} imports, cycles: {', '.join(in_circles) or 'none'}"
    )
    groups = circles(imports())
    lines.append(f"cycles between files, with imports inside functions and for types: {len(groups)}")
    lines += [f"    {', '.join(group)}" for group in groups]
    known = modules()
    both = sum(wings_of(name, known) == WINGS.keys() for name in known)
    lines.append(f"modules that import both wings: {both}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(draw())
