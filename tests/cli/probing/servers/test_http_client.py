"""Servers that send too much, too slowly, or something else than answers."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest

from dflash_cli.probing.counters.metrics_text import read_metrics
from dflash_cli.probing.served.chat_answers import read_streamed_call
from dflash_cli.probing.servers import http_client
from dflash_cli.probing.servers.http_client import HttpClient, ServerUnreachable, TimeIsUp
from dflash_cli.probing.servers.inference_server import SERVERS, Asked, server_engines
from dflash_cli.probing.servers.recognition import open_server
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.metrics import MAX_DRAFT_TOKENS
from dflash_testing.deadline import deadline
from dflash_testing.fake_engines import FakeEngine
from dflash_testing.inference_servers import serving
from dflash_testing.refusals import refuses

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DEEP = b"[" * 100_000

Send = Callable[[Callable[[bytes], object]], object]


@contextmanager
def sending(send: Send) -> Iterator[HttpClient]:
    """A client of a server that answers every request with what `send` writes."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            send(connection.sendall)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        client = HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", num_retries=0, timeout_s=0.3)
        yield client
        client.close()
        server.shutdown(socket.SHUT_RDWR)


def whole(body: bytes, head: bytes = HEAD) -> Send:
    return lambda write: write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def trickled(first: bytes, more: bytes) -> Send:
    def send(write: Callable[[bytes], object]) -> None:
        write(first)
        for _ in count():
            write(more)
            threading.Event().wait(0.02)

    return send


