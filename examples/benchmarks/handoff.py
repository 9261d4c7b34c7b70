"""Time the connectors that carry hand-offs between two processes on this machine.

    python examples/benchmarks/handoff.py [--backend file,gloo,nixl,nccl,link] [--megabytes 0,64,512] [--rounds 5]

A payload has the shape of a request's pages: KV of a target and of a draft in bfloat16, with the given size. The other
process asks for the payload before it is saved. The time runs from the save until the other process has the whole
payload and has compared its checksum, if the connector sends one. The first round is not counted. The median of the
other rounds is printed.

- `file` writes to a temporary folder (`--folder`).
- `nccl` sends from GPU 0 to GPU 1 of this machine; `nixl` does the same with `--gpus`.
- `link` is a plain copy from GPU 0 to GPU 1 within one process, the speed of the link.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_runtime.kv_transfer.connector import Connector, TransferRole
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.scheduling.sampling_params import SamplingParams

LIMIT_S = 120.0
PAGE_SIZE, WIDTH, TARGET_LAYERS, DRAFT_LAYERS = 64, 1024, 36, 5
"""Sizes of Qwen3-8B and its draft. WIDTH is 8 KV heads of 128 numbers."""


def payload(key: str, megabytes: float, device: torch.device) -> Handoff:
    """A hand-off of at least `megabytes`, with random pages."""
    page_bytes = 2 * PAGE_SIZE * WIDTH * 2 * (TARGET_LAYERS + DRAFT_LAYERS)
    num_pages = -(-int(megabytes * 1e6) // page_bytes)
    tensors = {
        name: torch.randn(num_pages, num_layers, 2, PAGE_SIZE, WIDTH, device=device).to(torch.bfloat16)
        for name, num_layers in (("target", TARGET_LAYERS), ("draft", DRAFT_LAYERS))
    }
    return Handoff(
        key=key,
        fingerprint={},
        prompt_token_ids=tuple(range(max(num_pages * PAGE_SIZE, 1))),
        output_token_ids=(1,),
        params=SamplingParams(),
        seed=0,
        tensors=tensors,
    )


def device_of(arguments: argparse.Namespace, role: TransferRole, backend: str) -> torch.device:
    if backend != "nccl" and not (backend == "nixl" and arguments.gpus):
        return torch.device("cpu")
    return torch.device("cuda", ("prefill", "decode").index(role))


def keys_of(arguments: argparse.Namespace) -> list[tuple[str, float]]:
    """Key and size of each hand-off, in order."""
    return [(f"{size:g}-{turn}", size) for size in arguments.megabytes for turn in range(arguments.rounds + 1)]


def receive(arguments: argparse.Namespace, place: str) -> None:
    """Run the other process: load one key after another and print a line for each."""
    connector = open_connector(place, "decode", LIMIT_S, device_of(arguments, "decode", arguments.backend[0]))
    for key, _ in keys_of(arguments):
        loading = connector.load(key)
        print("wanted", flush=True)
        loading.result(LIMIT_S)
        print("loaded", flush=True)
    connector.close()


def seconds(connector: Connector, handoff: Handoff, other: "subprocess.Popen[str]") -> float:
    assert other.stdout is not None
    assert other.stdout.readline() == "wanted\n"
    time.sleep(0.02)  # the other process's request for the payload must arrive first
    started = time.perf_counter()
    connector.save(handoff).result(LIMIT_S)
    assert other.stdout.readline() == "loaded\n"
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace, backend: str, folder: Path) -> list[dict[str, Any]]:
    """One row per size: megabytes, milliseconds, GB/s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"{backend}://127.0.0.1:{server.getsockname()[1]}"
    place = str(folder) if backend == "file" else place
    command = [sys.executable, __file__, *arguments.given, "--backend", backend, "--place", place]
    times: dict[float, list[float]] = {}
    num_bytes: dict[float, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        device = device_of(arguments, "prefill", backend)
        connector = open_connector(place, "prefill", LIMIT_S, device)
        for key, size in keys_of(arguments):
            handoff = payload(key, size, device)
            times.setdefault(size, []).append(seconds(connector, handoff, other))
            num_bytes[size] = handoff.num_bytes
        connector.close()
    medians = {size: statistics.median(found[1:]) for size, found in times.items()}
    return [row_of(backend, num_bytes[size], median) for size, median in medians.items()]


def row_of(backend: str, num_bytes: int, seconds: float) -> dict[str, Any]:
    return {
        "backend": backend,
        "megabytes": num_bytes / 1e6,
        "ms": seconds * 1e3,
        "gb_per_s": num_bytes / 1e9 / seconds,
    }


def measure_link(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows like `measure`, for copies between GPUs."""
    rows = []
    for size in arguments.megabytes:
        sent = torch.randn(max(1, int(size * 1e6) // 4), device="cuda:0")
        taken = torch.empty_like(sent, device="cuda:1")
        times = []
        for _ in range(arguments.rounds + 1):
            torch.cuda.synchronize(0)
            started = time.perf_counter()
            taken.copy_(sent)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            times.append(time.perf_counter() - started)
        rows.append(row_of("link", sent.nbytes, statistics.median(times[1:])))
    return rows


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the connectors that carry hand-offs.")
    parser.add_argument("--backend", type=lambda text: text.split(","), default=["file", "gloo"])
    parser.add_argument("--megabytes", type=lambda text: [float(item) for item in text.split(",")], default=[0.0, 64.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    arguments.given = sys.argv[1:] if given is None else given
    if arguments.place:
        receive(arguments, arguments.place)
        return 0
    for backend in arguments.backend:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows = measure_link(arguments) if backend == "link" else measure(arguments, backend, Path(folder))
            for row in rows:
                line = "{backend:5} {megabytes:8.1f} MB {ms:8.1f} ms {gb_per_s:6.2f} GB/s".format(**row)
                print(json.dumps(row) if arguments.json else line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
