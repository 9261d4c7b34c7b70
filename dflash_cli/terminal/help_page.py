"""Help pages as plain text, as wide as the terminal: usage, text, examples, essential options.

Words, flags and commands are never split; a longer line stays whole. Rich is not imported.
"""

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from dflash_cli.terminal import console
from dflash_cli.terminal.parameters import (
    DRAFTING,
    ENGINE,
    ESSENTIALS,
    MEASURING,
    OPTIONS,
    OUTPUT,
    PROMPTS,
    SAMPLING,
    Parameter,
)

GROUPS = (ESSENTIALS, OPTIONS, PROMPTS, MEASURING, SAMPLING, DRAFTING, ENGINE, OUTPUT)
"""Headings of --help-all in their order."""
WIDEST_FLAGS = 32
WIDEST_PAGE = 120
INDENT = "  "

Rows = Sequence[tuple[str, str]]


def draw_command(
    command: str,
    text: str,
    parameters: Sequence[Parameter],
    examples: Sequence[str],
    docs: str | None,
    *,
    is_full: bool,
) -> str:
    """The help page of a command: its essential options, or all of them."""
    sections = {group: [_row(item) for item in members] for group, members in _by_group(parameters).items()}
    if not is_full:
        essentials = sections.get(ESSENTIALS) or sections.get(OPTIONS, [])
        short = [_row(item) for item in parameters if item.name == "as_json"]
        sections = {"Options": [*essentials, *short, ("--help-all", "Show all options.")]}
    else:
        sections[OUTPUT] = [*sections.get(OUTPUT, []), ("-h, --help", "Show the examples and the most used options.")]
    usage = " ".join([command, *usage_pieces(parameters)])
    return draw(usage, text, examples, sections, more(docs, command.rpartition(" ")[0]))


def more(docs: str | None, program: str) -> str:
    """The last line of a help page: the command that shows the page of docs. Empty if there is no such page."""
    return f"More: {program} docs {docs}".rstrip() if docs is not None else ""


def draw(usage: str, text: str, examples: Sequence[str], sections: Mapping[str, Rows], last: str) -> str:
    """A help page with usage, text, examples and sections of rows."""
    width = min(shutil.get_terminal_size().columns, WIDEST_PAGE)
    blocks = [f"Usage: {usage}"]
    blocks += [_fill(" ".join(part.split()), width, INDENT) for part in text.strip().split("\n\n") if part]
    if examples:
        heading = "Examples" if len(examples) > 1 else "Example"
        blocks.append("\n".join([f"{heading}:", *(INDENT + console.as_typed(line) for line in examples)]))
    blocks += ["\n".join([f"{title}:", *_table(rows, width)]) for title, rows in sections.items() if rows]
    blocks += [last] if last else []
    return "\n\n".join(blocks) + "\n"


def usage_pieces(parameters: Iterable[Parameter]) -> list[str]:
    """`[OPTIONS] DRAFT [PROMPT]...`."""
    pieces = ["[OPTIONS]"]
    for item in parameters:
        if item.is_argument:
            name = item.metavar if item.is_required else f"[{item.metavar}]"
            pieces.append(f"{name}..." if item.is_list else name)
    return pieces


def _table(rows: Rows, width: int) -> list[str]:
    """Lines of a table with two columns. If a name or the terminal does not fit, the text starts on the next line."""
    column = max((len(name) for name, _ in rows if len(name) <= WIDEST_FLAGS), default=0) + 2 * len(INDENT)
    if width < 2 * column:
        column = 3 * len(INDENT)
    lines = []
    for name, text in rows:
        filled = _fill(text, width, " " * column)
        first = f"{INDENT}{name}"
        if len(first) + len(INDENT) > column:
            lines += [first, filled]
        else:
            lines.append(first.ljust(column) + filled.lstrip())
    return lines


def _fill(text: str, width: int, indent: str) -> str:
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _by_group(parameters: Sequence[Parameter]) -> dict[str, list[Parameter]]:
    """Parameters by heading, in the order of GROUPS."""
    found = {group: [item for item in parameters if item.option.group == group] for group in GROUPS}
    return {group: members for group, members in found.items() if members}


def _row(item: Parameter) -> tuple[str, str]:
    if item.is_argument:
        by_flag = f" Also given by {item.flag}." if item.flag else ""
        return item.metavar, item.option.text + by_flag
    flags = ", ".join(sorted(item.flags, key=lambda flag: flag.startswith("--")))
    name = f"{flags} / {item.option.off}" if item.option.off else flags
    if not item.is_switch:
        name += f" {item.metavar}"
    return name, item.option.text + _default(item)


def _default(item: Parameter) -> str:
    """The sentence with the default. Empty if the help states it, or if the default is an absent value."""
    if item.is_required:
        return " Required."
    if item.origin:
        return f" Set in {item.origin}."
    if item.default in (None, ()) or (item.is_switch and not item.option.off) or "Default:" in item.option.text:
        return ""
    if item.is_switch:
        return f" Default: {(item.flag if item.default else item.option.off).lstrip('-')}."
    values = item.default if isinstance(item.default, tuple) else (item.default,)
    return f" Default: {','.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}."
