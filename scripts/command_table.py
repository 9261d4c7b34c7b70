"""Print docs/reference/commands.md from the request classes of all commands.

python scripts/command_table.py > docs/reference/commands.md
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_cli.main import COMMANDS
from dflash_cli.terminal import documentation
from dflash_cli.terminal.command_line import COMMON, JSON, Entry, load_command
from dflash_cli.terminal.help_page import GROUPS, usage_pieces
from dflash_cli.terminal.parameters import Parameter
from dflash_cli.terminal.requests import parameters_of

HEAD = """# Commands

Every command with its arguments and options, printed by `python scripts/command_table.py` from the request classes in
`dflash_cli/commands/`. A test compares this page with the code.

- `dflash COMMAND --help` shows the examples and the options used most. `dflash COMMAND --help-all` shows all options.
- An option with `,...` takes several values: `--concurrency 1,4`, or the option several times.
- Results go to stdout, everything else to stderr. The [exit codes](exit-codes.md) are the same for all commands.
- Every command except {without_json} takes `--json` and prints one document of its [schema](schemas.md).
- Defaults can be set in `dflash.toml` and by variables: [settings](../how-to/settings.md).
- Functions of `dflash_cli` take the same options as keywords: `num_prompts` is `--num-prompts`.

These switches go before or after the name of any command:

{common}"""

COLUMNS = ("option", "value", "default", "effect")
TYPES = {int: "whole number", float: "number", bool: "switch", Path: "path", str: "text"}


def render() -> str:
    """The whole page."""
    without_json = [f"`{name}`" for name, entry in COMMANDS.items() if not entry.has_json]
    head = HEAD.format(without_json=" and ".join(without_json), common=_table(COLUMNS, map(_row, COMMON)))
    sections = dict.fromkeys(entry.section for entry in COMMANDS.values())
    return "\n".join([head, *(block for section in sections for block in _section(section))])


def _section(section: str) -> Iterator[str]:
    yield f"## {section}\n"
    for name, entry in COMMANDS.items():
        if entry.section == section:
            yield from _command(name, entry)


def _command(name: str, entry: Entry) -> Iterator[str]:
    """The blocks of one command: summary, usage, examples, and one table per group of options."""
    parameters = parameters_of(load_command(name, entry).kind)
    yield f"### {name}\n\n{entry.summary} See {_link(entry)}.\n"
    yield "\n".join(["```sh", f"dflash {name} {' '.join(usage_pieces(parameters))}", *entry.examples, "```\n"])
    options = [*parameters, *([JSON] if entry.has_json else [])]
    for group in GROUPS:
        members = [item for item in options if item.option.group == group]
        if members:
            yield _table((group, *COLUMNS[1:]), map(_row, members))


def _link(entry: Entry) -> str:
    """A link to the documentation page of a command."""
    topic = entry.docs or "index"
    folder = next((f"../{name}/" for name in documentation.SECTIONS if _is_page(name, topic)), "../")
    return f"[{documentation.topics()[topic]}]({folder.removeprefix('../reference/')}{topic}.md)"


def _is_page(section: str, topic: str) -> bool:
    return (Path(__file__).resolve().parents[1] / "docs" / section / f"{topic}.md").is_file()


def _table(columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    names = [*columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (names, ["---"] * len(names), *rows))


def _row(item: Parameter) -> tuple[str, ...]:
    """The cells of one argument or option."""
    flags = ", ".join(f"`{flag}`" for flag in (*item.flags, item.option.off) if flag)
    name = f"`{item.metavar}`" + (f", {flags}" if flags else "") if item.is_argument else flags
    return name, _value(item), _default(item), _cell(item.option.text)


def _value(item: Parameter) -> str:
    """The type of the value, its limits, and whether there may be several."""
    if item.choices:
        return ", ".join(f"`{choice}`" for choice in item.choices) + (" (several)" if item.is_list else "")
    word = item.option.expected or TYPES.get(item.kind, "text")
    low, high, above, below = item.option.min, item.option.max, item.option.above, item.option.below
    limits = [
        f"{text} {limit:g}" if abs(limit) < 1e9 else f"{text} 2^{int(limit + 1).bit_length() - 1} - 1"
        for text, limit in (("at least", low), ("at most", high), ("above", above), ("below", below))
        if limit is not None and not item.option.expected
    ]
    return ", ".join([word, *limits, *(["several"] if item.is_list else [])])


def _default(item: Parameter) -> str:
    """The default as typed on the command line; empty if the text of the option states it."""
    if item.is_required:
        return "required"
    if item.default is None or item.default == ():
        return ""
    if item.is_switch:
        return "on" if item.default else "off"
    values = item.default if isinstance(item.default, tuple) else (item.default,)
    return f"`{','.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}`"


def _cell(text: str) -> str:
    """Text for a table cell of Markdown, with vertical bars and `<` escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(render())
