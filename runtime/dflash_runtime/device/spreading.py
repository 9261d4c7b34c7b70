"""Spread a hosted target over GPUs and the host's memory: what was asked for, and what each device may take of it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_runtime.checkpoint.strict_json import parse_json
from dflash_runtime.device.host_memory import available_bytes
from dflash_runtime.device.settings import resolve_device
from dflash_runtime.errors import CheckpointNotFound, UnsupportedError, UsageError
from dflash_runtime.json_values import is_int
from dflash_runtime.models.placement import Spread

AUTO = "auto"
DISK = "disk"

KV_SHARE = 0.25
"""Share of the engine's device that is left for KV, of what is free beside a draft and steps."""

HOST_SHARE = 0.9
"""Share of the host's available memory that weights may take."""


def resolve_spread(text: str | None) -> Spread | None:
    """What `auto`, the name of a device, or a JSON file of modules and devices asks for.

    Raises:
        UnsupportedError: accelerate is not installed, or a device that does not exist.
        UsageError, CheckpointNotFound: what is none of the three.
    """
    if text is None:
        return None
    if find_spec("accelerate") is None:
        raise UnsupportedError(
            "--device-map needs accelerate, which is not installed", hint="pip install 'dflash-cli[big]'"
        )
    if text == AUTO:
        return Spread()
    if not text.endswith(".json"):
        return Spread({"": _read_device(text, f"--device-map {text}")})
    path = Path(text)
    if not path.is_file():
        raise CheckpointNotFound(f"--device-map {text}: no such file")
    stated = parse_json(path.read_bytes(), path)
    return Spread({module: _read_device(device, f"{text}: {module!r}") for module, device in stated.items()})


def share_out(device: torch.device, left: int, withheld: int, utilization: float) -> dict[int | str, int]:
    """Bytes of weights that each device may take; `left` of the engine's own, and of others all but `withheld`."""
    budgets: dict[int | str, int] = {}
    own = int(left * (1 - KV_SHARE))
    if device.type == "cpu":
        return {"cpu": own}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        others = max(0, free - int(total * (1 - utilization)) - withheld)
        budgets[number] = own if number == device.index else others
    return {**budgets, "cpu": int(available_bytes() * HOST_SHARE)}


def _read_device(value: Any, where: str) -> int | str:
    """A device as accelerate writes it."""
    if value == DISK:
        return DISK
    if not is_int(value) and not isinstance(value, str):
        raise UsageError(f"{where}: found {value!r}, expected the number of a GPU, cpu or disk")
    try:
        device = resolve_device(value if isinstance(value, str) else f"cuda:{value}")
    except UsageError as error:
        raise UsageError(f"{where}: found {value!r}, expected auto, a JSON file, cpu, cuda:N or disk") from error
    return "cpu" if device.type == "cpu" else device.index
