"""Readers of hand-offs and of their messages, with sound inputs for `reader_fuzzing`."""

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dflash_cli.handoff.handoff_folder import read_waiting
from dflash_runtime.checkpoint.stored.digests import digest_value
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.documents import to_json
from dflash_runtime.json_values import as_object
from dflash_runtime.kv_transfer import control_channel
from dflash_runtime.kv_transfer.carrier import Staged
from dflash_runtime.kv_transfer.file_connector import read_handoff, write_handoff
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import check_tokens
from dflash_runtime.kv_transfer.handoff_folders import HEADER, TENSORS
from dflash_runtime.kv_transfer.messages import (
    Drop,
    Greeting,
    Message,
    Offer,
    Refused,
    Take,
    Want,
    message_to_json,
    read_message,
)
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec, header_with_checksums
from dflash_runtime.kv_transfer.receiving import ReceivingSide
from dflash_runtime.kv_transfer.sending import SendingSide
from dflash_runtime.kv_transfer.vllm_prefills import VllmPrefill
from dflash_testing.engine_kv import layer_name, save_as_vllm
from dflash_testing.reader_fuzzing import Read, Reader, as_json, file_reader
from dflash_testing.transfers import are_same, make_handoff

VOCAB_SIZE = 100


def of_handoffs(home: Path) -> dict[str, Reader]:
    whole = make_handoff("a")
    write_handoff(home, whole)
    header, tensors = home / "a" / HEADER, home / "a" / TENSORS
    sound, rows = header.read_bytes(), tensors.read_bytes()

    def read() -> None:
        """An accepted hand-off equals the written one."""
        found = read_handoff(home / "a")
        check_tokens(found, VOCAB_SIZE)
        assert are_same(found, whole), "another hand-off was accepted"

    def read_sealed(data: bytes) -> None:
        """A header with a right digest: its text still is the text of the rows."""
        with suppress(ValueError):
            value = loads(data)
            if isinstance(value, dict):
                rest = {name: item for name, item in value.items() if name != "digest"}
                data = as_json({**rest, "digest": digest_value(rest, digest_size=16)})
        header.write_bytes(data)
        try:
            found = read_handoff(home / "a")
            check_tokens(found, VOCAB_SIZE)
            read_waiting(str(home))
        finally:
            header.write_bytes(sound)
        text = (found.prompt_token_ids, found.output_token_ids)
        assert not found.tensors or text == (whole.prompt_token_ids, whole.output_token_ids), (
            "another text was accepted"
        )

    def restoring(file: Path, content: bytes) -> Read:
        def write_and_read(data: bytes) -> None:
            file.write_bytes(data)
            try:
                read()
            finally:
                file.write_bytes(content)

        return write_and_read

    return {
        "hand-off header": Reader([sound], restoring(header, sound)),
        "hand-off header, sealed again": Reader([sound], read_sealed),
        "hand-off rows": Reader([rows], restoring(tensors, rows)),
        "vllm prefill": _vllm_prefill(home / "vllm"),
    }


def _vllm_prefill(home: Path) -> Reader:
    home.mkdir()
    prompt, heads = tuple(range(20)), [[2, 4], [1, 6]]
    save_as_vllm({layer_name(number): torch.randn(20, 2, *shape) for number, shape in enumerate(heads)}, prompt, home)
    (folder,) = (item for item in home.iterdir() if item.is_dir())
    same = {"target runtime": "pages", "dtype": "float32", "KV dtype": "float32", "page_size": 10}
    here = Fingerprint({"target KV heads": heads, **same})
    file = min(folder.glob("*.safetensors"))
    return Reader([file.read_bytes()], file_reader(file, lambda _: VllmPrefill(folder, prompt, 16).read("a", here)))


class _Sink:
    """A carrier without another side."""

    name, takes_device = "sink", False

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Staged:
        return Staged(tensors)

    def send(self, staged: Staged) -> None: ...

    def release(self, staged: Staged) -> None: ...

    def allocate(self, specs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: empty_like_spec(spec) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, torch.Tensor], directions: Mapping[str, Any]) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


def of_sockets(home: Path) -> dict[str, Reader]:
    """Frames and greetings over a pair of sockets, and messages given to both sides of a connection."""
    whole = make_handoff("a")
    header = to_json(header_with_checksums(whole))
    messages = [Want("a", 0), Offer("a", 0, header, {}), Take("a", 0), Refused("b", 1, "full"), Drop("a", 0, "x")]
    lines = [as_json(message_to_json(message)) for message in messages]
    frame = b"".join(len(line).to_bytes(4, "big") + line for line in lines[:1] + lines[2:])
    hello = as_json({"hello": 2, "carrier": "none", "nonce": "00"})
    greeting = len(hello).to_bytes(4, "big") + hello + (13).to_bytes(4, "big") + b'{"proof":"0"}'

    def receive(data: bytes) -> None:
        here, there = socket.socketpair()
        with here, there:
            there.setblocking(False)
            with suppress(BlockingIOError):
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            while (found := control_channel._receive(here, 100_000)) is not None:
                read_message(found)

    def greet(data: bytes) -> None:
        here, there = socket.socketpair()
        with here, there:
            there.setblocking(False)
            with suppress(BlockingIOError):
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            own, address = Greeting(carrier="none"), control_channel.Address("x", 1)
            control_channel._meet(here, own, "secret", time.monotonic() + 1, address, is_listening=True)
            raise AssertionError("a stranger was accepted")

    def converse(data: bytes) -> None:
        jobs: list[Callable[[], None]] = []
        sending = SendingSide(_Sink(), lambda _: None, jobs.append)
        receiving = ReceivingSide(_Sink(), lambda _: None, jobs.append)
        sending.save(make_handoff("a"))
        loading = receiving.load("a")
        for line in data.split(b"\n"):
            message = read_message(as_object(loads(line)))
            if isinstance(message, Message):
                sending.read(message)
                receiving.read(message)
            while jobs:
                jobs.pop(0)()
        with suppress(Exception):
            assert are_same(loading.result(0), whole), "another hand-off was accepted"

    return {
        "frames": Reader([frame], receive, (ValueError, OSError)),
        "greetings": Reader([greeting, greeting * 2], greet, (ValueError, OSError)),
        "messages": Reader([b"\n".join(lines), *lines], converse, (ValueError,)),
    }
