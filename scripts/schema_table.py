"""Print docs/reference/schemas.md from the JSON Schemas of all documents.

python scripts/schema_table.py > docs/reference/schemas.md
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_cli.documents.kinds import KINDS

HEAD = """# Schemas

Printed by `python scripts/schema_table.py`. `--json` prints exactly one JSON document. Every document states its `kind`
and its `schema_version`, which `handoff.json` calls `version`. `dflash schema KIND` prints the JSON Schema of a kind,
complete with all definitions.

`schema_version` rises when a key changes its meaning or disappears. New keys do not change it, so other programs must
ignore keys that they do not know. Commands of dflash refuse an unknown key in a document and name it: it is a typo,
or the document is from a later release.

| kind | content |
|---|---|
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(f"| `{name}` | {kind.title} |\n" for name, kind in KINDS.items())


if __name__ == "__main__":
    sys.stdout.write(render())
