"""The documentation pages of this release: their names, titles and text.

A wheel has the pages in `dflash_cli/docs`. A checkout has them in the folder `docs` of the repository.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import guess

SECTIONS = ("how-to", "reference", "explanation", "measurements")
"""The folders of pages, in the order in which they are listed."""


def topics() -> dict[str, str]:
    """Name of each page -> its title: the index and the tutorial first, then each section by name."""
    return {name: _title(page.read_text(encoding="utf-8")) for name, page in _pages().items()}


def text(topic: str) -> str:
    """The page as Markdown.

    Raises:
        UsageError: the page does not exist.
    """
    page = _pages().get(topic)
    if page is None:
        raise UsageError(
            f"no page {topic!r}{guess(topic, _pages())}",
            id="unknown-topic",
            field="TOPIC",
            found=topic,
            hint="dflash docs lists all pages",
        )
    return page.read_text(encoding="utf-8")


def _pages() -> dict[str, Traversable]:
    """Name of each page -> its file. Names are unique over all folders."""
    folder = _folder()
    found = {name: folder / f"{name}.md" for name in ("index", "tutorial")}
    for section in SECTIONS:
        pages = (item for item in (folder / section).iterdir() if item.name.endswith(".md"))
        found |= {item.name.removesuffix(".md"): item for item in sorted(pages, key=lambda item: item.name)}
    return found


def _folder() -> Traversable:
    packaged = files("dflash_cli") / "docs"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "docs"


def _title(page: str) -> str:
    """The first heading, without its mark."""
    return page.partition("\n")[0].removeprefix("# ")
