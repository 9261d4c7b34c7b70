"""Download a repository into the hub's cache. The size is printed first, and the hub's own bars show progress."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_cli.terminal import console
from dflash_runtime.phrases import plural


def download_snapshot(
    repo: str, revision: str | None, patterns: list[str], *, repo_type: str = "model", is_local: bool = False
) -> Path:
    """The snapshot with the files of a repository that match the patterns. With `is_local` only the cache is read.

    Raises:
        OSError, ValueError: errors of huggingface_hub, which `hub.explained` turns into our errors.
    """
    from huggingface_hub import snapshot_download

    if not is_local:
        _announce(repo, revision, patterns, repo_type)
    with _bars(is_shown=sys.stderr.isatty() and not console.is_quiet()):
        return Path(
            snapshot_download(
                repo, repo_type=repo_type, revision=revision, allow_patterns=patterns, local_files_only=is_local
            )
        )


def _announce(repo: str, revision: str | None, patterns: list[str], repo_type: str) -> None:
    """Print the size of a download, if there is anything to download. Errors are left to the download itself."""
    from huggingface_hub import snapshot_download

    try:
        with _bars(is_shown=False):
            files = snapshot_download(
                repo, repo_type=repo_type, revision=revision, allow_patterns=patterns, dry_run=True
            )
    except (OSError, ValueError):
        return
    missing = [item for item in files if item.will_download]
    if missing:
        size = sum(item.file_size or 0 for item in missing)
        console.status(f"downloading {repo}: {_size(size)} in {plural(len(missing), 'file')}")


@contextmanager
def _bars(*, is_shown: bool) -> Iterator[None]:
    """Show or hide the hub's progress bars in the block, unless HF_HUB_DISABLE_PROGRESS_BARS decides."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if is_shown or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _size(num_bytes: int) -> str:
    """`16.4 GB`, in units of 1,000 as the hub counts."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
