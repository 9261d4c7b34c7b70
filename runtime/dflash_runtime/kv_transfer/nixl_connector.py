"""Hand-offs over NIXL: the decode side reads the prefill side's memory by RDMA, NVLink or shared memory.

Messages are the same as for every connector between processes. An offer says where the tensors are. The other side
reads them there and confirms, and only then is their memory released. NIXL's UCX backend chooses the transport. It can
also move host memory, so it runs without a GPU.

Source: the Python interface of NIXL 1.5, `nixl._api`.
"""

import os
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from dflash_runtime.documents import OPTIONAL, from_json, to_json
from dflash_runtime.errors import InvalidHandoff, UnsupportedError
from dflash_runtime.kv_transfer.carrier import Staged, filled_bytes
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions
from dflash_runtime.kv_transfer.control_channel import Address
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.messages import Greeting
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec
from dflash_runtime.kv_transfer.peer_connector import PeerConnector, open_channel

BACKEND = "UCX"
INSTALL = "pip install 'dflash-cli[nixl]'"

LOOK_S = 50e-6
"""Time between two checks whether a read is done."""

DONE = b"done"
"""The notification that NIXL sends to the other side when a read is done."""

SLOWEST_BYTES_PER_S = 50e6
"""A read counts as stalled after its time at this rate plus the connector's time limit."""

Region = tuple[int, int, int]
"""A piece of memory for NIXL: address, bytes, device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """Where the tensors of an offer are: pieces of memory of one agent."""

    agent: Annotated[str | None, OPTIONAL, "NIXL's metadata of the agent, in base64"] = None
    memory: Annotated[str | None, OPTIONAL, "DRAM (host) or VRAM (GPU)"] = None
    regions: tuple[Region, ...] = ()


class NixlCarrier:
    """Moves tensors by a read of the receiver. The sender only waits for it.

    Tensors are received on `device`, by default the host. Tensors received on a GPU belong to its default stream.
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
        """See `Carrier.stage`. NIXL registers a payload as a whole, so all tensors go to the largest one's device."""
        if not tensors:
            return Staged({}, to_json(Directions()))
        device = max(tensors.values(), key=lambda tensor: tensor.nbytes).device
        staged = {name: tensor.detach().to(device).contiguous() for name, tensor in tensors.items()}
        filled = filled_bytes(staged)
        if not filled:
            return Staged(staged, to_json(Directions()))
        _wait_for_device(device)
        registration = self._agent.register_memory(filled)
        metadata = self._agent.get_partial_agent_metadata(registration, True)
        directions = Directions(
            agent=b64encode(metadata).decode(),
            memory="DRAM" if device.type == "cpu" else "VRAM",
            regions=tuple((data.data_ptr(), data.numel(), max(data.get_device(), 0)) for data in filled),
        )
        return Staged(staged, to_json(directions), registration)

    def send(self, staged: Staged) -> None:
        """See `Carrier.send`. Runs NIXL until the other side has read, since some transports need this side too."""
        if staged.registration is not None:
            self._look_until(lambda: bool(self._agent.get_new_notifs()), staged.tensors)

    def release(self, staged: Staged) -> None:
        if staged.registration is not None:
            self._agent.deregister_memory(staged.registration)

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        return {name: empty_like_spec(spec, self._device) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        filled = filled_bytes(tensors)
        there = from_json(Directions, directions, error=InvalidHandoff)
        if [data.numel() for data in filled] != [size for _, size, _ in there.regions]:
            raise RuntimeError("the offered memory differs in size from its header")
        if not filled:
            return
        _wait_for_device(self._device)  # queued work may still use the memory of these tensors
        registration = self._agent.register_memory(filled)
        try:
            other = self._meet(there)
            here = self._agent.get_xfer_descs(filled)
            self._transfer(here, self._agent.get_xfer_descs(list(there.regions), there.memory), other, tensors)
        finally:
            self._agent.deregister_memory(registration)

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._agent = None

    def _meet(self, there: Directions) -> str:
        """Add the other agent's metadata about its memory, and return its name.

        NIXL keeps the metadata of earlier calls. Keys of memory that was released and registered again may be invalid.
        If new regions overlap known ones, the agent is removed first, and the two agents connect again.
        """
        if _overlap(self._known, there.regions):
            self._agent.remove_remote_agent(self._other)
            self._known = []
        name = self._agent.add_remote_agent(b64decode(there.agent or ""))
        self._other = name.decode() if isinstance(name, bytes) else name
        self._known += there.regions
        return self._other

    def _transfer(self, here: Any, there: Any, other: str, tensors: Mapping[str, Tensor]) -> None:
        handle = self._agent.initialize_xfer("READ", here, there, other, DONE)
        states = [self._agent.transfer(handle)]

        def has_ended() -> bool:
            states[0] = states[0] if states[0] != "PROC" else self._agent.check_xfer_state(handle)
            return bool(states[0] != "PROC")

        try:
            self._look_until(has_ended, tensors)
        finally:
            with suppress(Exception):  # an unfinished transfer cannot be released; NIXL releases it with the agent
                self._agent.release_xfer_handle(handle)
        if states[0] != "DONE":
            raise RuntimeError(f"NIXL's read ended with {states[0]}")

    def _look_until(self, has_ended: Callable[[], bool], tensors: Mapping[str, Tensor]) -> None:
        """Run NIXL until `has_ended`. NIXL's own progress thread is off, since it would always use a whole core."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        until = time.monotonic() + self._timeout_s + num_bytes / SLOWEST_BYTES_PER_S
        while not has_ended():
            if self._is_stopped or time.monotonic() > until:
                raise RuntimeError("stopped" if self._is_stopped else f"NIXL moved {num_bytes} bytes too slowly")
            time.sleep(LOOK_S)


@CONNECTORS.register("nixl")
def open_nixl(location: str, options: OpenOptions) -> Connector:
    """Open a connector over NIXL. The prefill side listens at the address, and the decode side connects.

    Raises:
        PeerUnreachable: the other side did not open within the time limit.
        UsageError: the port is not available, or the other side uses another connector.
        UnsupportedError: NIXL is not installed.
    """
    address, carrier = Address.parse(location), NixlCarrier(options.device, options.timeout_s)
    channel = open_channel(address, Greeting(carrier=carrier.name), options)
    return PeerConnector(options.role, address, channel, carrier)


def _make_agent() -> Any:
    for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):  # both write to stdout, where results go
        os.environ.setdefault(name, "FATAL")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError)
        reason = "which is not installed" if is_absent else f"which cannot be imported: {error}"
        raise UnsupportedError(f"nixl:// needs nixl, {reason}", id="nixl-missing", hint=INSTALL) from error
    agent = nixl_agent(f"dflash-{uuid.uuid4()}", nixl_agent_config(backends=[BACKEND], enable_prog_thread=False))
    if BACKEND not in agent.backends:
        text = f"nixl:// needs NIXL's {BACKEND} plugin, which is not installed"
        raise UnsupportedError(text, id="nixl-plugin-missing", hint=INSTALL)
    return agent


def _overlap(known: Sequence[Region], new: Sequence[Region]) -> bool:
    return any(
        device == other_device and start < other_start + other_size and other_start < start + size
        for start, size, device in new
        for other_start, other_size, other_device in known
    )


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
        torch.cuda.default_stream(device).synchronize()
