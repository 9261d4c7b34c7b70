"""Draws who imports whom: the rooms of the house, floor by floor, and every arrow that points up.

python scripts/imports.py

A room is a package folder; the modules that lie in a package's own folder are rooms by themselves only where they stand
above or below its folders, so they are grouped in ROOMS. The lowest room is floor 1.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "dflash_kernels": "kernels/dflash_kernels",
    "dflash_runtime": "runtime/dflash_runtime",
    "dflash_cli": "dflash_cli",
}

ENTRIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dflash_runtime": {"base": ("errors", "registry", "config", "json_values")},
    "dflash_cli": {
        "terminal": ("version", "console", "environment", "parameters", "options", "help_page", "lazy_group")
    },
}
"""Package -> the modules of its own folder that its other rooms stand on; its remaining modules stand on top of all."""


def room_of(module: str) -> str:
    """`dflash_cli.formats.native` -> `cli/formats`; a module of a package's own folder -> its group."""
    package, *rest = module.split(".")
    short = package.removeprefix("dflash_")
    if package == "dflash_kernels":
        return short
    head = rest[0] if rest else ""
    if (ROOT / PACKAGES[package] / head).is_dir() and head:
        return f"{short}/{head}"
    group = next((name for name, members in ENTRIES[package].items() if head in members), "top")
    return f"{short} ({group})"


def modules() -> Mapping[str, Path]:
    """Dotted name -> file, of the three packages."""
    return {
        ".".join((package, *file.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__"): file
        for package, folder in PACKAGES.items()
        for file in sorted((ROOT / folder).rglob("*.py"))
    }


def imported(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of this project that a file imports anywhere in it, for type checking included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def arrows() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(room, imported room) -> the (module, imported module) pairs between them."""
    known = modules()
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, file in known.items():
        for other in imported(file, known):
            if other in known and room_of(name) != room_of(other):
                found.setdefault((room_of(name), room_of(other)), []).append((name, other))
    return found


def floors(edges: Mapping[tuple[str, str], object]) -> dict[str, int]:
    """Room -> floor: one above the highest room it imports. Rooms of a circle get no floor."""
    rooms = {room for edge in edges for room in edge}
    below = {room: {other for one, other in edges if one == room} for room in rooms}
    placed: dict[str, int] = {}
    while ready := [room for room in rooms - placed.keys() if below[room] <= placed.keys()]:
        placed |= {room: 1 + max((placed[other] for other in below[room]), default=0) for room in ready}
    return placed


def draw() -> str:
    """The rooms from the top floor down, each with the rooms it imports."""
    edges = arrows()
    placed = floors(edges)
    rooms = {room for edge in edges for room in edge}
    lines = []
    for room in sorted(rooms, key=lambda room: (-placed.get(room, 0), room)):
        others = sorted(
            (other for one, other in edges if one == room), key=lambda other: (-placed.get(other, 0), other)
        )
        lines.append(f"{placed.get(room, '?'):>2}  {room:20} {', '.join(others)}".rstrip())
    circles = ", ".join(sorted(rooms - placed.keys())) or "none"
    height = max(placed.values(), default=0)
    lines.append(f"{len(rooms)} rooms, {height} floors, {len(edges)} arrows, circles: {circles}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(draw())
