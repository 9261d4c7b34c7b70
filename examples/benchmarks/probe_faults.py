"""Start vLLM's own server with one fault at a time, and ask each server with `dflash probe`.

    python3 examples/benchmarks/probe_faults.py [--vllm-path DIR] [--faults sound,fp8-kv] [--at-once 4] [--out DIR]

The pair is the bundled one with heads padded to 128 (`probe_vllm.py`). Servers run side by side on one GPU. Nothing is
timed. Our engine measures the sound pair first, as the probe's yardstick. The table has the warnings and errors of each
server, the findings that its fault must give, and the owner of the difference to the yardstick. `--out` keeps the
probes' documents and the servers' logs. The exit code is 1 if an expected finding is missing or another one is given.
"""

import argparse
import json
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dflash_cli
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.documents import to_json
from dflash_runtime.errors import DFlashError
from probe_vllm import Pair, await_server, end_servers, serving, widen
from timing.report import say, table

Weights = dict[str, Tensor]
PROMPTS, TOKENS = 24, 64
LOW = frozenset({"acceptance-near-zero", "acceptance-low-everywhere"})
OF_THE_PAIR = frozenset({"acceptance-falls-with-context"})
"""Findings that are true of the bundled pair on every server. Our engine measures 2.98 tokens per step after prompts of
128 tokens and 1.06 after 1,536."""


@dataclass(frozen=True)
class Fault:
    """A fault of one server. One finding of `expected` must be given; an empty set is a sound server."""

    expected: frozenset[str] = frozenset()
    change: Callable[[Weights], None] = lambda weights: None
    config: Mapping[str, Any] = field(default_factory=dict)
    server_args: tuple[str, ...] = ()
    speculative: Mapping[str, Any] | None = field(default_factory=dict)
    beside: str = ""


def reverse_taps(weights: Weights) -> None:
    """Read the outputs of the tapped layers in the opposite order."""
    weights["fc.weight"] = torch.cat(weights["fc.weight"].chunk(4, dim=1)[::-1], dim=1).contiguous()


def randomise(weights: Weights) -> None:
    """A draft that was never trained."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            weights[name] = (0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]}
FAULTS: Mapping[str, Fault] = {
    "sound": Fault(),
    "sound-eager": Fault(server_args=("--enforce-eager",)),
    "no-draft": Fault(frozenset({"draft-not-engaged", "no-speculation"}), speculative=None),
    "reversed-taps": Fault(LOW, reverse_taps),
    "random-draft": Fault(LOW, randomise),
    "shifted-taps": Fault(LOW, config={"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 4, 5]}}),
    "other-mask-token": Fault(LOW, config={"dflash_config": {"mask_token_id": 77, "target_layer_ids": [0, 2, 3, 4]}}),
    "no-prefix-cache": Fault(frozenset({"prefix-cache-off"}), server_args=("--no-enable-prefix-caching",)),
    "fp8-kv": Fault(server_args=("--kv-cache-dtype", "fp8")),
    "default-penalty": Fault(
        frozenset({"default-settings-change-answers"}),
        server_args=("--override-generation-config", '{"repetition_penalty": 1.5}'),
    ),
    "forced-acceptance": Fault(frozenset({"answers-not-greedy", "answers-not-repeatable"}), speculative=SYNTHETIC),
    "foreign-traffic": Fault(frozenset({"foreign-traffic"}), beside="traffic"),
    "replica-without-draft": Fault(frozenset({"several-replicas", "unlike-replicas"}), beside="replica"),
}


def faulty_pair(fault: Fault, folder: Path) -> Pair:
    """The bundled pair with wider heads, and with the fault in its draft."""
    tiny = tiny_directory()
    pair = Pair(*(widen(tiny / name, folder / name, 128) for name in ("target", "draft")))
    weights = load_file(pair.draft / "model.safetensors")
    fault.change(weights)
    save_file(weights, pair.draft / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((pair.draft / "config.json").read_text()) | fault.config
    (pair.draft / "config.json").write_text(json.dumps(config))
    return pair


def measure_own(given: argparse.Namespace, folder: Path) -> Path:
    """Measure the sound pair with our engine, as a publisher of a draft does. Returns the result's file."""
    pair, path = faulty_pair(FAULTS["sound"], folder), Path(given.out / "own.jsonl")
    dflash_cli.evaluate(
        draft=str(pair.draft), target=str(pair.target), prompts=tiny_directory() / "prompts.jsonl",
        num_prompts=PROMPTS, max_new_tokens=TOKENS, device=given.device, output=path,
    )  # fmt: skip
    return path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def settings(fault: Fault, given: argparse.Namespace) -> argparse.Namespace:
    """The options of `probe_vllm.serving` for one server."""
    eager = () if given.graphs or "--enforce-eager" in fault.server_args else ("--enforce-eager",)
    return argparse.Namespace(
        port=free_port(), gpu_memory_utilization=0.05, num_speculative_tokens=7, vllm_path=given.vllm_path,
        speculative=fault.speculative,
        server_args=(
            "--kv-cache-memory-bytes", str(2**30), "--max-model-len", "2048", "--enable-prefix-caching", *eager,
            *fault.server_args,
        ),
    )  # fmt: skip


