"""Draws who imports whom: the rooms of the house, floor by floor, and every arrow that points up.

python scripts/imports.py

A room is a folder. The modules in a package's own folder stand partly below its other rooms and partly above them, so
they are shown as two, its base or terminal and its top. The lowest floor is 1.
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

LOWER: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dflash_runtime": {"base": ("errors", "registry", "config", "json_values")},
    "dflash_cli": {
        "terminal": (
            "version",
            "console",
            "interruption",
            "environment",
            "parameters",
            "options",
            "help_page",
            "lazy_group",
        )
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
    group = next((name for name, members in LOWER[package].items() if head in members), "top")
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


def reduced(edges: Mapping[tuple[str, str], object]) -> dict[str, list[str]]:
    """Room -> the rooms it imports, without those that another of them reaches by itself. Needs rooms on floors."""
    below = {room: {other for one, other in edges if one == room} for edge in edges for room in edge}

    def reached(room: str) -> set[str]:
        return below[room].union(*(reached(other) for other in below[room]))

    return {
        room: sorted(others - set[str]().union(*(reached(other) for other in others))) for room, others in below.items()
    }


def draw() -> str:
    """The rooms from the top floor down, each with the rooms right below it; what those import it may import too."""
    edges = arrows()
    placed = floors(edges)
    rooms = {room for edge in edges for room in edge}
    circles = sorted(rooms - placed.keys())
    nearest = reduced(edges) if not circles else {}
    lines = [
        f"{placed[room]:>2}  {room:20} {', '.join(nearest.get(room, []))}".rstrip()
        for room in sorted(placed, key=lambda room: (-placed[room], room))
    ]
    folders = {room.partition(" ")[0] for room in rooms}
    height = max(placed.values(), default=0)
    lines.append(
        f"{len(folders)} rooms on {height} floors, {len(edges)} arrows, circles: {', '.join(circles) or 'none'}"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(draw())
