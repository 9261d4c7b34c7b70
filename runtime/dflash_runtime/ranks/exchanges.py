"""Exchanges of tensors over torch.distributed: gloo in host memory, NCCL and peer memory between GPUs.

The one-shot sum reads the other GPUs' numbers from their memory, so a small message needs one launch and one round
trip. If a norm follows, its launch adds up the numbers of all ranks, which they write into each other's memory
(`dflash_kernels.norms.pushed_sum`). Both use torch's symmetric memory without multicast, and only if they give equal
bits on all ranks at start.

Axis letters: N ranks, P parts, T rows, D width.
"""

import logging
import math
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from dflash_kernels.launch import HAS_TRITON
from dflash_kernels.norms.pushed_sum import SLOTS, Rooms
from dflash_kernels.norms.rope_norm import add_rms_norm_of_ranks
from dflash_runtime.errors import PeerUnreachable, UnsupportedError
from dflash_runtime.ranks.rank_group import ENDED, LIMIT_S, Explain, Ranks, no_explanation

dist: Any = torch.distributed  # its type stubs are incomplete

LOCAL_HOST = "127.0.0.1"

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Settings of NCCL and of torch: some machines report multicast over NVLink and hang or fail when it is used."""

ONE_SHOT_BYTES = 2 * 2**20
"""The largest message of a one-shot sum between two GPUs. Each GPU reads a message from every other GPU."""

PARTS_BYTES = 128 * 2**10
"""The largest message of several parts. Larger parts are added up first, which takes a launch of a few microseconds."""

LOOK = timedelta(seconds=0.2)
"""The time after which a wait in torch returns to Python."""

REASON_S = 5.0
"""Seconds in which the reason arrives why another rank has ended, after its connection was lost."""

MESSAGE_NUMBERS = 2**19
"""The most numbers of all rows that ranks write into each other's memory for one norm, 8 bytes each."""

MESSAGE_ROWS = 128
"""The most rows of such a message. From more rows on, a sum of its own is faster."""

ALIGNMENT = 16
"""A one-shot sum moves multiples of this many bytes."""

logger = logging.getLogger(__name__)


