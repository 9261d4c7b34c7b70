"""Help pages: the essentials first, a panel a theme, examples at the end. Drawn as plain text, so that rich stays out.

`formatter` is the help formatter that Typer makes for the terminal's width.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_cli.terminal.parameters import (
    DRAFTING,
    ENGINE,
    ESSENTIALS,
    MEASURING,
    OPTIONS,
    OUTPUT,
    SAMPLING,
    Parameter,
    Signature,
)

PANELS = (ESSENTIALS, OPTIONS, MEASURING, SAMPLING, DRAFTING, ENGINE, OUTPUT)
"""Themes in the order in which they are shown."""
WIDEST_FLAGS = 32
HELP_ROW = ("-h, --help", "Show this page.")


def write_page(formatter: Any, *, command: str, text: str, signature: Signature, examples: Sequence[str],
               docs: str | None) -> None:  # fmt: skip
    """The help page of one command."""
    formatter.write_usage(command, " ".join(usage_pieces(signature.parameters)))
    write_text(formatter, text)
    panels = _by_panel(signature.parameters)
    for title, members in panels.items():
        rows = [_row(item) for item in members if not item.is_hidden]
        write_rows(formatter, title, [*rows, HELP_ROW] if title == list(panels)[-1] else rows)
    write_examples(formatter, examples)
    if docs is not None:
        write_text(formatter, f"More: {docs}", indent=0)


def usage_pieces(parameters: Iterable[Parameter]) -> list[str]:
    """`[OPTIONS] DRAFT [PROMPT]...`."""
    pieces = ["[OPTIONS]"]
    for item in parameters:
        if not item.flags:
            name = item.metavar if item.is_required else f"[{item.metavar}]"
            pieces.append(f"{name}..." if item.is_list else name)
    return pieces


def write_rows(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A heading and, below it, a line a name with what it means."""
    with formatter.section(title):
        formatter.write_dl(rows, col_max=WIDEST_FLAGS)


def write_text(formatter: Any, text: str, indent: int = 2) -> None:
    """Paragraphs, wrapped to the width."""
    if not text:
        return
    formatter.write_paragraph()
    formatter.current_indent += indent
    formatter.write_text(text)
    formatter.current_indent -= indent


def write_examples(formatter: Any, examples: Sequence[str]) -> None:
    """Commands to paste, each on a line of its own however wide the terminal is."""
    if examples:
        with formatter.section("Examples" if len(examples) > 1 else "Example"):
            formatter.write("".join(f"  {line}\n" for line in examples))


def _by_panel(parameters: Sequence[Parameter]) -> Mapping[str, list[Parameter]]:
    """Parameters by their theme, in the order of PANELS; arguments before options."""
    panels: dict[str, list[Parameter]] = {}
    for title in (*PANELS, *(item.panel for item in parameters)):
        members = [item for item in parameters if item.panel == title]
        if members:
            panels[title] = sorted(members, key=lambda item: bool(item.flags))
    return panels


def _row(item: Parameter) -> tuple[str, str]:
    if not item.flags:
        return item.metavar, item.help + (" [required]" if item.is_required else "")
    flags = sorted(item.flags, key=lambda flag: flag.startswith("--"))
    name = " / ".join([", ".join(flags), *item.off_flags])
    if not item.is_switch:
        name += f" {item.metavar}"
    return name, item.help + _note(item)


def _note(item: Parameter) -> str:
    """Whether an option must be given, or what it is without."""
    if item.is_required:
        return " [required]"
    if not item.shows_default or item.default is None or (item.is_switch and not item.off_flags):
        return ""
    if item.is_switch:
        shown = (item.flags if item.default else item.off_flags)[0].lstrip("-")
    else:
        shown = f"{item.default:g}" if isinstance(item.default, float) else str(item.default)
    return f" [default: {shown}]"
