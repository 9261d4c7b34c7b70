"""Hand-offs that the decode side reads out of the prefill side's memory, by NIXL: RDMA, NVLink or shared memory.

Messages are those of every connector between processes. An offer says where the tensors lie; the other side reads them
there and says that it has them, and only then is the memory let go of. NIXL's UCX backend chooses the way; it moves
host memory as well, so that it runs without a GPU.

Source: the Python interface of NIXL 1.5, `nixl._api`.
"""

import os
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.errors import UnsupportedError
from dflash_runtime.kv_transfer.carrier import Staged, filled_bytes
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions, TransferRole
from dflash_runtime.kv_transfer.control_channel import Address
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec
from dflash_runtime.kv_transfer.peer_connector import PeerConnector, open_channel

BACKEND = "UCX"
INSTALL = "pip install 'dflash-cli[nixl]'"

LOOK_S = 50e-6
"""How long until it is looked again whether a read is done."""

DONE = b"done"
"""What the other side is notified of by NIXL once a read is done."""

SLOWEST_BYTES_PER_S = 50e6
"""A read that is slower, by more than the connector's time limit, stands still."""

Region = tuple[int, int, int]
"""Address, bytes, device: what NIXL takes for a piece of memory."""


class NixlCarrier:
    """The receiver reads; sending is letting it.

    Tensors are received on `device`, by default the host. What is received on a GPU belongs to its default stream.
    """

    name = "nixl"

    def __init__(self, device: torch.device | None, timeout_s: float) -> None:
        self._agent = _make_agent()
        self._device = device if device is not None else torch.device("cpu")
        self.takes_device = self._device.type == "cuda"
        self._timeout_s = timeout_s
        self._known: list[Region] = []
        self._other = ""
        self._is_stopped = False

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """See `Carrier.stage`; a payload is registered as one, so all of it lies where its largest tensor does."""
        if not tensors:
            return Staged({}, {"regions": []})
        device = max(tensors.values(), key=lambda tensor: tensor.nbytes).device
        staged = {name: tensor.detach().to(device).contiguous() for name, tensor in tensors.items()}
        filled = filled_bytes(staged)
        if not filled:
            return Staged(staged, {"regions": []})
        _wait_for_device(device)
        registration = self._agent.register_memory(filled)
        metadata = self._agent.get_partial_agent_metadata(registration, True)
        directions = {"agent": b64encode(metadata).decode(), "memory": _memory(device), "regions": _regions(filled)}
        return Staged(staged, directions, registration)

    def send(self, staged: Staged) -> None:
        """See `Carrier.send`: help the other side to read, until it says that it has; some ways need this side too."""
        if staged.registration is not None:
            self._look_until(lambda: bool(self._agent.get_new_notifs()), staged.tensors)

    def release(self, staged: Staged) -> None:
        """See `Carrier.release`."""
        if staged.registration is not None:
            self._agent.deregister_memory(staged.registration)

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """See `Carrier.allocate`."""
        return {name: empty_like_spec(spec, self._device) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        """See `Carrier.receive`."""
        filled = filled_bytes(tensors)
        regions: list[Region] = [(address, size, device) for address, size, device in directions["regions"]]
        if [data.numel() for data in filled] != [size for _, size, _ in regions]:
            raise RuntimeError("what is offered has not the sizes that its header says")
        if not filled:
            return
        _wait_for_device(self._device)  # its memory may be in use until all that is queued there is done
        registration = self._agent.register_memory(filled)
        try:
            other = self._meet(directions["agent"], regions)
            here = self._agent.get_xfer_descs(filled)
            self._read(here, self._agent.get_xfer_descs(regions, directions["memory"]), other, tensors)
        finally:
            self._agent.deregister_memory(registration)

    def stop(self) -> None:
        """See `Carrier.stop`."""
        self._is_stopped = True

    def close(self) -> None:
        """See `Carrier.close`."""
        self._agent = None

    def _meet(self, metadata: str, regions: list[Region]) -> str:
        """The other agent's name, with what it says of its memory.

        NIXL adds that to what it knows already. Where memory was let go of and registered anew, the keys it knows may
        be void, so there everything is forgotten first; that costs connecting again.
        """
        if _overlap(self._known, regions):
            self._agent.remove_remote_agent(self._other)
            self._known = []
        name = self._agent.add_remote_agent(b64decode(metadata))
        self._other = name.decode() if isinstance(name, bytes) else name
        self._known += regions
        return self._other

    def _read(self, here: Any, there: Any, other: str, tensors: Mapping[str, Tensor]) -> None:
        handle = self._agent.initialize_xfer("READ", here, there, other, DONE)
        states = [self._agent.transfer(handle)]

        def has_ended() -> bool:
            states[0] = states[0] if states[0] != "PROC" else self._agent.check_xfer_state(handle)
            return bool(states[0] != "PROC")

        try:
            self._look_until(has_ended, tensors)
        finally:
            with suppress(Exception):  # one that is not done may not be released; NIXL does it with the agent
                self._agent.release_xfer_handle(handle)
        if states[0] != "DONE":
            raise RuntimeError(f"NIXL's read ended with {states[0]}")

    def _look_until(self, has_ended: Callable[[], bool], tensors: Mapping[str, Tensor]) -> None:
        """Let NIXL get on. It has a thread for that, which would take all of a core all the time."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        until = time.monotonic() + self._timeout_s + num_bytes / SLOWEST_BYTES_PER_S
        while not has_ended():
            if self._is_stopped or time.monotonic() > until:
                raise RuntimeError("stopped" if self._is_stopped else f"NIXL moved {num_bytes} bytes too slowly")
            time.sleep(LOOK_S)


class NixlConnector(PeerConnector):
    """Opened on both sides within `timeout_s`; the prefill side listens at the address, the decode side connects.

    Raises:
        PeerUnreachable: the other side did not come in time.
        UsageError: the port cannot be had, or the other side was opened with another connector.
        UnsupportedError: NIXL is not installed.
    """

    def __init__(
        self, role: TransferRole, address: Address, timeout_s: float = 60.0, device: torch.device | None = None
    ) -> None:
        carrier = NixlCarrier(device, timeout_s)
        super().__init__(role, address, open_channel(role, address, {"carrier": carrier.name}, timeout_s), carrier)


@CONNECTORS.register("nixl")
def open_nixl(place: str, options: OpenOptions) -> Connector:
    """See `OpenPlace`."""
    return NixlConnector(options.role, Address.parse(place), options.timeout_s, options.device)


def _make_agent() -> Any:
    for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):  # both write to stdout, where results go
        os.environ.setdefault(name, "FATAL")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError)
        reason = "which is not installed" if is_absent else f"which cannot be imported: {error}"
        raise UnsupportedError(f"nixl:// needs nixl, {reason}", hint=INSTALL) from error
    agent = nixl_agent(f"dflash-{uuid.uuid4()}", nixl_agent_config(backends=[BACKEND], enable_prog_thread=False))
    if BACKEND not in agent.backends:
        raise UnsupportedError(f"nixl:// needs NIXL's {BACKEND} plugin, which is not there", hint=INSTALL)
    return agent


def _regions(filled: list[Tensor]) -> list[Region]:
    return [(data.data_ptr(), data.numel(), max(data.get_device(), 0)) for data in filled]


def _overlap(known: list[Region], new: list[Region]) -> bool:
    return any(
        device == other_device and start < other_start + other_size and other_start < start + size
        for start, size, device in new
        for other_start, other_size, other_device in known
    )


def _memory(device: torch.device) -> str:
    """NIXL's word for memory of the host, or of a GPU."""
    return "DRAM" if device.type == "cpu" else "VRAM"


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
        torch.cuda.default_stream(device).synchronize()
