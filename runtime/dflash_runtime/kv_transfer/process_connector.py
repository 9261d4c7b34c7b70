"""Hand-offs between two processes over torch.distributed: gloo for tensors on the host, nccl from GPU to GPU.

Each connector creates its own process group of two ranks; prefill is rank 0. It is not the default group, so a program
can open any number of connectors one after another and keep its own default group.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from dflash_runtime.errors import PeerUnreachable, UnsupportedError
from dflash_runtime.kv_transfer.carrier import Carrier, Staged, filled_bytes
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions, TransferRole
from dflash_runtime.kv_transfer.control_channel import Address, ControlChannel, bind
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.messages import Greeting
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec
from dflash_runtime.kv_transfer.peer_connector import PeerConnector, open_channel

dist: Any = torch.distributed  # its type stubs are incomplete

Backend = Literal["gloo", "nccl"]

PIECE_BYTES = 64 << 20
"""The most bytes per gloo call. Its time limit then limits a stall, and not the size of a payload."""

TENSORS_TAG, UNUSED_TAG = 0, 1

RANKS: Mapping[TransferRole, int] = {"prefill": 0, "decode": 1}


class GlooCarrier:
    """Sends tensors from host memory over TCP. Tensors on a device are copied to the host first."""

    name = "gloo"
    takes_device = False

    def __init__(self, role: TransferRole, channel: ControlChannel, store: Any, timeout_s: float) -> None:
        self._other, self._is_stopped = 1 - RANKS[role], False
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # The address that connected the two. By default gloo looks up the host's name, which may not be reachable.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=channel.local_host)]
        self._group = dist.ProcessGroupGloo(store, RANKS[role], 2, options)

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return Staged(ready, registration=[])

    def send(self, staged: Staged) -> None:
        """See `Carrier.send`. Does not wait, because the other side confirms when it has all tensors.

        A send to a process that was killed may not notice it, and would wait until its time limit.
        """
        pieces = self._pieces(staged.tensors)
        staged.registration.extend(self._group.send([piece], self._other, TENSORS_TAG) for piece in pieces)

    def release(self, staged: Staged) -> None:
        staged.registration.clear()

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """See `Carrier.allocate`. The tensors are on the host."""
        return {name: empty_like_spec(spec) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        for piece in self._pieces(tensors):
            self._group.recv([piece], self._other, TENSORS_TAG).wait()

    def stop(self) -> None:
        """See `Carrier.stop`.

        gloo cannot end a receive by a call. A second receive that times out closes the connection and ends both.
        """
        self._is_stopped = True
        byte = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):
            self._group.recv([byte], self._other, UNUSED_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._group = None

    def _pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for data in filled_bytes(tensors):
            for piece in data.split(PIECE_BYTES):
                if self._is_stopped:
                    raise RuntimeError("stopped")
                yield piece


class NcclCarrier:
    """Sends tensors from GPU to GPU, on a stream of its own.

    Received tensors belong to the device's default stream. An engine on another stream must call `record_stream` before
    it releases them.
    """

    name = "nccl"
    takes_device = True

    def __init__(self, role: TransferRole, device: torch.device | None, store: Any, timeout_s: float) -> None:
        self.device = device if device is not None else torch.device("cuda", torch.cuda.current_device())
        self._other = 1 - RANKS[role]
        # A failed transfer ends its future. torch's default would end the whole process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._stream = torch.cuda.Stream(self.device)
        self._group = dist.ProcessGroupNCCL(store, RANKS[role], 2, options)
        self._meet(role)

    def _meet(self, role: TransferRole) -> None:
        """Move one byte. nccl connects at the first transfer, and errors should appear when the connector opens."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if role == "prefill":
            self.send(Staged({"": byte}))
        else:
            self.receive({"": byte}, {})

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """See `Carrier.stage`. Tensors elsewhere are copied to this device."""
        with torch.cuda.stream(self._stream):
            staged = {name: tensor.detach().to(self.device).contiguous() for name, tensor in tensors.items()}
        return Staged(staged)

    def send(self, staged: Staged) -> None:
        with torch.cuda.stream(self._stream):
            for data in filled_bytes(staged.tensors):
                self._group.send([data], self._other, 0).wait()  # the stream waits, not the host
        self._stream.synchronize()

    def release(self, staged: Staged) -> None:
        """See `Carrier.release`."""

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """See `Carrier.allocate`. The memory is the default stream's, so its queued work may still use it."""
        with torch.cuda.stream(torch.cuda.default_stream(self.device)):
            return {name: empty_like_spec(spec, self.device) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._stream):
            for data in filled_bytes(tensors):
                self._group.recv([data], self._other, 0).wait()
        self._stream.synchronize()

    def stop(self) -> None:
        """See `Carrier.stop`. Only an abort ends a kernel that waits for the other GPU."""
        self._group.abort()

    def close(self) -> None:
        """See `Carrier.close`."""


def open_process_connector(backend: Backend, location: str, options: OpenOptions) -> Connector:
    """Open a connector over gloo or nccl. The prefill side listens at the address, and the decode side connects.

    Raises:
        PeerUnreachable: the other side did not open within the time limit.
        UsageError: the port is not available, or the other side uses another backend.
        UnsupportedError: torch lacks the backend, or nccl finds no GPU.
    """
    _check_backend(backend)
    address, role, timeout_s = Address.parse(location), options.role, options.timeout_s
    store = _make_store(address, timeout_s) if role == "prefill" else None
    greeting = Greeting(carrier=backend, store_port=store.port if store is not None else 0)
    channel = open_channel(address, greeting, options)
    try:
        if store is None:
            limit = timedelta(seconds=timeout_s)
            store = dist.TCPStore(channel.other_host, channel.greeting.store_port, 2, is_master=False, timeout=limit)
        carrier: Carrier = (
            GlooCarrier(role, channel, store, timeout_s)
            if backend == "gloo"
            else NcclCarrier(role, options.device, store, timeout_s)
        )
    except RuntimeError as error:
        channel.close()
        raise PeerUnreachable(
            f"{backend} did not connect to {address} within {timeout_s:g} s",
            id="no-connection", field="address", found=str(address),
        ) from error  # fmt: skip
    return PeerConnector(role, address, channel, carrier)


CONNECTORS.register("gloo")(partial(open_process_connector, "gloo"))
CONNECTORS.register("nccl")(partial(open_process_connector, "nccl"))


def _check_backend(backend: Backend) -> None:
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise UnsupportedError(f"{backend}:// needs a torch built with {backend}", id="backend-missing", found=backend)
    if backend == "nccl" and not torch.cuda.is_available():
        raise UnsupportedError("nccl:// needs a GPU", id="gpu-missing", hint="use gloo://, which needs no GPU")


def _make_store(address: Address, timeout_s: float) -> Any:
    """The store where the ranks of a group find each other: on the prefill side's host, at any free port."""
    server = bind(address, 0)
    port, limit = server.getsockname()[1], timedelta(seconds=timeout_s)
    return dist.TCPStore(
        address.host, port, 2, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=server.detach()
    )
