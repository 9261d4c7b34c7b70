"""Open the connector for the location of hand-offs that a user gave: a folder, or `name://HOST:PORT`.

A malformed location is refused without an import of torch.
"""

import os
from typing import TYPE_CHECKING

from dflash_runtime.errors import UsageError
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions, TransferRole
from dflash_runtime.kv_transfer.control_channel import SECRET, Address
from dflash_runtime.registry import registering_files

if TYPE_CHECKING:
    import torch

PACKAGE = "dflash_runtime.kv_transfer"
FOLDER = "file"


def open_connector(
    location: str,
    role: TransferRole,
    timeout_s: float = 60.0,
    device: "torch.device | None" = None,
    secret: str | None = None,
) -> Connector:
    """Open one side of a location. A connector between two processes waits until the other side is open too.

    Both processes need the same `secret`, by default the text of DFLASH_HANDOFF_SECRET or an empty one.

    Raises:
        UsageError: the location is malformed, names no known connector, or cannot be opened.
        PeerUnreachable: the other side did not connect within `timeout_s`.
        UnsupportedError: a package or device that the connector needs is missing.
    """
    name, rest = _split(location)
    CONNECTORS.discover(PACKAGE)
    given = os.environ.get(SECRET, "") if secret is None else secret
    return CONNECTORS[name](rest, OpenOptions(role, timeout_s, device, given))


def names_folder(location: str) -> bool:
    """Whether a location is a folder and not an address. Opens nothing.

    Raises:
        UsageError: it is neither.
    """
    name, rest = _split(location)
    if name != FOLDER:
        Address.parse(rest)
    return name == FOLDER


def _split(location: str) -> tuple[str, str]:
    """A connector's name, and the folder or address that it opens."""
    name, mark, rest = location.partition("://")
    in_files = (known for file in registering_files(PACKAGE, "CONNECTORS") for known in file.names)
    by_address = sorted({*CONNECTORS, *in_files} - {FOLDER})
    if not mark and location and location.partition(":")[0] not in by_address:
        return FOLDER, location
    if not mark or name not in by_address:
        known = ", ".join(f"{known}://HOST:PORT" for known in by_address)
        raise UsageError(field="location of hand-offs", found=location, expected=f"a folder, {known}")
    return name, rest
