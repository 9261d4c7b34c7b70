"""A hub on this machine that serves files and byte ranges, and counts the bytes it sends."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_testing.command_line import Outcome, run_main
from dflash_testing.hub_uploads import MAIN, START, UploadAnswers, Uploads, tree_entry

COMMIT = START
REVISIONS = ("", "main", "v2", COMMIT)

GONE = {
    "acme/gated": (403, "GatedRepo"),
    "acme/absent": (401, "RepoNotFound"),
    "acme/broken": (500, ""),
    "acme/other-token": (401, ""),
    "acme/not-here": (501, ""),
    "acme/login-page": (200, ""),
    "acme/bad-request": (400, ""),
    "acme/proxy": (407, ""),
    "acme/limit": (429, ""),
}
"""Repositories that are refused whole."""

ODD = {"acme/listing": b"[]", "acme/nothing-said": b""}
"""Repository -> the document that answers every request about it."""


@dataclass
class LocalHub:
    """The files of the server, and the requests it got.

    `closed` lists gated files of listed repositories. `ranges` says whether the server answers byte ranges.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    ranges: bool = True
    num_bytes: int = 0
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    uploads: Uploads = field(default_factory=Uploads)

    def add(self, repo: str, directory: Path) -> None:
        self.repos[repo] = {item.name: item.read_bytes() for item in directory.iterdir() if item.is_file()}

    def head(self, repo: str, revision: str) -> str:
        """The commit of a branch; every other name of a revision stands for the first commit."""
        return self.uploads.heads.get((repo, revision or MAIN), revision if revision in self.uploads.files else COMMIT)

    def files_at(self, repo: str, revision: str) -> dict[str, bytes]:
        return self.uploads.files.get(self.head(repo, revision), self.repos[repo])

    def count(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes += num_bytes

    def forget(self) -> None:
        """Set the counts to zero."""
        self.num_bytes, self.asked = 0, []


class Handler(UploadAnswers, BaseHTTPRequestHandler):
    """Answers for the server's `hub`."""

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def hub(self) -> LocalHub:
        hub: LocalHub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self.hub.asked.append((self.path, self.headers.get("Range")))
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        for gone, (status, code) in GONE.items():
            if gone in self.path:
                headers = {"Content-Type": "text/html"} | ({"X-Error-Code": code} if code else {})
                self._send(status, b"<html>log in</html>", headers, with_body=with_body)
                return
        for odd, body in ODD.items():
            if odd in self.path:
                self._send(200, body, {"Content-Type": "application/json"}, with_body=with_body)
                return
        path = self.path.partition("?")[0]
        repo = next((name for name in self.hub.repos if f"/{name}/" in f"{path}/"), "")
        if not repo:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif "/tree/" in path:
            self._send_tree(repo, path.partition("/tree/")[2], with_body=with_body)
        elif path.startswith(("/api/models/", "/api/datasets/")):
            self._send_info(repo, path, with_body=with_body)
        elif path.startswith("/cdn/"):
            self._send_file(repo, path.rpartition("/")[2], with_body=with_body)
        else:
            self._resolve(repo, path.partition("/resolve/")[2].partition("/")[2], with_body=with_body)

    def _resolve(self, repo: str, name: str, *, with_body: bool) -> None:
        if name in self.hub.closed:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        elif name.endswith(".safetensors") and with_body:
            self._send(302, b"", {"Location": f"{self.hub.url}/cdn/{repo}/{name}"}, with_body=True)
        else:
            self._send_file(repo, name, with_body=with_body)

    def _send_file(self, repo: str, name: str, *, with_body: bool) -> None:
        data = self.hub.repos[repo].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body=with_body)
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        wanted = self.headers.get("Range")
        if wanted is None or not self.hub.ranges:
            self._send(200, data, headers, with_body=with_body)
            return
        begin, end = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        part = data[begin : end + 1]
        headers["Content-Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
        self._send(206, part, headers, with_body=with_body)

    def _send_tree(self, repo: str, revision: str, *, with_body: bool) -> None:
        entries = [tree_entry(name, data) for name, data in self.hub.files_at(repo, revision).items()]
        self._send_json(entries, with_body=with_body)

    def _send_info(self, repo: str, path: str, *, with_body: bool) -> None:
        revision, uploads = path.partition("/revision/")[2], self.hub.uploads
        if revision not in REVISIONS and (repo, revision) not in uploads.heads and revision not in uploads.files:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
            return
        siblings = [{"rfilename": name} for name in self.hub.repos[repo]]
        head, is_private = self.hub.head(repo, revision), repo in uploads.private
        info = {"_id": "0", "id": repo, "sha": head, "siblings": siblings, "private": is_private}
        self._send_json(info, with_body=with_body)

    def _send_json(self, document: Any, *, with_body: bool) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"}, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.hub.count(len(body))  # before the client can see the answer and ask for the count
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):  # a client may stop reading where it has enough
                self.hub.count(-len(body))


@contextmanager
def serving() -> Iterator[LocalHub]:
    """Run a hub until the context ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = LocalHub(url=f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub: LocalHub, home: Path) -> dict[str, str]:
    """Environment variables with which the hub library asks `hub` and keeps downloads in `home`."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def connected(env: Mapping[str, str]) -> Iterator[None]:
    """Give this process and its children this environment.

    The hub library reads the environment when it is imported, so its constants are replaced too.
    """
    from huggingface_hub import constants

    values = {
        "ENDPOINT": env["HF_ENDPOINT"],
        "HUGGINGFACE_CO_URL_TEMPLATE": env["HF_ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": env["HF_HOME"],
        "HF_HUB_CACHE": env["HF_HUB_CACHE"],
        "HF_TOKEN_PATH": f"{env['HF_HOME']}/token",
        "HF_HUB_DISABLE_XET": env["HF_HUB_DISABLE_XET"] == "1",
        "HF_HUB_OFFLINE": env["HF_HUB_OFFLINE"] == "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        for name, constant in values.items():
            patch.setattr(constants, name, constant)
        yield


def run(*args: object, env: Mapping[str, str]) -> Outcome:
    """Run the command line in this process with this environment."""
    with connected(env):
        return run_main(*args)


def refusal(*args: object, env: Mapping[str, str]) -> dict[str, Any]:
    """Exit code, id, path and hint of the error that ends a command."""
    outcome = run(*args, env=env)
    assert outcome.error is not None, outcome.out
    error = outcome.error
    return {"code": outcome.code, "id": error.id, "path": str(error.path), "hint": error.hint or ""}
