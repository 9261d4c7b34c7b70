"""Hand-offs for tests, both sides of a connector in one process, and peers: processes that are one side.

`python -m dflash_testing.transfers` forks peers. It imports all modules once and starts no threads, so forks are quick.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dflash_runtime.documents import to_json
from dflash_runtime.errors import DFlashError
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, TransferRole
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.processes import are_gone

ROLES: tuple[TransferRole, TransferRole] = ("prefill", "decode")

LIMIT_S = 20.0
"""Time limit for every wait of the tests. Fast operations take milliseconds."""


def make_handoff(key: str, seed: int = 0, num_bytes: int = 0) -> Handoff:
    """A hand-off with tensors of many dtypes, an empty tensor and a scalar. Equal arguments give equal hand-offs.

    The target's KV has `num_bytes` bytes, by default 64.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2, 3, 2, 4, 8, generator=generator)
    tensors = {
        "target": torch.randint(256, (num_bytes or 64,), generator=generator, dtype=torch.int64).to(torch.bool),
        "draft": numbers.to(torch.bfloat16),
        "state.float32": numbers.transpose(0, 1),  # not contiguous
        "state.float16": numbers.to(torch.float16),
        "state.int32": numbers.to(torch.int32),
        "state.empty": torch.empty(0, 7),
        "state.number": torch.tensor(seed),
    }
    return Handoff(
        key=key,
        fingerprint={"dtype": "bfloat16", "taps": [1, 5]},
        prompt_token_ids=(1, 2, 3),
        output_token_ids=(4,),
        params=SamplingParams(max_new_tokens=5, stop_token_ids=(7,)),
        seed=seed,
        num_rows={"target": 3, "draft": 3},
        tensors=tensors,
        note={"id": key},
    )


def are_same(one: Handoff, other: Handoff) -> bool:
    """Whether two hand-offs have equal headers and bitwise equal tensors."""
    return to_json(one.header) == to_json(other.header) and all(
        torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors
    )


def free_location(name: str) -> str:
    """A location of connector `name` on this machine, with a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"{name}://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def open_both(location: str) -> Iterator[tuple[Connector, Connector]]:
    """Both sides of a location, opened in this process: prefill, which saves, and decode, which loads.

    Raises:
        DFlashError: the error of the prefill side, if both fail. The decode side then only reports its time limit.
    """
    with ThreadPoolExecutor(2) as pool:
        opening = [pool.submit(open_connector, location, role, LIMIT_S) for role in ROLES]
    prefill, decode = (future.result() for future in opening)
    try:
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


def transfer_threads() -> list[str]:
    """Names of all running threads of connectors in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("handoff-")]


class Peer:
    """One side of a connector in another process, which obeys commands."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid: int = json.loads(self._lines.readline())

    def ask(self, *command: Any) -> Any:
        """Send a command and wait for the answer."""
        self.tell(*command)
        return self.hear()

    def hear(self) -> Any:
        """Wait for an answer."""
        return json.loads(self._lines.readline())

    def tell(self, *command: Any) -> None:
        """Send a command that has no answer."""
        self._connection.sendall(f"{json.dumps(command)}\n".encode())

    def kill(self) -> None:
        """Kill the process, if it still runs, and wait until it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        assert are_gone([self.pid])

    def close(self) -> None:
        """Close the connection. The process ends when it can receive no more commands."""
        self._lines.close()
        self._connection.close()


class Peers:
    """Starts peers, in a few milliseconds each, by forking a process that runs `module`."""

    def __init__(self, module: str = __name__) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(60)
        port = str(self._server.getsockname()[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, port]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self._started: list[Peer] = []

    def start(self, *arguments: Any) -> Peer:
        """Start a peer. The arguments are JSON: location and role, unless `module` takes others."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(arguments)}\n".encode())
        self._process.stdin.flush()
        connection, _ = self._server.accept()
        self._started.append(Peer(connection))
        return self._started[-1]

    def close(self) -> None:
        for peer in self._started:
            peer.close()
        self._server.close()
        self._process.communicate(timeout=60)


def outcome(future: "Future[Any]", limit_s: float = LIMIT_S) -> Any:
    """The outcome of a future, as JSON.

    An error is its class and id: `PeerUnreachable handoff-refused`. A hand-off is its seed if it equals the result of
    `make_handoff`, and "another" otherwise. Any other result is unchanged.
    """
    try:
        result = future.result(limit_s)
    except DFlashError as error:
        return f"{type(error).__name__} {error.id}"
    if isinstance(result, Handoff):
        size = result.tensors["target"].numel()
        return result.seed if are_same(result, make_handoff(result.key, result.seed, size)) else "another"
    return result


def error_of(future: "Future[Any]", limit_s: float = LIMIT_S) -> DFlashError:
    """The error that ends a future."""
    error = future.exception(limit_s)
    assert isinstance(error, DFlashError), error
    return error


def _obey(connection: socket.socket, location: str, role: Any) -> None:
    def answer(value: Any) -> None:
        connection.sendall(f"{json.dumps(value)}\n".encode())

    connector = open_connector(location, role, LIMIT_S)
    futures: dict[str, Future[Any]] = {}
    for line in connection.makefile("r"):
        match json.loads(line):
            case ["save", key, seed, num_bytes]:
                futures[key] = connector.save(make_handoff(key, seed, num_bytes))
            case ["load", key]:
                futures[key] = connector.load(key)
            case ["refuse", key, reason]:
                connector.refuse(key, reason)
            case ["outcome", key]:
                answer(outcome(futures[key]))
            case ["close"]:
                connector.close()
                answer(transfer_threads())


def fork_peers(port: int, run: Callable[..., None]) -> None:
    """Fork a peer for each line on stdin, which has its arguments. Peers connect to `port` and send their process id.

    `run(connection, *arguments)` is the work of a peer.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the peers
    CONNECTORS.discover("dflash_runtime.kv_transfer")  # once here instead of in every peer
    for line in sys.stdin:
        if not os.fork():
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(f"{os.getpid()}\n".encode())
            run(connection, *json.loads(line))
            return  # the peer ends like a program that never closed its connector
    os._exit(0)  # skips torch's slow cleanup, since nothing needs cleaning up


if __name__ == "__main__":
    fork_peers(int(sys.argv[1]), _obey)
