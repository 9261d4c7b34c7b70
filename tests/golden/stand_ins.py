"""Empty stand-ins for absent modules, so that an engine's own code can be imported on a machine without a GPU."""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

STAND_INS = "STAND_INS"
"""The environment variable that lists the modules to replace by empty stand-ins."""


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


class StandIn(metaclass=_Anything):
    """A class, a function or an object of an absent module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __class_getitem__(cls, key: object) -> Any:
        return StandIn

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of STAND_INS."""

    def __init__(self) -> None:
        self.names = set(filter(None, os.environ.get(STAND_INS, "").split(",")))

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name in self.names or name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def with_stand_ins(start: Callable[[], Any], own: str) -> Any:
    """Start an engine. If a module is absent, start this program again with a stand-in for it."""
    finder = StandIns()
    sys.meta_path.append(finder)
    try:
        return start()
    except ModuleNotFoundError as error:
        absent = error.name or ""
        root = absent.partition(".")[0]
        name = absent if root == own else root
        if name in finder.names:
            raise
        os.environ[STAND_INS] = ",".join(sorted({*finder.names, name}))
        os.execv(sys.executable, [sys.executable, *sys.argv])
