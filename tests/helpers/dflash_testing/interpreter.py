"""Triton's interpreter lists every member of `triton.language` at every call of a device function; here only once."""

import inspect
from functools import cache
from typing import Any

from dflash_kernels.launch_config import HAS_TRITON


def remember_builtins() -> None:
    """Look through each patched module and class once. What is patched, and when, stays as it is.

    The interpreter's internals are its own: where they have changed, the kernels are interpreted at its usual speed.
    """
    if not HAS_TRITON:
        return
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr")):
        return
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def builtin_names(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        for name in builtin_names(package):
            member = getattr(package, name)
            if is_builtin(member):  # not within a device function that another one has called
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = patch_builtin
