"""The registry of lookups: ways to draft from a request's own text, without a draft model.

A lookup is one file in this package. It registers a class with the interface of `scheduling.text_index.TextIndex`.
"""

from collections.abc import Callable
from functools import cache

from dflash_runtime.registry import Registry
from dflash_runtime.scheduling.text_index import TextIndex

LOOKUPS: Registry[Callable[[], TextIndex]] = Registry("lookup")


@cache
def lookups() -> Registry[Callable[[], TextIndex]]:
    """Return the registry after importing every lookup of this package."""
    LOOKUPS.discover("dflash_runtime.drafts")
    return LOOKUPS