SLOW: dict[str, Send] = {
    "a byte of the body at a time": trickled(HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "a header at a time": trickled(HEAD, b"X: y\r\n"),
    "a byte of the status at a time": trickled(b"", b"H"),
    "informational answers without an end": trickled(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "nothing": lambda write: threading.Event().wait(5),
}


@pytest.mark.parametrize("name", SLOW)
def test_the_time_limit_is_of_the_whole_answer(name: str) -> None:
    with deadline(10), sending(SLOW[name]) as client, refuses(ServerUnreachable, "no-answer"):
        client.post("/x", {})


def test_no_request_and_no_retry_goes_on_after_the_end_of_the_probe() -> None:
    with deadline(5), sending(SLOW["nothing"]) as client:
        client.ends_at = time.monotonic() + 0.1
        client._num_retries = 1000
        with refuses(TimeIsUp, "time-is-up"):
            client.post("/x", {})
        with refuses(TimeIsUp, "time-is-up"):
            client.find("/x")


def test_an_answer_larger_than_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1000)
    with sending(whole(b" " * 1001)) as client, refuses(UnsupportedError, "answer-too-large"):
        client.post("/x", {})
    with sending(whole(b"1" + b" " * 999)) as client:
        assert client.post("/x", {}) == 1


@pytest.mark.parametrize("body", [DEEP, b'{"a":' * 1000, b"\xff", b"", b"9" * 200, b'"\\ud800"'])
def test_an_answer_that_is_not_json_is_named(body: bytes) -> None:
    with sending(whole(body)) as client:
        with refuses(UnsupportedError, "not-json"):
            client.post("/x", {})
        assert client.find("/x") is None


@pytest.mark.parametrize("head", [b"", b"\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n", b"\x00" * 99])
def test_an_answer_that_is_not_http_is_named(head: bytes) -> None:
    with sending(lambda write: write(head)) as client, refuses(ServerUnreachable, "no-answer"):
        client.post("/x", {})


def test_a_compressed_answer_is_not_unpacked() -> None:
    packed = whole(b"\x1f\x8b" + b"\0" * 99, HEAD + b"Content-Encoding: gzip\r\n")
    with sending(packed) as client, refuses(UnsupportedError, "not-json"):
        client.post("/x", {})


ANSWERS: dict[str, dict[str, Any]] = {
    "vllm": {"choices": [{"token_ids": [1], "text": "a", "finish_reason": "stop"}]},
    "sglang": {"output_ids": [1], "text": "a", "meta_info": {"finish_reason": {"type": "stop"}}},
    "llama.cpp": {"tokens": [1], "content": "a", "timings": {}},
}
CHANGES: dict[str, dict[str, Any]] = {
    "vllm": {
        "metrics": {"speculative_decoding": {"acceptance_histogram": [10**12]}},
        "choices": [{"token_ids": [-1], "text": "a", "finish_reason": "stop"}],
    },
    "sglang": {
        "meta_info": {"finish_reason": {"type": "stop"}, "spec_accept_histogram": [1, 10**15]},
        "output_ids": [2**40], "text": 7,
    },
    "llama.cpp": {
        "timings": {"draft_n": 1e308, "predicted_n": 1e308, "draft_n_accepted": -1e308}, "content": [], "tokens": "1",
    },
}  # fmt: skip


@pytest.mark.parametrize("engine", ANSWERS)
def test_an_answer_has_types_and_limits(engine: str) -> None:
    server_engines()
    with sending(whole(json.dumps(ANSWERS[engine]).encode())) as client:
        assert SERVERS[engine](client, "m").answer([1], Asked(max_new_tokens=1)).token_ids == (1,)
    for key, value in CHANGES[engine].items():
        body = json.dumps({**ANSWERS[engine], key: value}).encode()
        with sending(whole(body)) as client, refuses(UnsupportedError, "foreign-answer"):
            SERVERS[engine](client, "m").answer([1], Asked(max_new_tokens=1))


def test_a_description_drops_values_of_other_types() -> None:
    wrong: Any = {"release": [], "draft": 7, "is_drafting": "yes", "num_draft_tokens": -1, "max_concurrency": 1e9}
    known: Any = {"engine": "vllm", "model": "m"}
    assert ServerFacts(**known, **wrong) == ServerFacts(**known, release=None, is_drafting=None)
    assert ServerFacts(**known, release="1", is_drafting=True, num_draft_tokens=MAX_DRAFT_TOKENS).num_draft_tokens


@pytest.mark.parametrize(
    "line", ['d{position="99999999999"} 1', "d NaN", "d +Inf", "d -2", "d 1e300", "d " + "9" * 400, 'd{a="']
)
def test_counters_that_no_server_has_are_refused(line: str) -> None:
    names = {"num_drafts": "d", "per_pos_accepted": "d"}
    with refuses(UnsupportedError, "not-prometheus"):
        read_metrics(f"# TYPE d counter\nd 1\n{line}\n", names, "there")


EVENTS = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"cho'


def test_a_stream_keeps_the_events_before_a_broken_connection() -> None:
    broken: Send = lambda write: write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b" % (99, EVENTS))  # noqa: E731
    with deadline(10), sending(broken) as client:
        found = read_streamed_call(client.post_text("/x", {}))
        assert (found.text, found.is_cut) == ("a", True)
        with refuses(ServerUnreachable, "no-answer"):
            client.post("/x", {})


def test_a_connection_that_breaks_before_an_event_is_no_answer() -> None:
    broken: Send = lambda write: write(HEAD + b"Content-Length: 99\r\n\r\ndata: {")  # noqa: E731
    with deadline(10), sending(broken) as client, refuses(ServerUnreachable, "no-answer"):
        client.post_text("/x", {})


def test_refusals_are_counted_with_each_retry() -> None:
    with serving(FakeEngine(faults={0: "503"})) as engine:
        server = open_server(HttpClient(engine.url, num_retries=0))
        with refuses(ServerUnreachable, "no-answer"):
            server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 4}, dict)
    assert dict(server.client.refusals) == {503: 1}


@pytest.mark.parametrize("status", [408, 504, 524])
def test_a_limit_of_time_is_temporary(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.0)
    heads = [b"HTTP/1.1 %d Late\r\n" % status, HEAD]
    with deadline(10), sending(lambda write: whole(b"[1]", heads.pop(0))(write)) as client:
        client._num_retries = 1
        assert client.post("/x", {}) == [1]
        assert client.num_retried == 1
