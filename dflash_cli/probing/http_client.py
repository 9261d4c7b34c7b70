"""Requests to one server, with a limit of time, retries of what may pass, and errors of one line.

The HTTP library is the one that the hub's client brings: httpx, or httpx2 from its release 2. Both have the names that
are used here.
"""

import threading
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from dflash_runtime.errors import CheckpointNotFound, RequestError, UnsupportedError, UsageError

BUSY = 429
REDIRECTED = 300
"""From here on there is no answer: what is asked of one server is not asked of another that it names."""
CLOSED = (401, 403)
FIRST_PAUSE_S = 0.5


class ServerUnreachable(CheckpointNotFound):
    """A server that does not answer, or not with what was asked for, however often it is asked."""


class HttpClient:
    """Asks one server. `key` is sent to it alone, and is in no message.

    What may pass is tried again: no answer in time, a broken connection, a status of 500 or more, or 429. The pause
    before each retry is twice the last.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 120.0,
        num_retries: int = 3,
    ) -> None:
        self._library: Any = import_module("httpx2" if find_spec("httpx2") else "httpx")
        self.url = _base_url(url)
        self._num_retries, self._timeout_s = num_retries, timeout_s
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = self._library.Limits(max_connections=None)
        # Where nothing is encrypted no certificates are needed, which take a tenth of a second to read.
        is_encrypted = self.url.startswith("https")
        self._client = self._library.Client(headers=headers, timeout=timeout_s, limits=limits, verify=is_encrypted)
        self._count = threading.Lock()
        self.num_retried = 0

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """The JSON document at a path.

        Raises:
            ServerUnreachable, UnsupportedError: it cannot be had, or is no JSON.
        """
        return self._read(path, self._ask("GET", path))

    def find(self, path: str) -> Any | None:
        """The JSON document at a path, or None where the server has none there."""
        response = self._ask("GET", path)
        if response.status_code >= REDIRECTED:
            return None
        try:
            return response.json()
        except ValueError:
            return None

    def find_text(self, path: str) -> str | None:
        """The text at a path, or None where the server has none there."""
        response = self._ask("GET", path)
        return None if response.status_code >= REDIRECTED else str(response.text)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON document that answers a request.

        Raises:
            RequestError: the server refuses what was asked.
            ServerUnreachable, UnsupportedError: there is no answer, or it is no JSON.
        """
        return self._read(path, self._ask("POST", path, body))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        for attempt in range(self._num_retries + 1):
            try:
                response = self._client.request(method, f"{self.url}{path}", json=body)
                trouble = f"answered {response.status_code}" if _may_pass(response.status_code) else None
            except self._library.ConnectError as error:
                raise self._unreachable(
                    path, "the connection was refused", "is it running, and is the URL right?"
                ) from error
            except self._library.TimeoutException:
                trouble = f"no answer in {self._timeout_s:g} s"
            except self._library.HTTPError as error:
                trouble = f"broken off ({type(error).__name__})"
            if trouble is None:
                return self._checked(path, response)
            if attempt < self._num_retries:
                with self._count:
                    self.num_retried += 1
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        tries = "1 try" if not self._num_retries else f"{self._num_retries + 1} tries"
        raise self._unreachable(path, f"{trouble}, after {tries}", "raise --timeout, or see the server's log")

    def _checked(self, path: str, response: Any) -> Any:
        if response.status_code in CLOSED:
            hint = "put its key into an environment variable and name that with --api-key-env"
            raise self._unreachable(path, f"answered {response.status_code}", hint)
        return response

    def _read(self, path: str, response: Any) -> Any:
        if response.status_code >= REDIRECTED:
            said = _reason(response)
            raise RequestError(f"{self.url}{path}: answered {response.status_code}{said}")
        try:
            return response.json()
        except ValueError as error:
            found = response.text[:40]
            raise UnsupportedError(f"{self.url}{path}: found {found!r}, expected a JSON document") from error

    def _unreachable(self, path: str, why: str, hint: str) -> ServerUnreachable:
        return ServerUnreachable(f"{self.url}{path}: {why}", hint=hint)


def _may_pass(status: int) -> bool:
    return status >= 500 or status == BUSY


def _reason(response: Any) -> str:
    """What the server says of a refusal, on one line; engines put it in different places."""
    try:
        document = response.json()
    except ValueError:
        return ""
    found = document.get("error", document) if isinstance(document, dict) else {}
    text = found.get("message") if isinstance(found, dict) else found
    return f": {' '.join(text.split())[:160]}" if isinstance(text, str) else ""


def _base_url(url: str) -> str:
    """Scheme, host and path without a trailing `/v1`; what a URL says of users and passwords is refused."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url}: no URL of a server", hint="such as http://localhost:8000")
    if parts.username is not None:
        raise UsageError("the URL holds a user or password", hint="name an environment variable with --api-key-env")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
