"""The ids that end a text come from the target's config, its generation config and its tokenizer."""

import json
from pathlib import Path

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.text.tokenizer import Tokenizer, find_stop_ids, find_tokenizer
from dflash_testing import checkpoints as support
from dflash_testing.pairs import bundled_tokenizer


def test_stop_ids_are_joined(tmp_path: Path) -> None:
    path = support.make_target(tmp_path / "target", eos_token_id=5)
    assert find_stop_ids(open_target(path)) == (5,)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert find_stop_ids(open_target(path)) == (5, 7)
    tokenizer = bundled_tokenizer()
    assert tokenizer.eos_token_id is not None
    assert find_stop_ids(open_target(path), tokenizer) == tuple(sorted({5, 7, tokenizer.eos_token_id}))


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    (tmp_path / "vocab.json").write_text("{}")
    assert isinstance(find_tokenizer(tmp_path), Tokenizer)
