"""Draw the README's pictures of terminal output from real runs: docs/pictures/*.svg.

python scripts/pictures.py
"""

import os
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {
    "validate": "dflash validate tiny:reduced --target tiny --engine vllm,sglang",
    "eval-acceptance": "dflash eval-acceptance tiny --num-prompts 24",
}
WIDTH = 100


def run(command: str) -> str:
    """The output of a command, without the path of this checkout."""
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "kernels"))
    done = subprocess.run(
        [sys.executable, "-m", "dflash_cli", *shlex.split(command)[1:]],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.stdout.replace(f"{ROOT}/", "")


def draw(name: str, command: str, output: str) -> str:
    """The picture of a terminal that shows the command and its output."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    text = Text(output.rstrip())
    text.highlight_regex(r"(?m)^[A-Z]\d\d error|cannot serve", "bold red")
    text.highlight_regex(r"(?m)^[A-Z]\d\d warning", "bold yellow")
    text.highlight_regex(r"(?m)^acceptance length.*$", "bold green")
    text.highlight_regex(r"[█]+", "green")
    console.print(text)
    return console.export_svg(title="dflash", theme=MONOKAI, unique_id=name)


if __name__ == "__main__":
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    for name, command in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(name, command, run(command)), encoding="utf-8")
