"""Print the table of other kinds of drafts in docs/reference/drafts.md.

python scripts/kind_table.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_cli.engines.serving_engine import all_engines
from dflash_cli.formats.dialect import all_formats
from dflash_cli.formats.draft_kinds.kind import Kind

HEAD = "| kind | recognised by | engines with a model | `convert --to` | difference from DFlash |"


def table() -> str:
    """One row per kind, by title."""
    kinds = sorted((item for item in all_formats() if isinstance(item, Kind)), key=lambda item: item.title.lower())
    return "\n".join([HEAD, "|---|---|---|---|---|", *map(_row, kinds)]) + "\n"


def _row(kind: Kind) -> str:
    others = ", ".join(sorted({item.to for item in kind.renamings})) or f"none: {kind.why_not_renamed}"
    served = ", ".join(_served(kind)) or "none"
    return f"| {kind.title} | {_marks(kind)} | {served} | {others} | {kind.difference} |"


def _served(kind: Kind) -> Iterator[str]:
    """Each engine with the first of its known releases that serves the kind in some dialect."""
    for engine in all_engines():
        service = kind.service(engine.name)
        if service is not None:
            firsts = [*service.architectures.values(), *service.types.values()]
            first = min(firsts)
            yield f"{engine.name} {engine.write_release(first)}{' on' if first != engine.ends()[-1] else ''}".strip()


def _marks(kind: Kind) -> str:
    """The values of config keys that only this kind has."""
    stated = [
        *(f"`speculators_model_type: {item}`" for item in sorted(kind.types)),
        *(f"`projector_type: {item}`" for item in sorted(kind.projectors)),
        *(f"`{item}`" for item in sorted(kind.markers)),
        *(f"`model_type: {item}`" for item in sorted(kind.model_types)),
    ]
    return ", ".join([*stated, "architecture" if kind.architectures != Kind.architectures else "tensor names"])


if __name__ == "__main__":
    sys.stdout.write(table())
