"""Every reader of files and messages from outside, with sound inputs for `reader_fuzzing`."""

from pathlib import Path

from dflash_testing.fuzzed_engine import of_engines, of_stores
from dflash_testing.fuzzed_files import of_checkpoints, of_json
from dflash_testing.fuzzed_handoffs import of_handoffs, of_sockets
from dflash_testing.fuzzed_hub import of_hub
from dflash_testing.fuzzed_models import of_families, of_side_files, of_tokenizers
from dflash_testing.fuzzed_results import of_documents, of_rows
from dflash_testing.fuzzed_servers import of_servers
from dflash_testing.reader_fuzzing import Reader


def make_readers(home: Path) -> dict[str, Reader]:
    """Every reader by name. `home` is an empty directory, best in memory, for readers of files."""
    parts = (
        of_json, of_checkpoints, of_documents, of_rows, of_handoffs, of_sockets, of_servers, of_families, of_tokenizers,
        of_side_files, of_stores, of_engines, of_hub,
    )  # fmt: skip
    readers: dict[str, Reader] = {}
    for part in parts:
        folder = home / part.__name__
        folder.mkdir()
        readers |= part(folder)
    return readers
