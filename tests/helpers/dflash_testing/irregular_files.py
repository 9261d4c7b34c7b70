"""Paths that are not regular files, each in place of a file that a reader expects."""

import os
import shutil
import socket
from pathlib import Path

IRREGULAR = ("pipe", "directory", "endless device", "socket", "link to nothing", "link to itself")


def make_irregular(path: Path, kind: str) -> None:
    """Replace whatever is at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "endless device":
            path.symlink_to("/dev/zero")
        case "socket":
            _bind(path)
        case "link to nothing":
            path.symlink_to("nowhere")
        case _:
            path.symlink_to(path.name)


def _bind(path: Path) -> None:
    """A socket at a path of any length: the system limits only the path that it is bound to."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
