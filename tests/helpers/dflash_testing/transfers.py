"""Hand-offs to carry, both ends of a connector in one process, and peers: other processes that are one end.

Peers are forked by one process that has imported all and has no threads: `python -m dflash_testing.transfers`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from dflash_runtime.errors import DFlashError
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.places import open_connector
from dflash_runtime.scheduling.request import SamplingParams

LIMIT_S = 20.0
"""Of whatever is waited for; what is quick takes milliseconds."""


def make_handoff(key: str, seed: int = 0, num_bytes: int = 0) -> Handoff:
    """A request of every dtype a payload has, with an empty tensor and one number, the same for the same arguments.

    `num_bytes` more than that are in the target's KV.
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
        fingerprint=Fingerprint({"dtype": "bfloat16", "taps": [1, 5]}),
        prompt_token_ids=(1, 2, 3),
        output_token_ids=(4,),
        params=SamplingParams(max_new_tokens=5, stop_token_ids=(7,)),
        seed=seed,
        num_rows={"target": 3, "draft": 3},
        tensors=tensors,
        note={"id": key},
    )


def are_same(one: Handoff, other: Handoff) -> bool:
    """Whether all of two hand-offs is equal, to the bit."""
    return one.to_header() == other.to_header() and all(
        torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors
    )


def free_place(name: str) -> str:
    """A place between processes of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"{name}://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def open_both(place: str) -> Iterator[tuple[Connector, Connector]]:
    """Both ends of a place, in this process: the one that saves, the one that loads."""
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_connector, place, "prefill", LIMIT_S)
        decode = open_connector(place, "decode", LIMIT_S)
        prefill = opening.result()
    try:
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


def transfer_threads() -> list[str]:
    """Names of the threads of connectors that run in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("handoff-")]


class Peer:
    """One end of a connector in a process of its own, which does what it is told."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid: int = json.loads(self._lines.readline())

    def ask(self, *command: Any) -> Any:
        """Have it do something, and wait for the answer."""
        self.tell(*command)
        return json.loads(self._lines.readline())

    def tell(self, *command: Any) -> None:
        self._connection.sendall(f"{json.dumps(command)}\n".encode())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """It ends when nobody is left to tell it anything."""
        self._lines.close()
        self._connection.close()


class Peers:
    """Starts peers, a few milliseconds each."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(60)
        port = str(self._server.getsockname()[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, port]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self._started: list[Peer] = []

    def start(self, place: str, role: str) -> Peer:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([place, role])}\n".encode())
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
    """What a future came to: its error, its result, or a hand-off's seed if it is the one that `make_handoff` makes."""
    try:
        result = future.result(limit_s)
    except DFlashError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(result, Handoff):
        size = result.tensors["target"].numel()
        return result.seed if are_same(result, make_handoff(result.key, result.seed, size)) else "another"
    return result


def _obey(connection: socket.socket, place: str, role: Any) -> None:
    def answer(value: Any) -> None:
        connection.sendall(f"{json.dumps(value)}\n".encode())

    answer(os.getpid())
    connector = open_connector(place, role, LIMIT_S)
    futures: dict[str, Future[Any]] = {}
    for line in connection.makefile("r"):
        match json.loads(line):
            case ["save", key, seed, num_bytes]:
                futures[key] = connector.save(make_handoff(key, seed, num_bytes))
            case ["load", key]:
                futures[key] = connector.load(key)
            case ["refuse", key, reason]:
                connector.refuse(key, reason)
            case ["cancel", key]:
                answer(futures[key].cancel())
            case ["outcome", key]:
                answer(outcome(futures[key]))
            case ["close"]:
                connector.close()
                answer(transfer_threads())


def main(port: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    CONNECTORS.discover("dflash_runtime.kv_transfer")  # once, and not in every peer
    for line in sys.stdin:
        if not os.fork():
            _obey(socket.create_connection(("127.0.0.1", port)), *json.loads(line))
            return  # ends as a program does that never closed its connector
    os._exit(0)  # has nothing to tidy up, and torch takes long to


if __name__ == "__main__":
    main(int(sys.argv[1]))
