"""Hand-offs from GPU to GPU over nccl, between two processes. Needs two GPUs."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dflash_runtime.errors import PeerUnreachable
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_testing.transfers import LIMIT_S, are_same, free_location, make_handoff, transfer_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl needs a GPU for each side"),
]

SEEDS = range(8)

PREFILL = """
import sys, torch
from dataclasses import replace
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_testing.transfers import make_handoff
prefill = open_connector(sys.argv[1], "prefill", 60.0, torch.device("cuda", 0))
saves = []
for seed in range(int(sys.argv[2])):
    handoff = make_handoff(str(seed), seed, 1 << (3 * seed))
    with torch.cuda.stream(torch.cuda.Stream(0)):  # the tensors are still being written when they are saved
        torch.cuda._sleep(50_000_000)
        tensors = {name: tensor.to("cuda:0", non_blocking=True) for name, tensor in handoff.tensors.items()}
        saves.append(prefill.save(replace(handoff, tensors=tensors)))
for save in saves:
    save.result(60)
print("saved", flush=True)
sys.stdin.readline()
prefill.close()
"""


@pytest.fixture
def location() -> str:
    return free_location("nccl")


@pytest.fixture
def prefill(location: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PREFILL, location, str(len(SEEDS))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def test_tensors_arrive_on_the_other_gpu(location: str, prefill: "subprocess.Popen[str]") -> None:
    decode = open_connector(location, "decode", 60.0, torch.device("cuda", 1))
    loads = [decode.load(str(seed)) for seed in reversed(SEEDS)]
    for seed, load in zip(reversed(SEEDS), loads, strict=True):
        found = load.result(60)
        assert {tensor.device for tensor in found.tensors.values()} == {torch.device("cuda", 1)}
        on_host = {name: tensor.cpu() for name, tensor in found.tensors.items()}
        assert are_same(replace(found, tensors=on_host), make_handoff(str(seed), seed, 1 << (3 * seed)))
    assert prefill.stdout is not None
    assert prefill.stdout.readline() == "saved\n"
    _, _ = prefill.communicate("\n", timeout=60)
    assert prefill.returncode == 0
    decode.close()
    assert not transfer_threads()


def test_killing_a_peer_ends_waiting_loads(location: str, prefill: "subprocess.Popen[str]") -> None:
    decode = open_connector(location, "decode", 60.0, torch.device("cuda", 1))
    decode.load("0").result(60)
    waiting = decode.load("never")
    prefill.kill()
    started = time.monotonic()
    assert isinstance(waiting.exception(LIMIT_S), PeerUnreachable)
    decode.close()
    assert time.monotonic() - started < LIMIT_S
    assert not transfer_threads()
