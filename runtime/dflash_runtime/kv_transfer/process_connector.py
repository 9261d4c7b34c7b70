"""Hand-offs between two processes over torch.distributed: gloo for tensors on the host, nccl from GPU to GPU.

Each connector has a process group of its own, of two ranks, prefill being rank 0; it is not the program's default one,
so that any number can follow one another, and a program that has a default group keeps it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from dflash_runtime.errors import PeerUnreachable, UnsupportedError
from dflash_runtime.kv_transfer.carrier import Carrier, Staged, filled_bytes
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions, TransferRole
from dflash_runtime.kv_transfer.control_channel import Address, ControlChannel, bind
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec
from dflash_runtime.kv_transfer.peer_connector import PeerConnector, open_channel

dist: Any = torch.distributed  # whose stubs leave out half of what it has

Backend = Literal["gloo", "nccl"]

PIECE_BYTES = 64 << 20
"""Of what gloo is given at once, so that its time limit is on standing still and not on a payload's size."""

TENSORS_TAG, UNUSED_TAG = 0, 1

RANKS: Mapping[TransferRole, int] = {"prefill": 0, "decode": 1}


class GlooCarrier:
    """Tensors by way of the host's memory and TCP; what lies on a device is copied there first."""

    name = "gloo"
    takes_device = False

    def __init__(self, role: TransferRole, channel: ControlChannel, store: Any, timeout_s: float) -> None:
        self._other, self._is_stopped = 1 - RANKS[role], False
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # The address on which the two have met; by itself gloo takes that of the host's name, which may lead nowhere.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=channel.local_host)]
        self._group = dist.ProcessGroupGloo(store, RANKS[role], 2, options)

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """See `Carrier.stage`."""
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return Staged(ready, registration=[])

    def send(self, staged: Staged) -> None:
        """See `Carrier.send`.

        Nothing waits for it: the other side says when it has all, and a send to a process that was killed may not
        notice that, and would wait until its time is over.
        """
        pieces = self._pieces(staged.tensors)
        staged.registration.extend(self._group.send([piece], self._other, TENSORS_TAG) for piece in pieces)

    def release(self, staged: Staged) -> None:
        """See `Carrier.release`."""
        staged.registration.clear()

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """See `Carrier.allocate`; on the host."""
        return {name: empty_like_spec(spec) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        """See `Carrier.receive`."""
        for piece in self._pieces(tensors):
            self._group.recv([piece], self._other, TENSORS_TAG).wait()

    def stop(self) -> None:
        """See `Carrier.stop`.

        gloo has no call that ends a receive; another one that runs out of time closes the connection, and ends both.
        """
        self._is_stopped = True
        byte = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):
            self._group.recv([byte], self._other, UNUSED_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """See `Carrier.close`."""
        self._group = None

    def _pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for data in filled_bytes(tensors):
            for piece in data.split(PIECE_BYTES):
                if self._is_stopped:
                    raise RuntimeError("stopped")
                yield piece


class NcclCarrier:
    """Tensors from GPU to GPU, on a stream of their own.

    What is received belongs to the device's default stream: an engine that works on another one calls
    `record_stream` before it lets go of them.
    """

    name = "nccl"
    takes_device = True

    def __init__(self, role: TransferRole, device: torch.device | None, store: Any, timeout_s: float) -> None:
        self.device = device if device is not None else torch.device("cuda", torch.cuda.current_device())
        self._other = 1 - RANKS[role]
        # A transfer that fails ends its future here; torch's default would end the whole process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._stream = torch.cuda.Stream(self.device)
        self._group = dist.ProcessGroupNCCL(store, RANKS[role], 2, options)
        self._meet(role)

    def _meet(self, role: TransferRole) -> None:
        """Move a byte, since nccl connects with the first transfer, and what is wrong should be known now."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if role == "prefill":
            self.send(Staged({"": byte}))
        else:
            self.receive({"": byte}, {})

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """See `Carrier.stage`; what lies elsewhere is copied to this device."""
        with torch.cuda.stream(self._stream):
            staged = {name: tensor.detach().to(self.device).contiguous() for name, tensor in tensors.items()}
        return Staged(staged)

    def send(self, staged: Staged) -> None:
        """See `Carrier.send`."""
        with torch.cuda.stream(self._stream):
            for data in filled_bytes(staged.tensors):
                self._group.send([data], self._other, 0).wait()  # has the stream wait, not the host
        self._stream.synchronize()

    def release(self, staged: Staged) -> None:
        """See `Carrier.release`."""

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """See `Carrier.allocate`; of the default stream's memory, which may be in use until that is done."""
        with torch.cuda.stream(torch.cuda.default_stream(self.device)):
            return {name: empty_like_spec(spec, self.device) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        """See `Carrier.receive`."""
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self._stream):
            for data in filled_bytes(tensors):
                self._group.recv([data], self._other, 0).wait()
        self._stream.synchronize()

    def stop(self) -> None:
        """See `Carrier.stop`: a kernel that waits for the other GPU ends only so."""
        self._group.abort()

    def close(self) -> None:
        """See `Carrier.close`."""


class ProcessConnector(PeerConnector):
    """Opened on both sides within `timeout_s`; the prefill side listens at the address, the decode side connects.

    Raises:
        PeerUnreachable: the other side did not come in time.
        UsageError: the port cannot be had, or the other side was opened with another backend.
        UnsupportedError: nccl without it, or without a GPU.
    """

    def __init__(
        self,
        backend: Backend,
        role: TransferRole,
        address: Address,
        timeout_s: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        _check_backend(backend)
        store = _make_store(address, timeout_s) if role == "prefill" else None
        greeting = {"carrier": backend, "store_port": store.port if store is not None else 0}
        channel = open_channel(role, address, greeting, timeout_s)
        try:
            met = store or _find_store(channel, timeout_s)
            carrier: Carrier = (
                GlooCarrier(role, channel, met, timeout_s)
                if backend == "gloo"
                else NcclCarrier(role, device, met, timeout_s)
            )
        except RuntimeError as error:
            channel.close()
            raise PeerUnreachable(f"{backend} did not connect with {address} within {timeout_s:g} s") from error
        super().__init__(role, address, channel, carrier)


def _check_backend(backend: Backend) -> None:
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise UnsupportedError(f"{backend}:// needs a torch that has {backend}, and this one has not")
    if backend == "nccl" and not torch.cuda.is_available():
        raise UnsupportedError("nccl:// needs a GPU, and there is none here", hint="gloo:// does without")


def _make_store(address: Address, timeout_s: float) -> Any:
    """Where the ranks of a group find each other: at the address of the prefill side, on any free port."""
    server = bind(address, 0)
    port, limit = server.getsockname()[1], timedelta(seconds=timeout_s)
    return dist.TCPStore(
        address.host, port, 2, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=server.detach()
    )


def _find_store(channel: ControlChannel, timeout_s: float) -> Any:
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(channel.other_host, channel.greeting["store_port"], 2, is_master=False, timeout=limit)


def _open(backend: Backend, place: str, options: OpenOptions) -> Connector:
    return ProcessConnector(backend, options.role, Address.parse(place), options.timeout_s, options.device)


@CONNECTORS.register("gloo")
def open_gloo(place: str, options: OpenOptions) -> Connector:
    """See `OpenPlace`."""
    return _open("gloo", place, options)


@CONNECTORS.register("nccl")
def open_nccl(place: str, options: OpenOptions) -> Connector:
    """See `OpenPlace`."""
    return _open("nccl", place, options)
