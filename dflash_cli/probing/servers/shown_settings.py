"""Read settings from documents in forms that several engines share: lossy verification, adapters and own penalties.

Sources: SGLang's `srt/server_args.py` has the thresholds and `srt/environ.py` the simulated acceptance. vLLM's
`config/speculative.py` has the methods. vLLM shows its settings only with `VLLM_SERVER_DEV_MODE=1`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_cli.probing.servers.inference_server import MAX_MODELS, MAX_SHOWN_CHARS
from dflash_runtime.json_values import as_object, is_number
from dflash_runtime.phrases import shorten

THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""A draft token is accepted at this probability and more. 1.0 is exact."""
METHODS = ("rejection_sample_method", "acceptance_method", "draft_token_acceptance_method")
LOSSY_METHODS = ("synthetic", "typical", "fly", "lossy")
"""Words in the names of methods that accept tokens which the target would not choose."""
SIMULATED = ("synthetic_acceptance", "simulate_acc_len")
"""Words in the names of settings that simulate acceptance. Without a positive number they are off."""
MAX_DEPTH, MAX_FOUND = 8, 6


def lossy_settings(document: Any) -> str | None:
    """Return lossy settings as `name value`, separated by commas; None without such settings."""
    found = dict.fromkeys(_walk(document, MAX_DEPTH))
    return ", ".join(list(found)[:MAX_FOUND]) or None


def _walk(value: Any, depth: int) -> Iterator[str]:
    if depth and isinstance(value, list):
        for item in value:
            yield from _walk(item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for name, item in value.items():
            if _is_lossy(str(name).lower(), item):
                yield f"{str(name)[:60]} {str(item)[:60]}"
            yield from _walk(item, depth - 1)


def _is_lossy(name: str, value: Any) -> bool:
    if name in METHODS:
        return isinstance(value, str) and any(word in value.lower() for word in LOSSY_METHODS)
    numbers = [_number(item) for item in (value if isinstance(value, list) else [value])]
    if name in THRESHOLDS:
        return numbers[:1] != [None] and any(number is not None and 0 <= number < 1 for number in numbers)
    return any(word in name for word in SIMULATED) and any(number is not None and number > 0 for number in numbers)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        return None


def adapters_of(models: object, model: str) -> tuple[str, ...]:
    """The names in a list of models that have `model` as their parent."""
    names = [item.get("id") for item in _items(models) if item.get("parent") == model]
    return tuple(shorten(name, MAX_SHOWN_CHARS) for name in names if isinstance(name, str))


def parent_of(models: object, model: str) -> str | None:
    """The parent of `model` if it is an adapter, or None."""
    found = [item.get("parent") for item in _items(models) if item.get("id") == model]
    return next((name for name in found if isinstance(name, str) and name and name != model), None)


def _items(models: object) -> list[Mapping[str, Any]]:
    return [as_object(item) for item in models[:MAX_MODELS]] if isinstance(models, list) else []


def own_penalties(settings: object, neutral: Mapping[str, Any]) -> str | None:
    """`repeat_penalty 1.2`: the penalties in a document of defaults that differ from `neutral`, or None."""
    found = as_object(settings)
    names = [name for name, value in neutral.items() if is_number(found.get(name)) and found[name] != value]
    return ", ".join(f"{name} {found[name]:g}" for name in names) or None
