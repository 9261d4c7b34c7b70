"""The prefix store: a later run loads the stored pages of its prompts, and gives the same outputs."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_runtime.device.storage import kv_pages
from dflash_runtime.errors import UsageError
from dflash_runtime.kv_transfer.payload_bytes import checksum
from dflash_runtime.kv_transfer.stored_pages import StoredPages
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.prefix_cache import page_digest
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.handoffs import traces
from dflash_testing.pairs import (
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
    random_draft,
    random_llm,
    random_prompts,
    random_target,
)
from dflash_testing.refusals import refuses

PROMPTS = [prompt[:length] for prompt, length in zip(bundled_prompts(), (15, 16, 17, 33, 48, 63), strict=False)]
PARAMS = SamplingParams(max_new_tokens=12)
SYNC: dict[str, Any] = {"scheduling": "sync"}
CHUNKED: dict[str, Any] = {"scheduling": "async", "max_batched_tokens": 20}


def make_llm(folder: Path | None, **engine: Any) -> LLM:
    engine |= {"prefix_store": None if folder is None else str(folder)}
    return bundled_llm(bundled_draft_model(), 7, **{"max_num_requests": 4} | engine)


def small_llm(
    folder: Path | None, eps_of_target: float = 1e-6, eps_of_draft: float = 1e-6, max_num_requests: int = 1
) -> LLM:
    """A random pair of a few layers."""
    target = random_target(torch.float64, rms_norm_eps=eps_of_target)
    draft = random_draft(target, torch.float64, rms_norm_eps=eps_of_draft)
    path = None if folder is None else str(folder)
    return random_llm(target, draft, 4, prefix_store=path, max_num_requests=max_num_requests)


def stored_page(folder: Path, prompt: Sequence[int], column: int) -> Path:
    (pair,) = folder.iterdir()
    request = Request(index=0, prompt_token_ids=tuple(prompt), params=PARAMS)
    digest = page_digest(request, column, 16).hex()
    return pair / f"{digest}.safetensors"


@pytest.mark.parametrize(
    ("engine", "temperature"),
    [
        (SYNC, 0.0),
        (CHUNKED, 0.8),
        pytest.param(SYNC, 0.8, marks=pytest.mark.slow),
        pytest.param(CHUNKED, 0.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_later_run_loads_the_stored_pages(tmp_path: Path, engine: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=4)
    wanted = make_llm(None, **engine).generate(PROMPTS, params)
    first = make_llm(tmp_path, **engine).generate(PROMPTS, params)
    again = make_llm(tmp_path, **engine).generate(PROMPTS, params)
    assert traces(first) == traces(again) == traces(wanted)
    assert not any(output.num_loaded for output in first)
    assert [output.num_loaded for output in again] == [0, 0, 16, 32, 32, 48]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1 + 1 + 2 + 3 + 3


def test_a_longer_prompt_loads_the_pages_of_its_prefix(tmp_path: Path) -> None:
    """If the run's own prefix cache has some of the pages, only the other pages are loaded."""
    whole = max(bundled_prompts(), key=len)[:90]
    wanted = make_llm(None).generate([whole], PARAMS)
    make_llm(tmp_path).generate([whole[:50]], PARAMS)
    llm = make_llm(tmp_path)
    assert traces(llm.generate([whole], PARAMS)) == traces(wanted)
    other = make_llm(tmp_path)
    other.generate([whole[:20]], PARAMS)
    (found,) = other.generate([whole], PARAMS)
    assert (found.num_cached, found.num_loaded) == (16, 80 - 16)
    (found,) = other.generate([whole], PARAMS)
    assert (found.num_cached, found.num_loaded) == (80, 0)
    other.engine.scheduler.check_integrity()


