"""Hand-offs as files: one folder per request, with `handoff.json` and `kv.safetensors`.

A folder appears under its key only when it is complete, so a process that is killed while writing leaves nothing that
another process reads. Hand-offs stay until somebody removes them, and can be loaded any number of times, in any run. A
refused key has a file `.KEY.refused` with the reason, until a hand-off is saved under the key.
"""

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_runtime.checkpoint.stored.strict_json import read_bytes, regular_size
from dflash_runtime.documents import to_json
from dflash_runtime.errors import CheckpointError, InvalidHandoff, PeerUnreachable, UsageError, naming_file
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions, mark_written
from dflash_runtime.kv_transfer.connector_futures import settle
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.handoff_folders import HEADER, TENSORS, unreadable_handoff
from dflash_runtime.kv_transfer.handoff_headers import read_handoff_header
from dflash_runtime.kv_transfer.payload_bytes import assemble, header_with_checksums
from dflash_runtime.kv_transfer.receiving import refusal
from dflash_runtime.kv_transfer.transfer_outputs import transfer_output

NUM_THREADS = 4

LOOK_SECONDS = 0.01
"""Time between two looks for the hand-offs that loads wait for."""

MAX_REASON_BYTES = 100_000

NUM_LOOKS = 20
"""How often a hand-off is read again while another process replaces it."""


class FileConnector:
    """Saves hand-offs to a folder and loads them from it. A load waits until its hand-off exists."""

    name = "file"
    takes_device = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="handoff-file")
        self._waited_for: dict[str, list[Future[Handoff]]] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._is_closed = False

    def save(self, handoff: Handoff) -> "Future[None]":
        """See `Connector.save`. Replaces an older hand-off of the same key."""
        return self._pool.submit(_write, self.folder, handoff, mark_written(handoff.tensors))

    def load(self, key: str) -> "Future[Handoff]":
        future: Future[Handoff] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            self._waited_for.setdefault(check_key(key), []).append(future)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="handoff-watch", daemon=True)
                self._watcher.start()
        return future

    def refuse(self, key: str, reason: str) -> None:
        """See `Connector.refuse`.

        Raises:
            CapacityError: the refusal cannot be written.
        """
        file = refusal_file(self.folder, check_key(key))
        with transfer_output(file, "refusal", id="refusal-not-written") as partial:
            partial.write_text(reason, encoding="utf-8")

    def is_wanted(self, key: str) -> bool:
        return False

    def close(self) -> None:
        """See `Connector.close`. Running saves are completed."""
        with self._lock:
            self._is_closed = True
            waiting = [future for futures in self._waited_for.values() for future in futures]
            self._waited_for = {}
            watcher = self._watcher
        for future in waiting:
            future.cancel()
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _watch(self) -> None:
        """Begin to read each awaited hand-off once it exists. Ends when no load waits."""
        while not self._is_closed:
            with self._lock:
                ready = [(key, self._waited_for.pop(key)) for key in [*self._waited_for] if self._has_come(key)]
                self._waited_for = {key: futures for key, futures in self._waited_for.items()
                                    if not all(future.cancelled() for future in futures)}  # fmt: skip
                if not self._waited_for:
                    self._watcher = None
                is_done = self._watcher is None
            for key, futures in ready:
                self._begin_to_read(key, futures)
            if is_done:
                return
            time.sleep(LOOK_SECONDS)

    def _has_come(self, key: str) -> bool:
        """Whether a hand-off or a refusal exists, or the folder cannot be read, which the load then reports."""
        try:
            return (self.folder / key / HEADER).exists() or refusal_file(self.folder, key).exists()
        except OSError:
            return True

    def _begin_to_read(self, key: str, futures: "list[Future[Handoff]]") -> None:
        try:
            self._pool.submit(self._load_now, key, futures).add_done_callback(
                lambda done: [future.cancel() for future in futures] if done.cancelled() else None
            )
        except RuntimeError:  # the connector was closed meanwhile
            for future in futures:
                future.cancel()

    def _load_now(self, key: str, futures: "list[Future[Handoff]]") -> None:
        wanted = [future for future in futures if future.set_running_or_notify_cancel()]
        try:
            outcome: Any = _read_settled(self.folder, key)
        except Exception as error:
            outcome = error
        for future in wanted:
            settle(future, outcome)


