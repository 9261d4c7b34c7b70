"""Warnings and notes that a function returns beside its value."""

from typing import Self


class Notice(str):
    """A sentence for the user.

    id      the situation in kebab-case
    field   the option, key or tensor that it is about, if there is one
    """

    id: str
    field: str | None

    def __new__(cls, text: str, *, id: str, field: str | None = None) -> Self:
        notice = super().__new__(cls, text)
        notice.id, notice.field = id, field
        return notice

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, str | None]]:
        return (str(self),), {"id": self.id, "field": self.field}