class GlooExchange:
    """Exchanges tensors in host memory over the loopback interface.

    Raises:
        PeerUnreachable: from every method, if another rank has ended or did not take part within the time limit.
    """

    def __init__(
        self, store: Any, rank: int, size: int, explain: Explain = no_explanation, limit_s: float = LIMIT_S
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=limit_s)
        # By default gloo looks up the host's name, which may not be reachable.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOCAL_HOST)]
        self._explain, self._size = explain, size
        self._group = self._checked(lambda: dist.ProcessGroupGloo(store, rank, size, options))

    def sum(self, tensor: Tensor) -> Tensor:
        """See `Exchange`."""
        self._checked(lambda: _wait_for(self._group.allreduce([tensor])))
        return tensor

    def rooms_for(self, parts: Tensor) -> None:
        """See `Exchange`."""

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Exchange`."""
        found = tensor.new_empty((self._size, *tensor.shape))
        if tensor.numel():
            self._checked(lambda: _wait_for(self._group.allgather([list(found)], [tensor])))
        return found

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # torch's errors of lost connections and of time limits
            reason = self._explain(REASON_S)
            text = str(error).strip().split("\n")[0]
            raise reason or PeerUnreachable(f"another rank has ended: {text}", id=ENDED) from error


def _wait_for(work: Any) -> None:
    """Wait for an exchange, and return to Python from time to time: only there a signal such as Ctrl-C is noticed."""
    while not work.is_completed():
        with suppress(RuntimeError):  # not completed in time, or its error, which the last call raises again
            work.wait(LOOK)
    work.wait()


class NcclExchange:
    """Exchanges tensors between GPUs. Every method only queues work, so that CUDA graphs can capture it."""

    def __init__(self, size: int, one_shot: "OneShotSum | None") -> None:
        self._size, self.one_shot = size, one_shot

    def sum(self, tensor: Tensor) -> Tensor:
        """See `Exchange`."""
        one_shot = self.one_shot
        if len(tensor) > 1 and tensor.numel() * tensor.element_size() > PARTS_BYTES:
            tensor = tensor.sum(0, keepdim=True)
        if one_shot is not None and one_shot.takes(tensor):
            return one_shot(tensor)
        dist.all_reduce(tensor)
        return tensor

    def rooms_for(self, parts: Tensor) -> Rooms | None:
        """See `Exchange`."""
        return None if self.one_shot is None else self.one_shot.rooms_for(parts)

    def gather(self, tensor: Tensor) -> Tensor:
        """See `Exchange`."""
        found = tensor.new_empty((self._size, *tensor.shape))
        dist.all_gather_into_tensor(found, tensor)
        return found


class OneShotSum:
    """The sum of a small message, read from the memory of all GPUs in one launch."""

    def __init__(self, device: torch.device, rank: int, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._name = dist.group.WORLD.group_name
        self._rooms: dict[torch.dtype, Tensor] = {}
        self._largest = ONE_SHOT_BYTES // (size - 1)
        for dtype in (torch.bfloat16, torch.float32):
            room = symmetric.empty(ONE_SHOT_BYTES // dtype.itemsize, dtype=dtype, device=device)
            symmetric.rendezvous(room, self._name)
            self._rooms[dtype] = room
        own = symmetric.empty((SLOTS, size, MESSAGE_NUMBERS), dtype=torch.int64, device=device)
        room_of = symmetric.rendezvous(own, self._name).get_buffer
        addresses = [room_of(other, own.shape, own.dtype).data_ptr() for other in range(size)]
        counts = torch.zeros(MESSAGE_ROWS, dtype=torch.int32, device=device)
        self._pushed = Rooms(own, torch.tensor(addresses, device=device), counts, rank)
        self._width = 0
        self.clear()

    def clear(self) -> None:
        """Forget all messages. Until this has ended on all ranks, none may use the sum."""
        self._width = 0
        self._pushed.own.zero_()
        self._pushed.counts.zero_()
        torch.cuda.synchronize(self._pushed.own.device)

    def rooms_for(self, parts: Tensor) -> Rooms | None:
        """See `Exchange`. All rows have the width of the first ones."""
        _, num_rows, width = parts.shape
        self._width = self._width or width
        return self._pushed if width == self._width and self._pushed.takes(num_rows, width) else None

    def takes(self, tensor: Tensor) -> bool:
        """Whether this sum takes the dtype and the size of a tensor."""
        size = tensor.numel() * tensor.element_size()
        return tensor.dtype in self._rooms and 0 < size <= self._largest and size % ALIGNMENT == 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks. All ranks add in the order of ranks."""
        room = self._rooms[tensor.dtype][: tensor.numel()].view_as(tensor)
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(room, tensor, "sum", self._name)
        return found


def join(
    rank: int,
    size: int,
    device: torch.device,
    store: Any,
    all_reduce: str,
    explain: Explain = no_explanation,
) -> Ranks:
    """Join the other ranks of this machine, and return them. `all_reduce` is the engine's setting.

    Raises:
        PeerUnreachable: another rank has ended, or did not join within the time limit.
        UnsupportedError: `all_reduce` is "one-shot" and these GPUs lack it, or torch has a default process group here.
    """
    host = GlooExchange(dist.PrefixStore("host", store), rank, size, explain)
    if device.type == "cpu":
        return Ranks(rank, size, host, host, explain)
    if dist.is_initialized():
        raise UnsupportedError(
            "this process has a default process group of torch.distributed, which tensor parallelism would need",
            id="process-group-in-use", field="tensor_parallel_size", found=size,
            hint="call torch.distributed.destroy_process_group() before the pair is loaded",
        )  # fmt: skip
    os.environ.update(WITHOUT_MULTICAST)
    torch.cuda.set_device(device)
    limit, own_store = timedelta(seconds=LIMIT_S), dist.PrefixStore("device", store)
    dist.init_process_group("nccl", store=own_store, rank=rank, world_size=size, timeout=limit, device_id=device)
    ranks = Ranks(rank, size, NcclExchange(size, None), host, explain)
    ranks.total(torch.ones(1, 1, 8, device=device))  # connects before a graph captures a sum
    ranks.gather(torch.ones(1, 8, device=device))
    torch.cuda.synchronize(device)
    one_shot = None if all_reduce == "nccl" else _open_one_shot(ranks, device)
    if one_shot is None and all_reduce == "one-shot":
        raise UnsupportedError(
            id="no-one-shot-sums", field="all_reduce", found=all_reduce,
            expected="GPUs that read each other's memory", hint="all_reduce 'auto' uses NCCL without them",
        )  # fmt: skip
    logger.info("rank %d of %d on %s, %s sums", rank, size, device, "NCCL" if one_shot is None else "one-shot")
    return Ranks(rank, size, NcclExchange(size, one_shot), host, explain)


def _open_one_shot(ranks: Ranks, device: torch.device) -> OneShotSum | None:
    """The one-shot sum, or None if a rank cannot open it or if the ranks get other bits than NCCL up to rounding."""
    found: OneShotSum | None = None
    try:
        found = OneShotSum(device, ranks.rank, ranks.size)
    except Exception as error:  # torch raises errors of many kinds, by driver and by topology
        logger.info("no one-shot sums: %s", str(error).strip().split("\n")[0])
    if not ranks.least(int(found is not None)) or found is None:
        return None
    ranks.least(1)  # all rooms are empty
    agrees = all([_agrees(found, ranks, device, dtype) for dtype in (torch.bfloat16, torch.float32)])
    torch.cuda.synchronize(device)
    ranks.least(1)  # all ranks have read all messages
    found.clear()
    return found if ranks.least(int(agrees)) else None


def _agrees(one_shot: OneShotSum, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether sums of random numbers are equal on all ranks, and equal NCCL's up to rounding."""
    largest_error = 0.0
    has_equal_bits = True
    for num_rows, width in ((1, 4096), (16, 4096), (1, 8)):
        generator = torch.Generator().manual_seed(ranks.rank * 1000 + num_rows * width)
        numbers = torch.randn((1, num_rows, width), generator=generator).to(device, dtype)
        expected = ranks.total(numbers.clone())[0]
        sums = [one_shot(numbers.clone())[0]]
        if HAS_TRITON and (rooms := one_shot.rooms_for(numbers)) is not None:
            none, ones = torch.zeros_like(expected), expected.new_ones(width)
            sums.append(add_rms_norm_of_ranks(numbers, none, ones, 1e-6, rooms)[1])
        for found in sums:
            every = ranks.gather(found).view(num_rows, ranks.size, width)
            has_equal_bits &= bool((every == found[:, None]).all())
            largest_error = max(largest_error, float((found.float() - expected.float()).abs().max()))
    return has_equal_bits and largest_error <= math.sqrt(ranks.size) * 16 * torch.finfo(dtype).eps


def leave(device: torch.device) -> None:
    """Leave the group of GPUs that `join` made. Sums that other ranks will never finish end."""
    if device.type == "cuda" and dist.is_initialized():
        with suppress(Exception):  # torch raises errors of many kinds after a rank was lost
            dist.group.WORLD._get_backend(device).abort()
            dist.destroy_process_group()


def open_store() -> Any:
    """A store where the ranks of this machine find each other, at any free port of the loopback interface."""
    server = socket.create_server((LOCAL_HOST, 0))
    limit = timedelta(seconds=LIMIT_S)
    return dist.TCPStore(
        LOCAL_HOST, server.getsockname()[1], is_master=True, timeout=limit, wait_for_workers=False,
        master_listen_fd=server.detach(),
    )  # fmt: skip


def connect_store(port: int) -> Any:
    """The store that rank 0 has opened at a port.

    Raises:
        PeerUnreachable: nothing answers there.
    """
    try:
        return dist.TCPStore(LOCAL_HOST, port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    except RuntimeError as error:
        raise PeerUnreachable("rank 0 has ended", id=ENDED) from error