def check_key(key: str) -> str:
    """The key, if it is safe as the name of a folder.

    Raises:
        UsageError: it leads to another folder, or names a hidden one.
    """
    if not key or key.startswith(".") or any(mark in key for mark in "/\\\0"):
        raise UsageError(field="key of a hand-off", found=key, expected="a name without / or \\ and no leading dot")
    return key


def refusal_file(folder: Path, key: str) -> Path:
    """The file with the reason why nothing will be saved under a key."""
    return folder / f".{key}.refused"


def read_handoff(path: Path) -> Handoff:
    """The hand-off in a folder, checked against its checksums.

    Raises:
        InvalidHandoff: a file is malformed, cut short or damaged. Names the file or the folder.
    """
    header, file = read_handoff_header(path), path / TENSORS
    try:
        if header.tensors:
            regular_size(file)  # before the file is opened, because opening a pipe would wait
        tensors = load_file(file) if header.tensors else {}
    except (SafetensorError, RuntimeError, OSError, CheckpointError) as error:  # torch maps the file: RuntimeError
        text = f"cannot be read, it may be cut short: {error}"
        raise InvalidHandoff(text, id="unreadable-handoff", path=file) from error
    with naming_file(path):
        return assemble(header, tensors, has_checksums=True)


def _read_settled(folder: Path, key: str) -> Handoff | PeerUnreachable:
    """The hand-off of a key, or the error of its refusal. Reads again while another process replaces the hand-off.

    Raises:
        InvalidHandoff: the hand-off cannot be read or is malformed.
    """
    path = folder / key
    try:
        for _ in range(NUM_LOOKS):
            before = _identity(path)
            if before is None and refusal_file(folder, key).exists():
                reason = read_bytes(refusal_file(folder, key), MAX_REASON_BYTES)
                return refusal(key, reason.decode("utf-8", errors="replace"))
            try:
                return read_handoff(path)
            except InvalidHandoff:
                if before is not None and _identity(path) == before:
                    raise
            time.sleep(LOOK_SECONDS)
        return read_handoff(path)
    except (OSError, CheckpointError) as error:
        raise error if isinstance(error, InvalidHandoff) else unreadable_handoff(path, error) from error


def _identity(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _write(folder: Path, handoff: Handoff, written: "list[torch.cuda.Event]") -> None:
    for event in written:
        event.synchronize()
    write_handoff(folder, handoff)


def write_handoff(folder: Path, handoff: Handoff) -> None:
    """Write a hand-off so that it appears complete, or not at all.

    Raises:
        CapacityError: it cannot be written, for example because the disk is full.
        UsageError: its key is not safe as the name of a folder.
    """
    with transfer_output(folder / check_key(handoff.key), "hand-off", id="handoff-not-written") as partial:
        partial.mkdir()
        if handoff.tensors:
            save_file({name: tensor.cpu().contiguous() for name, tensor in handoff.tensors.items()}, partial / TENSORS)
        text = json.dumps(to_json(header_with_checksums(handoff)), allow_nan=False)
        (partial / HEADER).write_text(text, encoding="utf-8")
        refusal_file(folder, handoff.key).unlink(missing_ok=True)


@CONNECTORS.register("file")
def open_folder(location: str, options: OpenOptions) -> Connector:
    """See `OpenLocation`. It does not wait for the other side, which may start earlier or much later.

    Raises:
        UsageError: the path is a file.
    """
    folder = Path(location)
    if folder.exists() and not folder.is_dir():
        raise UsageError("is a file, expected a folder for hand-offs", id="handoff-folder-is-a-file", path=folder)
    return FileConnector(folder)
