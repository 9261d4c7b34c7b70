"""`dflash docs`: show the documentation of this release, offline."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.terminal import console, documentation
from dflash_cli.terminal.parameters import Argument
from dflash_cli.terminal.requests import Request


@dataclass(frozen=True, kw_only=True)
class DocsRequest(Request):
    """Show a page of the documentation, or list all pages.

    A terminal shows the page in a pager, $PAGER if it is set. A pipe or a file receives the page as Markdown.
    """

    topic: Annotated[
        str | None,
        Argument(metavar="TOPIC", help="The page to show, such as tutorial. Default: list all pages."),
    ] = None


def command(request: DocsRequest) -> None:
    """Show one page, or list all pages by name and title."""
    if request.topic is not None:
        console.page(documentation.text(request.topic))
        return
    titles = documentation.topics()
    width = max(map(len, titles))
    for name, title in titles.items():
        console.result(f"{name:{width}}  {title}")
