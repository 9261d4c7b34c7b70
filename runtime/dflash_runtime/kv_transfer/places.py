"""What a user types for where hand-offs go -> a connector: a folder, or `name://HOST:PORT`."""

import torch

from dflash_runtime.errors import UsageError
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions, TransferRole
from dflash_runtime.kv_transfer.control_channel import Address

FOLDER = "file"


def open_connector(
    place: str, role: TransferRole, timeout_s: float = 60.0, device: torch.device | None = None
) -> Connector:
    """Open one side of a place; between two processes, wait until the other side has opened it too.

    Raises:
        UsageError: no such place, or one that cannot be had.
        PeerUnreachable: the other side did not come within `timeout_s`.
        UnsupportedError: what it needs is not installed, or not there.
    """
    name, rest = _split(place)
    return CONNECTORS[name](rest, OpenOptions(role, timeout_s, device))


def check_place(place: str) -> bool:
    """Whether a place is a folder, and not an address; opens nothing.

    Raises:
        UsageError: it is neither.
    """
    name, rest = _split(place)
    if name != FOLDER:
        Address.parse(rest)
    return name == FOLDER


def _split(place: str) -> tuple[str, str]:
    """A connector's name and what it opens."""
    CONNECTORS.discover("dflash_runtime.kv_transfer")
    name, mark, rest = place.partition("://")
    by_address = sorted(known for known in CONNECTORS if known != FOLDER)
    if not mark and place and place.partition(":")[0] not in by_address:
        return FOLDER, place
    if not mark or name not in by_address:
        known = ", ".join(f"{known}://HOST:PORT" for known in by_address)
        raise UsageError(f"{place!r} is no place for hand-offs, expected a folder, {known}")
    return name, rest
