"""Send requests to one server, with a timeout, retries of temporary failures, and one-line errors.

The HTTP library comes with huggingface_hub: httpx, or httpx2 from release 2. Both have the names used here.
"""

import threading
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from dflash_runtime.errors import CheckpointNotFound, RequestError, UnsupportedError, UsageError

TEMPORARY = (429, 500, 502, 503, 504)
REDIRECTED = 300
"""A status from here on is a failure. Redirects are not followed, so the API key never reaches another server."""
CLOSED = (401, 403)
FIRST_PAUSE_S = 0.5


class ServerUnreachable(CheckpointNotFound):
    """A server that gives no usable answer, even after retries."""


class HttpClient:
    """A client of one server. It sends `key` to this server only and never prints it.

    It repeats a request after a timeout, a broken connection, or a temporary status. Each pause is twice the previous
    one.
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
        self.url = base_url(url)
        self._num_retries, self._timeout_s = num_retries, timeout_s
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = self._library.Limits(max_connections=None)
        # Reading certificates takes a tenth of a second, and plain HTTP needs none.
        is_encrypted = self.url.startswith("https")
        self._client = self._library.Client(headers=headers, timeout=timeout_s, limits=limits, verify=is_encrypted)
        self._count = threading.Lock()
        self.num_retried = 0

    def close(self) -> None:
        self._client.close()

    def find(self, path: str) -> Any | None:
        """The JSON document at a path, or None if the server has no such document."""
        response = self._ask("GET", path)
        if response.status_code >= REDIRECTED:
            return None
        try:
            return response.json()
        except ValueError:
            return None

    def find_text(self, path: str) -> str | None:
        """The text at a path, or None if the server has no such path."""
        response = self._ask("GET", path)
        return None if response.status_code >= REDIRECTED else str(response.text)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON document that answers a request.

        Raises:
            RequestError: the server refuses the request.
            ServerUnreachable: the server does not answer.
            UnsupportedError: the answer is not JSON.
        """
        response = self._ask("POST", path, body)
        if response.status_code >= REDIRECTED:
            raise RequestError(
                f"answered {response.status_code}{_reason(response)}",
                id="server-refused",
                path=f"{self.url}{path}",
                found=response.status_code,
            )
        try:
            return response.json()
        except ValueError as error:
            found = response.text[:40]
            raise UnsupportedError(
                f"found {found!r}, expected a JSON document",
                id="not-json",
                path=f"{self.url}{path}",
                found=found,
                expected="a JSON document",
            ) from error

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        for attempt in range(self._num_retries + 1):
            try:
                response = self._client.request(method, f"{self.url}{path}", json=body)
                status = response.status_code
                trouble = f"answered {status}" if status in TEMPORARY else None
            except self._library.ConnectError as error:
                hint = "start the server, or correct the URL"
                raise self._unreachable(path, "the connection was refused", hint, id="connection-refused") from error
            except self._library.TimeoutException:
                trouble = f"no answer in {self._timeout_s:g} s"
            except self._library.HTTPError as error:
                trouble = f"the connection broke ({type(error).__name__})"
            if trouble is None:
                return self._checked(path, response)
            if attempt < self._num_retries:
                with self._count:
                    self.num_retried += 1
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        tries = "1 try" if not self._num_retries else f"{self._num_retries + 1} tries"
        hint = "raise --timeout, or look in the server's log"
        raise self._unreachable(path, f"{trouble}, after {tries}", hint, id="no-answer")

    def _checked(self, path: str, response: Any) -> Any:
        if response.status_code in CLOSED:
            hint = "put the key into an environment variable and add --api-key-env NAME"
            raise self._unreachable(path, f"answered {response.status_code}", hint, id="key-refused")
        return response

    def _unreachable(self, path: str, why: str, hint: str, *, id: str) -> ServerUnreachable:
        return ServerUnreachable(why, id=id, path=f"{self.url}{path}", hint=hint)


def _reason(response: Any) -> str:
    """The server's reason for a refusal, on one line. Each engine has its own field for it."""
    try:
        document = response.json()
    except ValueError:
        return ""
    found = document.get("error", document) if isinstance(document, dict) else {}
    text = found.get("message") if isinstance(found, dict) else found
    return f": {' '.join(text.split())[:160]}" if isinstance(text, str) else ""


def base_url(url: str) -> str:
    """Scheme, host and path without a trailing `/v1`.

    Raises:
        UsageError: this is not a URL, or it holds a user name or password.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(field="URL", found=url, expected="a server's address, such as http://localhost:8000")
    if parts.username is not None:
        raise UsageError(
            "the URL holds a user name or password",
            id="password-in-url",
            field="URL",
            hint="put the key into an environment variable and add --api-key-env NAME",
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