@contextmanager
def running(fault: Fault, pair: Pair, given: argparse.Namespace, log: Path) -> Iterator[str]:
    """The address of a server with the pair, once it answers."""
    server = settings(fault, given)
    with serving(server, pair, log) as process:
        await_server(process, f"http://127.0.0.1:{server.port}", log, given.ready_timeout)
        yield f"http://127.0.0.1:{server.port}"


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Requests of somebody else, one after another."""
    ended = threading.Event()
    body = json.dumps({"model": "pair", "prompt": [5, 6, 7, 8], "max_tokens": 200, "ignore_eos": True}).encode()

    def ask() -> None:
        while not ended.is_set():
            with suppress(OSError):
                request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=60).read()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


@contextmanager
def in_turns(urls: tuple[str, str]) -> Iterator[str]:
    """The address of a proxy that gives each connection to the next server."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports = [int(url.rpartition(":")[2]) for url in urls]

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        number = 0
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", ports[number % len(ports)]))
                number += 1
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=copy, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def ask(url: str, pair: Pair, own: Path, out: Path) -> tuple[list[str], str]:
    """Ask the server as `dflash probe` does. Returns ids of warnings and errors, and the owner of the difference."""
    try:
        found = dflash_cli.probe(
            url=url, target=str(pair.target), draft=str(pair.draft), result=own, num_prompts=PROMPTS,
            prompts=tiny_directory() / "prompts.jsonl", max_new_tokens=TOKENS,
        )  # fmt: skip
    except DFlashError as error:
        return [error.id], ""
    out.with_suffix(".json").write_text(json.dumps(to_json(found), indent=1) + "\n")
    return [finding.id for finding in found.findings if finding.severity != "info"], found.attribution.owner


def judge(name: str, given: argparse.Namespace, own: Path) -> list[Any]:
    """The row of one fault: name, expected, found, owner of the difference to `own`, seconds, judgement."""
    fault, began = FAULTS[name], time.monotonic()
    out: Path = given.out / name
    expected = ", ".join(sorted(fault.expected)) or "nothing"
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            pair = faulty_pair(fault, Path(folder))
            url = stack.enter_context(running(fault, pair, given, out.with_suffix(".log")))
            if fault.beside == "traffic":
                stack.enter_context(traffic(url))
            if fault.beside == "replica":
                other = stack.enter_context(running(FAULTS["no-draft"], pair, given, out.with_suffix(".other.log")))
                url = stack.enter_context(in_turns((url, other)))
            ready = time.monotonic()
            ids, owner = ask(url, pair, own, out)
    except (RuntimeError, OSError) as error:
        say(f"{name}: {error}")
        return [name, expected, f"failed: {error}", "", time.monotonic() - began, "failed"]
    say(f"{name}: {ids}, ready after {ready - began:.0f} s, asked for {time.monotonic() - ready:.0f} s")
    named, beside = fault.expected & set(ids), set(ids) - fault.expected - OF_THE_PAIR
    outcome = "not named" if fault.expected and not named else "and others" if beside else "as expected"
    return [name, expected, ", ".join(ids), owner, time.monotonic() - ready, outcome]


def main() -> int:
    signal.signal(signal.SIGTERM, end_servers)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-path", type=Path, help="folder with vLLM, for the servers only")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--at-once", type=int, default=4, help="servers at a time")
    parser.add_argument("--device", default="auto", help="device of our engine, which measures the sound pair")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs and torch.compile: starts later")
    parser.add_argument("--ready-timeout", type=float, default=200, help="seconds to wait for a server to start")
    parser.add_argument("--out", type=Path, help="folder for documents and logs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(given.at_once) as pool:
        given.out = given.out or Path(home) / "out"
        given.out.mkdir(parents=True, exist_ok=True)
        own = measure_own(given, Path(home))
        rows = list(pool.map(partial(judge, given=given, own=own), given.faults.split(",")))
    print(table(("fault", "expected", "found", "owner", "s of the probe", "outcome"), rows))
    return 1 if any(row[-1] != "as expected" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
