"""Print docs/reference/schemas.md from the JSON Schemas of all documents.

python scripts/schema_table.py > docs/reference/schemas.md
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_cli.commands.schema import kinds, read_schema

HEAD = """# Schemas

Printed by `python scripts/schema_table.py`. `--json` prints exactly one JSON document. Every document states its `kind`
and its `schema_version`. `dflash schema KIND` prints the JSON Schema of a kind, complete with all definitions.

`schema_version` rises when a key changes its meaning or disappears. New keys do not change it, so readers must ignore
keys that they do not know.

| kind | content |
|---|---|
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(f"| `{kind}` | {read_schema(kind)['title']} |\n" for kind in kinds())


if __name__ == "__main__":
    sys.stdout.write(render())
