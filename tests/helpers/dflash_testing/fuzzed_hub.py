"""Readers of a hub's answers, from the bytes of HTTP on, with sound inputs for `reader_fuzzing`."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from huggingface_hub import constants

from dflash_cli.checkpoints.remote_headers import RemoteCheckpoint, RemoteRepo, list_repo
from dflash_testing import checkpoints as support
from dflash_testing.fuzzed_servers import OneAnswerServer
from dflash_testing.reader_fuzzing import Reader, as_json


class _Repo(RemoteRepo):
    """A repository in memory. The input is one of its files."""

    contents: dict[str, bytes]

    def fetch(self, name: str, begin: int, end: int) -> tuple[bytes, int]:
        data = self.contents[name]
        return data[begin:end], len(data)


def of_hub(home: Path) -> dict[str, Reader]:
    draft = support.write_sharded(home / "draft", support.native_config(), support.body_arrays(), 2)
    files = {item.name: item.read_bytes() for item in draft.iterdir()}

    def reader(changed: str) -> Reader:
        def read(data: bytes) -> None:
            repo = _Repo("org/x", "a" * 40, frozenset(files))
            object.__setattr__(repo, "contents", {**files, changed: data})
            json.dumps([info.shape for info in RemoteCheckpoint(repo).tensors.values()])

        return Reader([files[changed]], read)

    return {
        "config on the hub": reader("config.json"),
        "header on the hub": reader("model-00001-of-00002.safetensors"),
        "index on the hub": reader("model.safetensors.index.json"),
        "http of the hub": _http(),
    }


def _http() -> Reader:
    """A hub that answers every request with the bytes of the input, and ends the connection."""
    server = OneAnswerServer()

    def read(data: bytes) -> Any:
        server.answer = data
        with patch.multiple(constants, ENDPOINT=server.url, HF_HUB_OFFLINE=False):
            return list_repo("org/x")

    body = as_json({"sha": "a" * 40, "siblings": [{"rfilename": "config.json"}]})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    elsewhere = b"HTTP/1.1 302 Found\r\nLocation: %s/y\r\nContent-Length: 0\r\n\r\n" % server.url.encode()
    refused = head.replace(b"200 OK", b"404 No\r\nX-Error-Code: RepoNotFound\r\nX-Error-Message: a")
    return Reader([head + body, chunked, elsewhere, refused + body], read)
