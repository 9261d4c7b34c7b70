"""Readers of a server's answers and metrics, with sound inputs for `reader_fuzzing`."""

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_cli.probing.counters.metrics_text import read_metrics
from dflash_cli.probing.servers.http_client import HttpClient
from dflash_cli.probing.servers.inference_server import SERVERS, Asked, Variant, server_engines
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.documents import to_json
from dflash_runtime.errors import DFlashError
from dflash_testing.fake_engines import FakeEngine, make_text
from dflash_testing.reader_fuzzing import Read, Reader, as_json
from dflash_testing.server_forms import METRICS, documents, llama_answer, sglang_answer, vllm_answer

PLAIN = Variant(is_plain=True)
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL_CALL = {
    "choices": [{"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}],
    "usage": {"completion_tokens": 9},
}
STREAM = b'data: {"choices": [{"delta": {"tool_calls": [' + json.dumps(CALL).encode() + b"]}}]}\n\ndata: [DONE]\n\n"


class _OneAnswer:
    """A client of a server that answers every request with the same bytes."""

    url, data = "http://server", b""

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return loads(self.data)

    def post_text(self, path: str, body: Mapping[str, Any]) -> str:
        return self.data.decode("utf-8", errors="replace")

    def find(self, path: str) -> Any:
        with suppress(ValueError):
            return loads(self.data)
        return None

    def find_text(self, path: str) -> None:
        """Metrics have readers of their own."""


def of_servers(home: Path) -> dict[str, Reader]:
    server_engines()
    readers = {"http": _http()}
    answers = {"vllm": vllm_answer, "sglang": sglang_answer, "llama.cpp": llama_answer}
    for engine, make in answers.items():
        fake = FakeEngine(style=engine, reports="detailed")  # type: ignore[arg-type]
        text = make_text((1, 2, 3), length=12)
        bases = [as_json(make(fake, text)), *map(as_json, documents(fake).values()), as_json(TOOL_CALL), STREAM]
        readers[f"answers of {engine}"] = Reader(bases, _answers_of(engine), (ValueError,))
        readers[f"metrics of {engine}"] = Reader([METRICS[engine](fake).encode()], _metrics_of(engine))
    return readers


def _metrics_of(engine: str) -> Read:
    names = SERVERS[engine].counter_names
    return lambda data: read_metrics(data.decode("utf-8", errors="replace"), names, "there")


def _answers_of(engine: str) -> Read:
    def read(data: bytes) -> None:
        client: Any = _OneAnswer()
        client.data = data
        server = SERVERS[engine](client, "m")
        json.dumps(to_json(server.describe()), allow_nan=False)
        for ask in (
            lambda: server.answer([1], Asked(max_new_tokens=1)),
            lambda: server.answer([1], Asked(max_new_tokens=3), PLAIN),
            lambda: server.told_logprobs([1], Asked(max_new_tokens=3), PLAIN),
            lambda: server.next_logprobs([1]),
            lambda: server.encode("a"),
            lambda: server.score([1], [2, 3]) if server.can_score else None,
            lambda: server.call_tool([], TOOL, max_new_tokens=1),
            lambda: server.call_tool([], TOOL, max_new_tokens=1, is_streamed=True),
        ):
            with suppress(DFlashError):
                ask()
        json.dumps(to_json(server.answer([1], Asked(max_new_tokens=1))), allow_nan=False).encode()

    return read


class OneAnswerServer:
    """A server on this machine that answers every request with the bytes `answer`, and ends the connection."""

    def __init__(self) -> None:
        self.answer = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(self.answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)


def _http() -> Reader:
    """Answers as bytes, read by the client of probed servers."""
    server = OneAnswerServer()
    client = HttpClient(server.url, num_retries=0, timeout_s=1.0)

    def ask(data: bytes) -> None:
        server.answer = data
        client.post("/x", {})

    body = b'{"a": [1, 2]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n" + body + b"\r\n0\r\n\r\n"
    return Reader([head + body, chunked, head.replace(b"200 OK", b"400 Bad") + body], ask)
