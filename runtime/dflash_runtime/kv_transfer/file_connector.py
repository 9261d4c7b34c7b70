"""Hand-offs as files: a folder a request, with `handoff.json` and `kv.safetensors`.

A folder appears under its name when it is whole, so that a process that is killed while it writes leaves nothing that
is read. What lies there stays until somebody removes it: it may be loaded any number of times, in any run.
"""

import json
import os
import shutil
import threading
import time
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_runtime.checkpoint.strict_json import parse_json
from dflash_runtime.errors import CapacityError, CheckpointError, InvalidHandoff, UsageError
from dflash_runtime.kv_transfer.handoff import Handoff, check_header
from dflash_runtime.kv_transfer.payload_bytes import check_tensors, header_with_checksums

HEADER, TENSORS = "handoff.json", "kv.safetensors"

NUM_THREADS = 4

LOOK_SECONDS = 0.01
"""How long until it is looked again whether a hand-off that is waited for has come."""


class FileConnector:
    """Saves to a folder and loads from it; what is not there yet is waited for."""

    name = "file"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="handoff-file")
        self._waited_for: dict[str, list[Future[Handoff]]] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._is_closed = False

    def save(self, handoff: Handoff) -> "Future[None]":
        """See `Connector.save`; one of that key that lies there already is replaced."""
        return self._pool.submit(write_handoff, self.folder, handoff)

    def load(self, key: str) -> "Future[Handoff]":
        """See `Connector.load`."""
        future: Future[Handoff] = Future()
        with self._lock:
            self._waited_for.setdefault(key, []).append(future)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="handoff-watch", daemon=True)
                self._watcher.start()
        return future

    def close(self) -> None:
        """See `Connector.close`; what is being written is written to its end."""
        self._is_closed = True
        with self._lock:
            waiting = [future for futures in self._waited_for.values() for future in futures]
            self._waited_for = {}
        for future in waiting:
            future.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _watch(self) -> None:
        """Begin to read each hand-off that is waited for once it is there; ends when nothing is waited for."""
        while not self._is_closed:
            with self._lock:
                found = [key for key in self._waited_for if (self.folder / key / HEADER).exists()]
                ready = [(key, self._waited_for.pop(key)) for key in found]
                self._waited_for = {key: futures for key, futures in self._waited_for.items()
                                    if not all(future.cancelled() for future in futures)}  # fmt: skip
                if not self._waited_for:
                    self._watcher = None
                is_done = self._watcher is None
            for key, futures in ready:
                with suppress(RuntimeError):  # closed meanwhile
                    self._pool.submit(self._read, key, futures)
            if is_done:
                return
            time.sleep(LOOK_SECONDS)

    def _read(self, key: str, futures: "list[Future[Handoff]]") -> None:
        wanted = [future for future in futures if future.set_running_or_notify_cancel()]
        try:
            handoff = read_handoff(self.folder / key)
        except Exception as error:
            for future in wanted:
                future.set_exception(error)
            return
        for future in wanted:
            with suppress(InvalidStateError):
                future.set_result(handoff)


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


def write_handoff(folder: Path, handoff: Handoff) -> None:
    """Write a hand-off so that it appears whole, or not at all.

    Raises:
        CapacityError: it cannot be written, as on a full disk.
    """
    final = folder / handoff.key
    partial = folder / f".{handoff.key}.tmp-{os.getpid()}-{threading.get_ident()}"
    try:
        partial.mkdir(parents=True)
        if handoff.tensors:
            save_file({name: tensor.cpu().contiguous() for name, tensor in handoff.tensors.items()}, partial / TENSORS)
        (partial / HEADER).write_text(json.dumps(header_with_checksums(handoff), allow_nan=False), encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CapacityError(f"{final}: hand-off not written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
