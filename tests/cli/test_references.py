"""References: a directory wins, then the bundled pair, then the hub; each way the hub can say no reads differently."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import support
from dflash_cli.references import TINY, TINY_REDUCED, Role, is_hub_id, resolve, tiny_directory
from dflash_runtime.errors import CheckpointNotFound, UsageError

COMMIT = "1" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download needs."""

    files: ClassVar[dict[str, bytes]] = {}
    gone: ClassVar[dict[str, tuple[int, str]]] = {
        "acme/gated": (403, "GatedRepo"),
        "acme/absent": (401, "RepoNotFound"),
        "acme/broken": (500, ""),
    }

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        for repo, (status, code) in self.gone.items():
            if repo in self.path:
                self._send(status, b"", {"X-Error-Code": code} if code else {}, with_body=with_body)
                return
        if "/tree/" in self.path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, with_body=with_body)
            return
        if self.path.startswith("/api/models/acme/draft"):
            self._send_info(with_body=with_body)
            return
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        data = self.files.get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body=with_body)
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._send(200, data, headers, with_body=with_body)

    def _send_info(self, *, with_body: bool) -> None:
        revision = self.path.partition("/revision/")[2].partition("?")[0]
        if revision not in ("", "main", "v2", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
            return
        siblings = [{"rfilename": name} for name in self.files]
        info = {"_id": "0", "id": "acme/draft", "sha": COMMIT, "siblings": siblings, "private": False}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A hub on this machine that holds one draft and a stray file."""
    draft = support.make_native(tmp_path_factory.mktemp("hub") / "draft")
    Hub.files = {item.name: item.read_bytes() for item in draft.iterdir()} | {"modeling.py": b"raise SystemExit"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def environment(hub: str, tmp_path: Path) -> dict[str, str]:
    """The hub library reads its settings when it is imported, so each run has a process of its own."""
    return {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@pytest.mark.parametrize("reference", ["acme/draft", "acme/draft@v2", f"acme/draft@{COMMIT}"])
def test_from_the_hub(reference: str, environment: dict[str, str], tmp_path: Path) -> None:
    outcome = support.launch("inspect", reference, "--json", env=environment)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["dialect"] == "native"
    assert Path(document["path"]).name == COMMIT
    assert not list((tmp_path / "home").rglob("modeling.py"))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("acme/gated", "acme/gated: gated"),
        ("acme/absent", "acme/absent: not found on the hub"),
        ("acme/draft@v9", "acme/draft: no revision 'v9'"),
        ("acme/broken", "acme/broken: the hub answered: "),
        ("acme--x/draft", "not a name the hub allows"),
        ("no such thing", "no such thing: no such directory, and not a hub reference"),
    ],
)
def test_each_refusal_reads_differently(reference: str, message: str, environment: dict[str, str]) -> None:
    outcome = support.launch("inspect", reference, env=environment)
    assert outcome.code == 4, outcome.err
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_offline(environment: dict[str, str]) -> None:
    outcome = support.launch("inspect", "acme/draft", env={**environment, "HF_HUB_OFFLINE": "1"})
    assert outcome.code == 4
    assert "not in the local cache, and the hub cannot be reached" in outcome.err


def test_nobody_answers(environment: dict[str, str]) -> None:
    outcome = support.launch("inspect", "acme/draft", env={**environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert outcome.code == 4
    assert "the hub cannot be reached" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_directory_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support.make_native(tmp_path / "acme" / "draft")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("acme/draft")
    assert resolve("acme/draft", Role.DRAFT) == Path("acme/draft")


def test_a_directory_wins_over_the_bundled_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve(TINY, Role.DRAFT) == Path("tiny")


def test_the_bundled_pair() -> None:
    assert resolve(TINY, Role.DRAFT) == tiny_directory() / "draft"
    assert resolve(TINY, Role.TARGET) == tiny_directory() / "target"
    assert resolve(TINY_REDUCED, Role.DRAFT) == tiny_directory() / "draft-reduced"
    with pytest.raises(UsageError, match="names a draft"):
        resolve(TINY_REDUCED, Role.TARGET)


@pytest.mark.parametrize("reference", ["", "~nobody/x/y", "org/repo/extra", "../up/there", "org//repo", "http://x/y"])
def test_what_is_no_reference(reference: str) -> None:
    with pytest.raises(CheckpointNotFound, match="not a hub reference"):
        resolve(reference, Role.DRAFT)
