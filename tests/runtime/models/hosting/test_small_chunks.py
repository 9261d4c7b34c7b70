"""Blocks are read in smaller chunks where that changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_runtime.models.hosting import own_cache_trial
from dflash_runtime.models.hosting.small_chunks import CHUNK, Chunked, find_chunks, small_chunks
from dflash_testing.hosted_models import host_own_cache, make_model


@pytest.mark.parametrize(("kind", "size"), [("mamba2", {"chunk_size": 64}), ("qwen3_5_text", {})])
def test_chunks_are_small_only_for_blocks(
    kind: str, size: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, kind, **size)
    target = host_own_cache(tmp_path)
    assert target.chunks
    usual, seen = [getattr(item.owner, item.name) for item in target.chunks], []
    run = target._run_decoder

    def watch(token_ids: Any, *args: Any, **given: Any) -> Any:
        current = [getattr(item.owner, item.name) for item in target.chunks]
        seen.append((token_ids.shape[1], current == [item.small for item in target.chunks], current == usual))
        return run(token_ids, *args, **given)

    monkeypatch.setattr(target, "_run_decoder", watch)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        _, _, cache = target._forward(ids, (0,), ())
        target._forward(ids[:, :5], (12,), (), cache=cache)
    assert seen == [(12, False, True), (5, True, False)]
    assert [getattr(item.owner, item.name) for item in target.chunks] == usual


def test_a_size_that_changes_results_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "qwen3_5_text")

    def doubled(decoder: Any) -> list[Chunked]:
        (found,) = find_chunks(decoder)

        def wrong(*args: Any, **given: Any) -> Any:
            rows, state = found.small(*args, **given)
            return 2 * rows, state

        return [found._replace(small=wrong)]

    monkeypatch.setattr(own_cache_trial, "find_chunks", doubled)
    target = host_own_cache(tmp_path)
    assert target.chunks == ()
    assert target.reads_at_once


def test_sizes_return_after_an_error() -> None:
    owner: Any = torch.nn.Module()
    owner.chunk_size = 64

    def fail() -> None:
        with small_chunks([Chunked(owner, "chunk_size", CHUNK)]):
            assert owner.chunk_size == CHUNK
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert owner.chunk_size == 64