def test_prompts_with_common_beginnings_are_stored_and_found(tmp_path: Path) -> None:
    """The beginnings are stored already, and the prompts run together."""
    texts = random_prompts((90, 90), 97)
    prompts = [[*texts[index % 2][: 20 + 9 * index], index] for index in range(8)]
    params = SamplingParams(max_new_tokens=4)
    right = traces(small_llm(None).generate(prompts, params))
    small_llm(tmp_path).generate([text[:50] for text in texts], params)
    for _ in range(2):
        assert traces(small_llm(tmp_path, max_num_requests=8).generate(prompts, params)) == right


def test_a_store_stays_below_its_limit(tmp_path: Path) -> None:
    prompts = random_prompts((50,) * 6, 97)
    params = SamplingParams(max_new_tokens=2)
    small_llm(tmp_path).generate(prompts[:1], params)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    target = random_target(torch.float64)
    llm = random_llm(
        target, random_draft(target, torch.float64), 4, prefix_store=str(tmp_path), prefix_store_bytes=2 * size
    )
    right = traces(small_llm(None).generate(prompts, params))
    for _ in range(2):
        assert traces(llm.generate(prompts, params)) == right
        assert 0 < sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= 2 * size


def test_pages_not_copied_before_their_request_ends_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are copied late, in pieces of one page, four pieces at a time. Of six pages the first four are stored."""
    looks = count()
    monkeypatch.setattr(kv_pages, "PIECE_BYTES", 1)
    monkeypatch.setattr(kv_pages.MovingPiece, "is_ready", property(lambda piece: next(looks) > 100))
    whole = max(bundled_prompts(), key=len)[:100]
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    make_llm(tmp_path, num_pages=20).generate([whole], SamplingParams(max_new_tokens=2))
    monkeypatch.undo()
    assert len(pauses) > 10  # the wait at the end of the call leaves the processor to others
    found = make_llm(tmp_path).generate([whole], PARAMS)
    assert found[0].num_loaded == 64
    assert traces(found) == traces(make_llm(None).generate([whole], PARAMS))


def test_a_call_that_is_refused_does_not_disturb_the_running_one(tmp_path: Path) -> None:
    """The refused call has other prompts in the same store."""
    prompts = random_prompts((40, 55, 63), 97)
    params = SamplingParams(max_new_tokens=4)
    small_llm(tmp_path).generate(prompts, params)
    llm = small_llm(tmp_path)
    stream = llm.stream(prompts, params)
    found = [next(stream)]
    with refuses(UsageError, "llm-busy"):
        llm.generate(prompts[::-1], params)
    found += stream
    outputs = sorted((delta.output for delta in found if delta.output is not None), key=lambda output: output.index)
    assert traces(outputs) == traces(small_llm(None).generate(prompts, params))
    assert [output.num_loaded for output in outputs] == [32, 48, 48]


def test_an_interrupted_wait_for_the_disk_gives_the_engine_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts((40,), 97)
    llm = small_llm(tmp_path)
    right = traces(small_llm(None).generate(prompts, PARAMS))
    is_free = Event()
    monkeypatch.setattr(StoredPages, "write", lambda *_: is_free.wait(60))
    interrupted = Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))  # a real signal ends the wait for a lock
    interrupted.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, PARAMS)
    is_free.set()
    assert traces(llm.generate(prompts, PARAMS)) == right


def test_another_pair_finds_nothing(tmp_path: Path) -> None:
    make_llm(tmp_path).generate(PROMPTS, PARAMS)
    for llm in (bundled_llm(None, 0, prefix_store=str(tmp_path)), make_llm(tmp_path, page_size=8)):
        assert not any(output.num_loaded for output in llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("changed", ["target", "draft"])
def test_the_same_weights_under_another_config_find_nothing(tmp_path: Path, changed: str) -> None:
    prompts = random_prompts((40, 55), 97)
    small_llm(tmp_path).generate(prompts, PARAMS)
    eps = (0.3, 1e-6) if changed == "target" else (1e-6, 0.3)
    found = small_llm(tmp_path, *eps).generate(prompts, PARAMS)
    assert traces(found) == traces(small_llm(None, *eps).generate(prompts, PARAMS))
    assert not any(output.num_loaded for output in found)
    assert all(output.num_loaded for output in small_llm(tmp_path).generate(prompts, PARAMS))


def swap_pages(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def rewrite(page: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write other tensors with correct checksums, and the metadata of the page."""
    with safe_open(page, framework="pt") as file:
        tensors = change({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        facts = json.loads(file.metadata()["page"])
    facts["crc32"] = {name: checksum(tensor) for name, tensor in tensors.items()}
    save_file(tensors, page, metadata={"page": json.dumps(facts)})


UNFIT: dict[str, Callable[[Path, Path], None]] = {
    "other page": lambda page, other: swap_pages(page, other),
    "no tensors": lambda page, _: rewrite(page, lambda tensors: {}),
    "no draft rows": lambda page, _: rewrite(page, lambda tensors: {"target": tensors["target"]}),
    "one tensor more": lambda page, _: rewrite(page, lambda tensors: {**tensors, "more": torch.zeros(2)}),
    "fewer rows": lambda page, _: rewrite(page, lambda tensors: {k: v[:, :, :8].clone() for k, v in tensors.items()}),
    "other dtype": lambda page, _: rewrite(page, lambda tensors: {k: v.float() for k, v in tensors.items()}),
    "no metadata": lambda page, _: save_file(load_file(page), page),
    "no file": lambda page, _: page.rename(page.with_name("moved")).with_name(page.name).mkdir(),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_page_that_does_not_fit_its_name_is_removed_and_run_again(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The page before it is loaded, and the text is right."""
    params = SamplingParams(max_new_tokens=4)
    prompts = random_prompts((63, 48), 97)
    wanted = small_llm(None).generate(prompts[:1], params)
    small_llm(tmp_path).generate(prompts, params)
    page, other = (stored_page(tmp_path, text, 1) for text in prompts)
    UNFIT[name](page, other)
    with caplog.at_level(logging.WARNING):
        found = small_llm(tmp_path).generate(prompts[:1], params)
    assert traces(found) == traces(wanted)
    assert found[0].num_loaded == 16
    if name != "no file":
        assert str(page) in caplog.text
        assert small_llm(tmp_path).generate(prompts[:1], params)[0].num_loaded == 48


@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_a_damaged_page_is_computed_again(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    """The pages before it are loaded, and the damaged page is written again."""
    wanted = make_llm(None).generate(PROMPTS[-1:], PARAMS)
    make_llm(tmp_path).generate(PROMPTS[-1:], PARAMS)
    page = stored_page(tmp_path, PROMPTS[-1], 1)
    content = page.read_bytes()
    if harm == "gone":
        page.unlink()
    else:
        page.write_bytes(content[:-9] if harm == "cut" else content[:-9] + bytes(9))
    with caplog.at_level(logging.WARNING):
        found = make_llm(tmp_path).generate(PROMPTS[-1:], PARAMS)
    assert traces(found) == traces(wanted)
    assert found[0].num_loaded == 16
    assert [record.levelname for record in caplog.records] == ([] if harm == "gone" else ["WARNING"])
    assert make_llm(tmp_path).generate(PROMPTS[-1:], PARAMS)[0].num_loaded == 48


def test_a_store_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(tmp_path / "store")
    (tmp_path / "store").write_text("a file")
    with caplog.at_level(logging.WARNING):
        outputs = llm.generate(PROMPTS, PARAMS)
    assert traces(outputs) == traces(make_llm(None).generate(PROMPTS, PARAMS))
    (record,) = caplog.records
    assert f"{tmp_path}/store/" in record.getMessage()
    with pytest.raises(UsageError) as caught:
        make_llm(tmp_path / "store")
    assert str(tmp_path / "store") in caught.value.message


def test_without_a_prefix_cache_nothing_is_stored(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, prefix_cache=False)
    llm.generate(PROMPTS[:2], PARAMS)
    assert not list(tmp_path.iterdir())
    assert [notice.id for notice in llm.warnings] == ["no-prefix-store"]
    assert str(tmp_path) in llm.warnings[0]
