"""A registry that finds its items by importing a package, so that a new item needs only a new file.

Without an import, the lines that register items are found in the text of files, because other lines may import torch.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from dflash_runtime.errors import UnsupportedError
from dflash_runtime.phrases import guess

T = TypeVar("T")


class Registry(Generic[T]):
    """Name -> item, in order of registration. `kind` is the noun for an item in messages.

    With `sets_name` a registered class gets its name as the attribute `name`.
    """

    def __init__(self, kind: str, *, sets_name: bool = False) -> None:
        self._kind = kind
        self._sets_name = sets_name
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers an item as `name`.

        Raises:
            ValueError: the name is registered already.
        """

        def decorate(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self._kind} {name!r} is registered twice")
            if self._sets_name:
                item.name = name  # type: ignore[attr-defined]
            self._items[name] = item
            return item

        return decorate

    def discover(self, package: str) -> None:
        """Import a package or module and every module in it, so that their decorators run."""
        folder = importlib.import_module(package)
        for module in pkgutil.iter_modules(getattr(folder, "__path__", ()), f"{package}."):
            importlib.import_module(module.name)

    def __getitem__(self, name: str) -> T:
        if name in self._items:
            return self._items[name]
        known = ", ".join(sorted(self._items))
        raise UnsupportedError(
            f"unknown {self._kind} {name!r}{guess(name, self._items)} (known: {known})",
            id=f"unknown-{self._kind.replace(' ', '-')}", field=self._kind, found=name, expected=known,
        )  # fmt: skip

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def values(self) -> list[T]:
        """All items, in order of registration."""
        return list(self._items.values())


@dataclass(frozen=True, slots=True)
class RegisteringFile:
    """A file of a package that registers items: its module, its text, and the names of the items."""

    module: str
    text: str
    names: tuple[str, ...]


def registering_files(package: str, table: str) -> list[RegisteringFile]:
    """Return the files of a package with lines `TABLE.register("name")`. Imports the package, but none of its files."""
    line = re.compile(rf'^@?{table}\.register\("([^"]+)"\)', re.MULTILINE)
    paths = (path for folder in importlib.import_module(package).__path__ for path in sorted(Path(folder).glob("*.py")))
    files = [RegisteringFile(path.stem, text := _text_of(path), tuple(line.findall(text))) for path in paths]
    return [file for file in files if file.names]


@cache
def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")
