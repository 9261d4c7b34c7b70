"""Adapters in the list of models of vLLM and SGLang, where each names the model that it belongs to."""

import copy
from collections.abc import Mapping
from typing import Any

from dflash_cli.probing.servers.inference_server import MAX_MODELS, MAX_SHOWN_CHARS, InferenceServer
from dflash_runtime.json_values import as_object
from dflash_runtime.phrases import shorten


def adapters_of(models: object, model: str) -> tuple[str, ...]:
    """The names in a list of models that have `model` as their parent."""
    names = [item.get("id") for item in _items(models) if item.get("parent") == model]
    return tuple(shorten(name, MAX_SHOWN_CHARS) for name in names if isinstance(name, str))


def parent_of(models: object, model: str) -> str | None:
    """The parent of `model` if it is an adapter, or None."""
    found = [item.get("parent") for item in _items(models) if item.get("id") == model]
    return next((name for name in found if isinstance(name, str) and name and name != model), None)


def with_model(server: InferenceServer, model: str | None) -> InferenceServer | None:
    """The same server with requests for another model; None without one."""
    if model is None:
        return None
    other = copy.copy(server)
    other.model = model
    return other


def _items(models: object) -> list[Mapping[str, Any]]:
    return [as_object(item) for item in models[:MAX_MODELS]] if isinstance(models, list) else []
