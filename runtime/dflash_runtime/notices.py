"""Warnings and notes that a function returns beside its value."""

from typing import Self


class Notice(str):
    """A sentence for the user, with an id in kebab-case that names the situation."""

    id: str

    def __new__(cls, text: str, *, id: str) -> Self:
        notice = super().__new__(cls, text)
        notice.id = id
        return notice

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, str]]:
        return (str(self),), {"id": self.id}
