"""Hand-offs as files: a folder a request, with `handoff.json` and `kv.safetensors`.

A folder appears under its name when it is whole, so that a process that is killed while it writes leaves nothing that
is read. What lies there stays until somebody removes it: it may be loaded any number of times, in any run. A key of
which nothing will come has a file `.KEY.refused` with the reason, until something is saved under it after all.
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

from dflash_runtime.checkpoint.strict_json import parse_json
from dflash_runtime.errors import CapacityError, CheckpointError, InvalidHandoff, PeerUnreachable, UsageError
from dflash_runtime.kv_transfer.connector import CONNECTORS, Connector, OpenOptions, mark_written, settle
from dflash_runtime.kv_transfer.handoff import Handoff, check_header
from dflash_runtime.kv_transfer.payload_bytes import check_tensors, header_with_checksums
from dflash_runtime.whole_files import written_whole

HEADER, TENSORS = "handoff.json", "kv.safetensors"

NUM_THREADS = 4

LOOK_SECONDS = 0.01
"""How long until it is looked again whether a hand-off that is waited for has come."""

NUM_LOOKS = 20
"""How often a hand-off is read anew that is being replaced."""


class FileConnector:
    """Saves to a folder and loads from it; what is not there yet is waited for."""

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
        """See `Connector.save`; one of that key that lies there already is replaced."""
        return self._pool.submit(_write, self.folder, handoff, mark_written(handoff.tensors))

    def load(self, key: str) -> "Future[Handoff]":
        """See `Connector.load`."""
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
            CapacityError: it cannot be written down.
        """
        write_refusal(self.folder, check_key(key), reason)

    def is_wanted(self, key: str) -> bool:
        """See `Connector.is_wanted`."""
        return False

    def close(self) -> None:
        """See `Connector.close`; what is being written is written to its end."""
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
        """Begin to read each hand-off that is waited for once it is there; ends when nothing is waited for."""
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
        """Whether there is something to read: a hand-off, a refusal, or a reason why it cannot be seen."""
        try:
            return (self.folder / key / HEADER).exists() or refusal_file(self.folder, key).exists()
        except OSError:
            return True

    def _begin_to_read(self, key: str, futures: "list[Future[Handoff]]") -> None:
        try:
            self._pool.submit(self._read, key, futures).add_done_callback(
                lambda done: [future.cancel() for future in futures] if done.cancelled() else None
            )
        except RuntimeError:  # closed meanwhile
            for future in futures:
                future.cancel()

    def _read(self, key: str, futures: "list[Future[Handoff]]") -> None:
        wanted = [future for future in futures if future.set_running_or_notify_cancel()]
        try:
            outcome: Any = _read_settled(self.folder, key)
        except Exception as error:
            outcome = error
        for future in wanted:
            settle(future, outcome)


def check_key(key: str) -> str:
    """A key that may name a folder.

    Raises:
        UsageError: it may not, as it leads elsewhere or is hidden.
    """
    if not key or key.startswith(".") or any(mark in key for mark in "/\\\0"):
        raise UsageError(f"{key!r} is no key of a hand-off, expected a name without / that does not begin with a dot")
    return key


def refusal_file(folder: Path, key: str) -> Path:
    return folder / f".{key}.refused"


def list_handoffs(folder: Path) -> list[str]:
    """The keys of the whole hand-offs in a folder, in order.

    Raises:
        UsageError: there is no such folder, or none in it.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory, expected one with hand-offs")
    keys = sorted(item.name for item in folder.iterdir() if not item.name.startswith(".") and (item / HEADER).is_file())
    if not keys:
        raise UsageError(f"{folder}: no hand-offs in it", hint="dflash generate --handoff-out writes them")
    return keys


def read_header(path: Path) -> dict[str, Any]:
    """The header of the hand-off in a folder.

    Raises:
        InvalidHandoff: it is malformed.
    """
    file = path / HEADER
    try:
        header: dict[str, Any] = parse_json(file.read_bytes(), file)
    except OSError as error:
        raise InvalidHandoff(f"cannot be read: {error.strerror or error}", path=file) from error
    except InvalidHandoff:
        raise
    except CheckpointError as error:
        raise InvalidHandoff(error.message, hint=error.hint) from error
    try:
        check_header(header)
    except InvalidHandoff as error:
        raise InvalidHandoff(error.message, path=file, hint=error.hint) from error
    return header


def read_handoff(path: Path) -> Handoff:
    """The hand-off in a folder, checked against its checksums.

    Raises:
        InvalidHandoff: it is malformed, cut short or damaged; names the file.
    """
    header, file = read_header(path), path / TENSORS
    try:
        tensors = load_file(file) if header["tensors"] else {}
    except (SafetensorError, OSError) as error:
        raise InvalidHandoff(f"cannot be read, it may be cut short: {error}", path=file) from error
    try:
        check_tensors(header, tensors)
        return Handoff.read(header, tensors)
    except InvalidHandoff as error:
        raise InvalidHandoff(error.message, path=path, hint=error.hint) from error


def _read_settled(folder: Path, key: str) -> Handoff | PeerUnreachable:
    """What has come under a key: a hand-off, which may be replaced while it is read, or that there will be none.

    Raises:
        InvalidHandoff: it cannot be read.
    """
    path = folder / key
    try:
        for _ in range(NUM_LOOKS):
            before = _identity(path)
            if before is None and refusal_file(folder, key).exists():
                reason = refusal_file(folder, key).read_text(encoding="utf-8", errors="replace")
                return PeerUnreachable(f"hand-off {key} will not come: {reason}")
            try:
                return read_handoff(path)
            except InvalidHandoff:
                if before is not None and _identity(path) == before:
                    raise
            time.sleep(LOOK_SECONDS)
        return read_handoff(path)
    except OSError as error:
        raise InvalidHandoff(f"cannot be read: {error.strerror or error}", path=path) from error


def _identity(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def write_refusal(folder: Path, key: str, reason: str) -> None:
    """Write down that nothing will be saved under a key, whole or not at all.

    Raises:
        CapacityError: it cannot be written.
    """
    final = refusal_file(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(final) as partial:
            partial.write_text(reason, encoding="utf-8")
    except OSError as error:
        raise CapacityError(f"{final}: not written: {error.strerror or error}") from error


def _write(folder: Path, handoff: Handoff, written: "list[torch.cuda.Event]") -> None:
    for event in written:
        event.synchronize()
    write_handoff(folder, handoff)


def write_handoff(folder: Path, handoff: Handoff) -> None:
    """Write a hand-off so that it appears whole, or not at all.

    Raises:
        CapacityError: it cannot be written, as on a full disk.
        UsageError: its key is no name of a folder.
    """
    final = folder / check_key(handoff.key)
    try:
        with written_whole(final) as partial:
            partial.mkdir(parents=True)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in handoff.tensors.items()}
            if tensors:
                save_file(tensors, partial / TENSORS)
            (partial / HEADER).write_text(json.dumps(header_with_checksums(handoff), allow_nan=False), encoding="utf-8")
        refusal_file(folder, handoff.key).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CapacityError(f"{final}: hand-off not written: {reason}") from error


@CONNECTORS.register("file")
def open_folder(place: str, options: OpenOptions) -> Connector:
    """See `OpenPlace`; nobody is waited for, since either side may come first, or much later.

    Raises:
        UsageError: it is no folder.
    """
    folder = Path(place)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file, expected a folder for hand-offs")
    return FileConnector(folder)
