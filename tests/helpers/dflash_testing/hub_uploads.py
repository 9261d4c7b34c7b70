"""The hub's calls for uploads: create a repository or a branch, preupload, LFS batch and upload, commit."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WRITER = "hf_" + "w" * 34
"""The token that may write to the namespace `acme`."""
MAIN = "main"
START = "1" * 40
"""The first commit of every repository."""


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(name: str) -> bool:
    """Whether the hub keeps a file as a large one."""
    return name.endswith(".safetensors")


def tree_entry(name: str, data: bytes) -> dict[str, Any]:
    """A file in the hub's list."""
    entry = {"type": "file", "path": name, "size": len(data), "oid": git_hash(data)}
    if is_large(name):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


@dataclass
class Uploads:
    """What was uploaded. `heads` has the commit of each branch, `files` the files of each commit.

    `fails_at` names a call, such as "commit", that is answered with `fails_with`.
    """

    private: set[str] = field(default_factory=set)
    heads: dict[tuple[str, str], str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    subjects: list[str] = field(default_factory=list)
    fails_at: str = ""
    fails_with: int = 500


class UploadAnswers:
    """Answers of a request handler to POST and PUT."""

    hub: Any
    headers: Any
    path: str
    rfile: Any

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0].removeprefix("/api/models/")
        repo = "/".join(path.split("/")[:2])
        if path == "/api/repos/create":
            self._answer_call("create", lambda: self._create(json.loads(body)))
        elif path == "/api/validate-yaml":
            self._answer_call("validate-yaml", lambda: _check_yaml(json.loads(body)["content"]))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer_call("batch", lambda: self._batch(json.loads(body)))
        elif repo not in self.hub.repos:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body=True)  # type: ignore[attr-defined]
        elif "/branch/" in path:
            self._answer_call("branch", lambda: self._branch(repo, path.rpartition("/")[2]))
        elif "/preupload/" in path:
            self._answer_call("preupload", lambda: self._preupload(repo, path.rpartition("/")[2], json.loads(body)))
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            self._answer_call("commit", lambda: self._commit(repo, path.rpartition("/")[2], lines))

    def do_PUT(self) -> None:
        oid, data = self.path.rpartition("/")[2], self._body()

        def keep() -> tuple[int, Any]:
            assert hashlib.sha256(data).hexdigest() == oid
            self.hub.uploads.objects[oid] = data
            return 200, {}

        self._answer_call("upload", keep, needs_token=False)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return bytes(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer_call(self, name: str, answer: Any, *, needs_token: bool = True) -> None:
        uploads, send = self.hub.uploads, self._send  # type: ignore[attr-defined]
        with self.hub.lock:
            uploads.calls.append(name)
        if needs_token and self.headers.get("Authorization") != f"Bearer {WRITER}":
            headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
            send(401, b"", headers, with_body=True)
            return
        status, document = (uploads.fails_with, {}) if uploads.fails_at == name else answer()
        send(status, json.dumps(document).encode(), {"Content-Type": "application/json"}, with_body=True)

    def _create(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        repo = f"{body['organization']}/{body['name']}"
        if body["organization"] != "acme":
            return 403, {"error": "no rights in this namespace"}
        if repo in self.hub.repos:
            return 409, {"error": "exists"}
        self.hub.repos[repo] = {}
        if body.get("private") or body.get("visibility") == "private":
            self.hub.uploads.private.add(repo)
        return 200, {"url": f"{self.hub.url}/{repo}", "name": repo}

    def _branch(self, repo: str, branch: str) -> tuple[int, Any]:
        self.hub.uploads.heads[repo, branch] = self.hub.head(repo, MAIN)
        return 200, {}

    def _preupload(self, repo: str, revision: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        stored = self.hub.files_at(repo, revision)
        files = [
            {
                "path": item["path"],
                "uploadMode": "lfs" if is_large(item["path"]) else "regular",
                "shouldIgnore": False,
                "oid": git_hash(stored[item["path"]]) if item["path"] in stored else None,
            }
            for item in body["files"]
        ]
        return 200, {"files": files}

    def _batch(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        objects = []
        for item in body["objects"]:
            known = item["oid"] in self.hub.uploads.objects
            href = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            objects.append({**item, **({} if known else {"actions": href})})
        return 200, {"transfer": "basic", "objects": objects}

    def _commit(self, repo: str, revision: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        uploads = self.hub.uploads
        head, files = lines[0]["value"], dict(self.hub.files_at(repo, revision))
        is_pull_request = "create_pr=1" in self.path
        if head.get("parentCommit", self.hub.head(repo, revision)) != self.hub.head(repo, revision):
            return 412, {"error": "the branch has moved"}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                files[value["path"]] = uploads.objects[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        oid = hashlib.sha1(repr((repo, revision, head["summary"], sorted(files.items()))).encode()).hexdigest()
        uploads.files[oid] = files
        uploads.subjects.append(head["summary"])
        answer = {"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid}
        if is_pull_request:
            return 200, {**answer, "pullRequestUrl": f"{self.hub.url}/{repo}/discussions/1"}
        uploads.heads[repo, revision] = oid
        if revision == MAIN:
            self.hub.repos[repo] = files
        return 200, answer


def _check_yaml(content: str) -> tuple[int, Any]:
    """The hub wants tags to be a list."""
    is_wrong = "\ntags: 7\n" in content
    return (400, {"errors": [{"message": '"tags" must be an array'}]}) if is_wrong else (200, {"errors": []})
