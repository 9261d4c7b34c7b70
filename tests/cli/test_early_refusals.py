"""A fault that the command line, a small file or the headers show is refused before any weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_testing import checkpoints as support
from dflash_testing.command_line import run_main

FREE_BYTES = 12 * 2**30
FEW = [{"prompt_token_ids": [1, 2, 3]}] * 3
REFUSED: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "prompts of diagnose": (2, "too-few-prompts", ("diagnose", "tiny", "-p", "few.jsonl")),
    "prompts of validate": (2, "too-few-prompts", ("validate", "tiny", "--level", "run", "-p", "few.jsonl")),
    "copy of a draft": (2, "output-exists", ("validate", "broken", "--level", "weights", "--fix-out", "few.jsonl")),
    "copy nowhere": (2, "no-parent-directory", ("validate", "broken", "--level", "weights", "--fix-out", "no/where")),
    "prefix store": (2, "prefix-store-is-a-file", ("generate", "x", "--prefix-store", "/dev/null")),
    "threads": (2, "usage-error", ("generate", "x", "--threads", "1025")),
    "workers": (2, "usage-error", ("eval-acceptance", "tiny", "--workers", "4097")),
    "KV memory": (6, "kv-cache-too-small", ("generate", "x", "--kv-memory", "10K")),
    "working memory": (6, "pair-too-large", ("generate", "x", "--max-batched-tokens", "400000")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_no_weight_is_read(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> Any:
        raise AssertionError("a weight was read")

    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FEW))
    support.make_native(Path("broken"), block_size=0)
    monkeypatch.setattr("dflash_runtime.checkpoint.stored.files.Checkpoint.load_many", read)
    monkeypatch.setattr("dflash_runtime.device.capacity.memory.available_bytes", lambda: FREE_BYTES)
    code, id, arguments = REFUSED[case]
    done = run_main(*arguments)
    assert (done.code, done.error_id) == (code, id), done
