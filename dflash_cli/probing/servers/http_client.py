"""Send requests to one server, with limits of time and size, retries of temporary failures, and one-line errors.

The HTTP library comes with huggingface_hub: httpx, or httpx2 from release 2. Both have the names used here.
"""

import atexit
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.errors import CheckpointNotFound, RequestError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import asyncio

WAITED_TOO_LONG = (408, 504, 524)
"""Statuses of a proxy or server that has waited to its own limit of time."""
TEMPORARY = (429, 500, 502, 503, *WAITED_TOO_LONG)
FULL = (429, 503)
"""Statuses of a server with too many requests."""
REDIRECTED = 300
"""A status from here on is a failure. Redirects are not followed, so the API key never reaches another server."""
CLOSED = (401, 403)
EVENT_END = re.compile(rb"^data:.*\r?\n", re.MULTILINE)
FIRST_PAUSE_S = 0.5
CLOSING_S = 1.0
MAX_ANSWER_BYTES = 16_000_000
"""The largest answer. An answer of 128k tokens with its steps has some megabytes."""


class AnswerTooLarge(Exception):
    """An answer of more than MAX_ANSWER_BYTES."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and the body of an answer."""

    status: int
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The JSON value of the body.

        Raises:
            ValueError: see `loads`.
        """
        return loads(self.data)


class ServerUnreachable(CheckpointNotFound):
    """A server that gives no usable answer, even after retries."""


class TimeIsUp(ServerUnreachable):
    """The time for all requests has passed."""


class HttpClient:
    """A client of one server. It sends `key` to this server only and never prints it.

    It repeats a request after a timeout, a broken connection, or a temporary status. Each pause is twice the previous
    one. `timeout_s` limits a request from its connection to the last byte of its answer. After `ends_at`, in seconds
    of `time.monotonic`, every request ends with `TimeIsUp`.
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
        limits = self._library.Limits(max_connections=None, max_keepalive_connections=0)
        # Reading certificates takes a tenth of a second, and plain HTTP needs none.
        is_encrypted = self.url.startswith("https")
        # A compressed answer could be far larger than its bytes on the wire.
        headers["Accept-Encoding"] = "identity"
        self._client = self._library.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, verify=is_encrypted)
        self._count = threading.Lock()
        self.num_retried = 0
        self.refusals: Counter[int] = Counter()
        """Status of FULL -> answers with it."""
        self.ends_at = math.inf

    def close(self) -> None:
        import asyncio

        asyncio.run_coroutine_threadsafe(self._client.aclose(), _loop()).result()

    def find(self, path: str) -> Any | None:
        """The JSON document at a path, or None if the server has no such document."""
        response = self._ask("GET", path)
        if response.status >= REDIRECTED:
            return None
        try:
            return response.json()
        except ValueError:
            return None

    def find_text(self, path: str) -> str | None:
        """The text at a path, or None if the server has no such path."""
        response = self._ask("GET", path)
        return None if response.status >= REDIRECTED else response.text

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON document that answers a request.

        Raises:
            RequestError: the server refuses the request.
            ServerUnreachable: the server does not answer.
            UnsupportedError: the answer is not JSON, or is too large.
        """
        response = self._post(path, body)
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

    def post_text(self, path: str, body: Mapping[str, Any]) -> str:
        """The stream of events that answers a request. Raises the errors of `post`.

        If the connection breaks after an event, the events before it are the answer.
        """
        return self._post(path, body, is_stream=True).text

    def _post(self, path: str, body: Mapping[str, Any], *, is_stream: bool = False) -> Answer:
        response = self._ask("POST", path, body, is_stream=is_stream)
        if response.status >= REDIRECTED:
            raise RequestError(
                f"answered {response.status}{_reason(response)}",
                id="server-refused",
                path=f"{self.url}{path}",
                found=response.status,
            )
        return response

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, is_stream: bool = False) -> Answer:
        for attempt in range(self._num_retries + 1):
            if time.monotonic() >= self.ends_at:
                raise self._time_is_up(path)
            try:
                response = self._fetch(method, path, body, is_stream=is_stream)
                status = response.status
                trouble = f"answered {status}" if status in TEMPORARY else None
                with self._count:
                    self.refusals.update([status] if status in FULL else [])
            except self._library.ConnectError as error:
                hint = "start the server, or correct the URL"
                raise self._unreachable(path, "the connection was refused", hint, id="connection-refused") from error
            except AnswerTooLarge as error:
                expected = f"at most {MAX_ANSWER_BYTES} bytes"
                raise UnsupportedError(
                    f"the answer is larger than expected: {expected}",
                    id="answer-too-large", path=f"{self.url}{path}", expected=expected,
                ) from error  # fmt: skip
            except (TimeoutError, self._library.TimeoutException):
                trouble = f"no answer in {self._timeout_s:g} s"
            except (self._library.HTTPError, ValueError) as error:  # ValueError: a malformed head of an answer
                trouble = f"the connection broke ({type(error).__name__})"
            if trouble is None:
                return self._checked(path, response)
            if time.monotonic() >= self.ends_at:
                raise self._time_is_up(path)
            if attempt < self._num_retries:
                with self._count:
                    self.num_retried += 1
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        tries = "1 try" if not self._num_retries else f"{self._num_retries + 1} tries"
        hint = "raise --timeout, or look in the server's log"
        raise self._unreachable(path, f"{trouble}, after {tries}", hint, id="no-answer")

    def _fetch(self, method: str, path: str, body: Mapping[str, Any] | None, *, is_stream: bool) -> Answer:
        import asyncio  # not at the top: help takes no time for it

        answer = self._answer(method, f"{self.url}{path}", body, is_stream=is_stream)
        request = asyncio.run_coroutine_threadsafe(answer, _loop())
        try:
            return request.result()
        finally:
            request.cancel()  # after an interruption

    async def _answer(self, method: str, url: str, body: Mapping[str, Any] | None, *, is_stream: bool) -> Answer:
        import asyncio

        data = bytearray()
        limit = min(self._timeout_s, self.ends_at - time.monotonic())
        async with asyncio.timeout(limit), self._client.stream(method, url, json=body) as response:
            try:
                async for chunk in response.aiter_raw():
                    data += chunk
                    if len(data) > MAX_ANSWER_BYTES:
                        raise AnswerTooLarge
            except (self._library.RemoteProtocolError, self._library.ReadError):
                if not (is_stream and EVENT_END.search(data)):
                    raise
            return Answer(response.status_code, bytes(data))

    def _checked(self, path: str, response: Answer) -> Answer:
        if response.status in CLOSED:
            hint = "put the key into an environment variable and add --api-key-env NAME"
            raise self._unreachable(path, f"answered {response.status}", hint, id="key-refused")
        return response

    def _time_is_up(self, path: str) -> TimeIsUp:
        hint = "raise --max-time"
        return TimeIsUp("the time for all requests has passed", id="time-is-up", path=f"{self.url}{path}", hint=hint)

    def _unreachable(self, path: str, why: str, hint: str, *, id: str) -> ServerUnreachable:
        return ServerUnreachable(why, id=id, path=f"{self.url}{path}", hint=hint)


@cache
def _loop() -> "asyncio.AbstractEventLoop":
    """The loop of all requests, in a thread of its own. It can end a request at any moment, also in its headers."""
    import asyncio

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="http-client", daemon=True)
    thread.start()

    def close() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSING_S)
        if not thread.is_alive():
            loop.close()

    atexit.register(close)
    return loop


def _reason(response: Answer) -> str:
    """The server's reason for a refusal, on one line. Each engine has its own field for it."""
    try:
        document = response.json()
    except ValueError:
        return ""
    found = document.get("error", document) if isinstance(document, dict) else {}
    text = found.get("message") if isinstance(found, dict) else found
    return f": {' '.join(text.split())[:160]}" if isinstance(text, str) else ""


def told_status(message: str, among: Collection[int]) -> int | None:
    """The status of an answer in an error's words; None unless it is one of these."""
    found = re.search(r"\banswered (\d{3})\b", message)
    return status if found and (status := int(found[1])) in among else None


def base_url(url: str) -> str:
    """Scheme, host and path without a trailing `/v1`.

    Raises:
        UsageError: this is not a URL, or it holds a user name or password.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        has_host = bool(parts.hostname) and parts.port != 0  # reading the port checks it
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https") or Path(url).exists():
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
