"""Errors in tests: their kind, id and fields, never their wording."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dflash_runtime.errors import DFlashError


@contextmanager
def refuses(
    kind: type[DFlashError], id: str | None = None, **fields: Any
) -> Iterator[pytest.ExceptionInfo[DFlashError]]:
    """Require that the block raises exactly `kind`, with this id and these fields.

    `fields` are attributes of the error: `field`, `found`, `expected` or `path`. `path` is compared as text.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error.message}"
    wanted = {**fields, **({} if id is None else {"id": id})}
    found = {name: getattr(error, name) for name in wanted}
    if "path" in wanted:
        wanted["path"], found["path"] = str(wanted["path"]), str(found["path"])
    assert found == wanted, error.message
