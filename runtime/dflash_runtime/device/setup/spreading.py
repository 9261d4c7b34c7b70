"""Spread a hosted target over GPUs and host memory: read `--device-map`, and limit the weights of each device."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_runtime.checkpoint.stored.strict_json import read_json
from dflash_runtime.device.capacity.host_memory import available_bytes
from dflash_runtime.device.setup.settings import resolve_device
from dflash_runtime.engine_config import check_device_map
from dflash_runtime.errors import CheckpointNotFound, UnsupportedError, UsageError
from dflash_runtime.models.placement import Spread

AUTO = "auto"
DISK = "disk"

KV_SHARE = 0.25
"""Share of the engine's device that stays free for KV, of the memory left after draft and working memory."""

HOST_SHARE = 0.9
"""Share of the host's available memory that weights may use."""


def resolve_spread(text: str | None) -> Spread | None:
    """Read a device map: `auto`, the name of a device, or the path of a JSON file that maps modules to devices.

    Raises:
        UnsupportedError: accelerate is not installed, or a device does not exist.
        UsageError: the text or a value in the file is not a device.
        CheckpointNotFound: the file does not exist.
    """
    if text is None:
        return None
    if find_spec("accelerate") is None:
        raise UnsupportedError(
            "--device-map needs accelerate, which is not installed",
            id="no-accelerate", field="--device-map", found=text, hint="pip install 'dflash-cli[big]'",
        )  # fmt: skip
    if text == AUTO:
        return Spread()
    if not text.endswith(".json"):
        return Spread({"": _read_device(text, "--device-map")})
    path = Path(text)
    if not path.exists():
        raise CheckpointNotFound(field="--device-map", found=text, expected="a file that exists")
    stated = read_json(path)
    check_device_map(stated, path)
    return Spread({module: _read_device(device, module, path) for module, device in stated.items()})


def share_out(device: torch.device, left: int, withheld: int, utilization: float) -> dict[int | str, int]:
    """Bytes of weights that each device may hold.

    `left` bytes are free on the engine's device. On every other GPU, `withheld` bytes stay free.
    """
    budgets: dict[int | str, int] = {}
    own = int(left * (1 - KV_SHARE))
    if device.type == "cpu":
        return {"cpu": own}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        others = max(0, free - int(total * (1 - utilization)) - withheld)
        budgets[number] = own if number == device.index else others
    return {**budgets, "cpu": int(available_bytes() * HOST_SHARE)}


def _read_device(value: Any, field: str, path: Path | None = None) -> int | str:
    """A device as accelerate writes it: the number of a GPU, `cpu` or `disk`."""
    if value == DISK:
        return DISK
    try:
        device = resolve_device(value if isinstance(value, str) else f"cuda:{value}")
    except UsageError as error:
        expected = "auto, a JSON file, cpu, cuda:N or disk" if path is None else "cpu, cuda:N or disk"
        raise UsageError(path=path, field=field, found=value, expected=expected) from error
    return "cpu" if device.type == "cpu" else device.index
