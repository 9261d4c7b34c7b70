"""A hub that sends a byte now and then ends in an error at a limit of time, in headers and bodies alike."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_cli.checkpoints import remote_headers, slow_answers
from dflash_testing import hub_server as hub
from dflash_testing.deadline import deadline

LIMIT_S, LONGEST_S = 1.0, 20.0

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LISTING = b'{"sha": "%s", "siblings": [{"rfilename": "config.json"}]}' % hub.COMMIT.encode()
WHOLE_LISTING = HEAD + b"Content-Length: %d\r\n\r\n" % len(LISTING) + LISTING

FORMS: dict[str, tuple[bytes, bytes]] = {
    "head": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "status line": (b"HTTP/1.1 200 ", b"O"),
    "body": (HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "body of a refusal": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 100000\r\n\r\n", b" "),
    "headers without an end": (b"HTTP/1.1 200 OK\r\n", b"X-A: a\r\n"),
}
"""How a hub begins its answer, and the piece that it then repeats."""


@pytest.fixture
def trickling() -> Iterator[Callable[..., str]]:
    """Starts a hub that answers the first requests with whole answers, and then sends a piece every 0.05 s."""
    servers: list[socket.socket] = []

    def serve(begin: bytes, piece: bytes, *first: bytes) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        answers = [*first]

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while connection.recv(65536):
                    if answers:
                        connection.sendall(answers.pop(0))
                        continue
                    connection.sendall(begin)
                    while True:
                        time.sleep(0.05)
                        connection.sendall(piece)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield serve
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (slow_answers, remote_headers):
        monkeypatch.setattr(module, "ANSWER_S", LIMIT_S)


def refusal_of(url: str, home: Path, *command: str) -> str:
    """The id of the error that a command ends in, well before a hub's own end."""
    env = hub.environment(hub.LocalHub(url=url), home)
    with deadline(LONGEST_S):
        found = hub.refusal(*command, env=env)
    assert found["code"] == 4
    return str(found["id"])


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=() if form in ("status line", "body", "chunks") else pytest.mark.slow) for form in FORMS],
)
def test_a_trickling_listing_ends_at_the_limit(form: str, trickling: Callable[..., str], tmp_path: Path) -> None:
    assert refusal_of(trickling(*FORMS[form]), tmp_path, "inspect", "org/draft") == "hub-too-slow"


@pytest.mark.parametrize("form", ["head", "body"])
def test_a_trickling_file_ends_at_the_limit(form: str, trickling: Callable[..., str], tmp_path: Path) -> None:
    url = trickling(*FORMS[form], WHOLE_LISTING)
    assert refusal_of(url, tmp_path, "inspect", "org/draft") == "hub-too-slow"


@pytest.mark.parametrize("form", ["head", "body"])
def test_a_trickling_download_ends_at_the_limit(form: str, trickling: Callable[..., str], tmp_path: Path) -> None:
    command = ("generate", "x", "--draft", "org/draft", "--target", "tiny")
    assert refusal_of(trickling(*FORMS[form]), tmp_path, *command) == "hub-too-slow"


def test_a_trickling_dataset_ends_at_the_limit(trickling: Callable[..., str], tmp_path: Path) -> None:
    command = ("eval-acceptance", "tiny", "--dataset", "gsm8k")
    assert refusal_of(trickling(*FORMS["head"]), tmp_path, *command) == "hub-too-slow"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 No\r\nX-Error-Message: \xc3\xbc\xff\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 404 No\r\nX-Error-Code: RepoNotFound\r\nContent-Length: 5\r\n\r\n\xf5\xf5\xf5{}",
        b"HTTP/1.1 403 No\r\nX-Error-Code: GatedRepo\r\nContent-Length: 60000\r\n\r\n" + b"[" * 60000,
        b"HTTP/1.1 302 Found\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ftp://x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: \xff\xfe\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:4611686018427387904/\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 404 No\r\nX-Error-Code: RepoNotFound\r\nContent-Length: 14\r\n\r\n{"errors":[1]}',
    ],
)
@pytest.mark.parametrize("command", [("inspect", "org/draft"), ("generate", "x", "-d", "org/draft", "-t", "tiny")])
def test_a_malformed_answer_ends_in_an_error(
    answer: bytes, command: tuple[str, ...], trickling: Callable[..., str], tmp_path: Path
) -> None:
    assert refusal_of(trickling(b"", b"", *[answer] * 40), tmp_path, *command)


def test_a_long_answer_may_take_longer_if_it_comes_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 bytes take 5.4 s, past the limit of 1 s. Each byte takes 0.09 s and allows 0.1 s more."""
    now = [0.0]

    class Slow:
        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            now[0] += 0.09
            return b" "

        def write(self, buffer: bytes, timeout: float | None = None) -> None: ...

    monkeypatch.setattr(slow_answers, "BYTES_PER_S", 10)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = slow_answers._LimitedStream(Slow())
    stream.write(b"GET")
    for _ in range(60):
        stream.read(1)
    assert now[0] > LIMIT_S
