"""The offline API: prompts, streams, and the number of calls to the model."""

import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dflash_runtime
from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import FinishReason, Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import (
    bundled_draft,
    bundled_prompts,
    bundled_tokenizer,
    random_draft,
    random_llm,
    random_target,
    save_bundled_target,
)
from dflash_testing.refusals import refuses

CONFIG = EngineConfig(device="cpu", max_model_len=256, num_pages=60)
PARAMS = SamplingParams(max_new_tokens=20)
HOUSE = Path(dflash_runtime.__file__).parent


class Watched:
    """A target that records the runtime functions on the stack of each forward, innermost first."""

    def __init__(self, target: Target) -> None:
        self.config, self.embedding, self.head = target.config, target.embedding, target.head
        self.embedding_scale = target.embedding_scale
        self.chains: list[list[str]] = []
        self._target = target

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
        callers = [frame.f_code.co_name for frame in frames if HOUSE in Path(frame.f_code.co_filename).parents]
        self.chains.append(callers)
        return self._target(token_ids, positions, attend, taps, wanted)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_the_targets_forward_is_six_calls_deep(scheduling: str) -> None:
    """The docstring of `llm.py` states this chain of calls."""
    target = random_target()
    watched = Watched(target)
    random_llm(watched, random_draft(target), 3, scheduling=scheduling).generate([[1, 2, 3]], PARAMS)
    ways = {tuple(chain[::-1]) for chain in watched.chains}
    assert ways == {("generate", "stream", "run", "step", "submit", way) for way in ("_prefill", "_decode")}
    assert all(len(chain) <= 6 for chain in watched.chains)


SMALL = SamplingParams(max_new_tokens=6)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


def small_llm(**changes: Any) -> LLM:
    target = random_target()
    engine: dict[str, Any] = {"scheduling": "async", "max_num_requests": 2} | changes
    return random_llm(target, random_draft(target), 3, **engine)


def small_texts(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, tuple[int, ...]]]:
    return [(output.index, output.token_ids) for output in llm.generate(prompts, SMALL)]


@pytest.mark.parametrize("wrong", [[1, 200_000], [1.7, 2.2], "ab", 7, None, [None]], ids=str)
def test_a_stream_closed_at_a_refused_prompt_leaves_no_requests(wrong: Any) -> None:
    llm = small_llm()
    right = small_texts(llm)
    stream = llm.stream([[1, 2, 3], wrong, [4, 5]], SMALL)
    assert next(stream).output is not None
    stream.close()
    assert not llm.engine.scheduler.has_work
    assert small_texts(llm) == right


@pytest.mark.parametrize(
    ("prompt", "found"),
    [([1.7, 2.2], "1.7"), (["a", "b"], "'a'"), (7, "7"), (torch.tensor([0.5]), "tensor(0.5000)"), ([True, 2], "True")],
    ids=str,
)
def test_token_ids_must_be_integers(prompt: Any, found: str) -> None:
    before, wrong, after = small_llm().generate([[1, 2], prompt, [1, 2]], SMALL)
    assert (wrong.finish_reason, wrong.error_id, wrong.exit_code) == (FinishReason.ERROR, "request-error", 2)
    assert f"prompt_token_ids: found {found}," in str(wrong.error)
    assert before.token_ids == after.token_ids != ()


def test_token_ids_may_have_any_integer_type() -> None:
    llm = small_llm()
    assert llm.generate([torch.tensor([1, 2, 3])], SMALL)[0].token_ids == llm.generate([[1, 2, 3]], SMALL)[0].token_ids  # type: ignore[list-item]


@pytest.mark.parametrize(("params", "found"), [([SMALL], 1), ([SMALL, None, SMALL], "NoneType")], ids=["few", "None"])
def test_wrong_params_are_refused_before_anything_is_queued(params: Any, found: object) -> None:
    llm = small_llm()
    with refuses(UsageError, field="params", found=found):
        llm.generate(PROMPTS, params)
    assert not llm.engine.scheduler.has_work
    assert [index for index, _ in small_texts(llm)] == [0, 1, 2]


def test_a_second_call_of_a_busy_llm_is_refused() -> None:
    llm = small_llm()
    right = small_texts(llm)
    first = llm.stream(PROMPTS, SMALL)
    found = [next(first)]
    second = llm.stream(PROMPTS, SMALL)
    with refuses(UsageError, "llm-busy"):
        next(second)
    with refuses(UsageError, "llm-busy"):
        llm.generate(PROMPTS, SMALL)
    found += first
    ended = [delta.output for delta in found if delta.output is not None]
    assert sorted((output.index, output.token_ids) for output in ended) == right
    assert small_texts(llm) == right


def test_threads_that_share_an_llm_get_their_own_outputs_or_an_error() -> None:
    llm = small_llm()
    right = small_texts(llm)
    found: list[Any] = []

    def work() -> None:
        for _ in range(4):
            try:
                found.append(small_texts(llm))
            except UsageError as error:
                found.append(error.id)

    threads = [Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(item in (right, "llm-busy") for item in found)
    assert right in found
    assert small_texts(llm) == right


def test_a_closed_stream_drops_only_its_own_requests() -> None:
    llm = small_llm()
    right = small_texts(llm)
    other = Request(index=9, prompt_token_ids=(1, 2, 3), params=SMALL)
    llm.engine.add(other)
    stream = llm.stream([[4, 5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=60))
    assert next(stream).index == 0
    stream.close()
    assert llm.engine.scheduler.live == (other,)
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        llm.engine.scheduler.check_integrity()
    assert tuple(other.output_token_ids) == right[0][1]


def test_a_stream_of_a_closed_llm_is_refused() -> None:
    llm = small_llm()
    stream = llm.stream(PROMPTS, SMALL)
    next(stream)
    llm.close()
    assert len(small_texts(llm)) == 3
    with refuses(UsageError, "stream-closed"):
        next(stream)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_call_that_another_thread_closes_ends_in_an_error(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are never a part of the list, and the thread that closes waits for the step."""
    llm = small_llm(scheduling="async")
    right = small_texts(llm)
    steps, is_reached = count(1), Event()
    submit = llm.engine.runner.submit

    def watched(batch: Batch) -> Any:
        if next(steps) == num_steps:
            is_reached.set()
            time.sleep(0.02)  # the other thread waits for the lock now
        return submit(batch)

    monkeypatch.setattr(llm.engine.runner, "submit", watched)
    caught: list[str] = []

    def work() -> None:
        try:
            llm.generate(PROMPTS, SMALL)
        except UsageError as error:
            caught.append(error.id)

    thread = Thread(target=work)
    thread.start()
    assert is_reached.wait(60)
    llm.close()
    assert not llm.engine.scheduler.has_work
    llm.engine.scheduler.check_integrity()
    thread.join(60)
    assert caught == ["stream-closed"]
    assert small_texts(llm) == right


def test_a_call_that_is_interrupted_at_its_end_gives_the_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the call waits for the writes of a store."""
    llm = small_llm()
    right = small_texts(llm)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "close_transfers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            small_texts(llm)
    assert small_texts(llm) == right


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_step_reports_the_end_of_a_request_once(scheduling: str) -> None:
    llm = small_llm(scheduling=scheduling)
    requests = [Request(index=index, prompt_token_ids=(1, 2, index), params=SMALL) for index in range(5)]
    for request in requests:
        llm.engine.add(request)
    ended = []
    for _ in range(200):
        ended += [item.request.index for item in llm.engine.step() if item.request.is_finished]
    assert sorted(ended) == [0, 1, 2, 3, 4]


def test_equal_prompts_sample_the_same_text_only_with_a_seed() -> None:
    def draw(seed: int | None, llm: LLM) -> list[tuple[int, ...]]:
        params = SamplingParams(max_new_tokens=8, temperature=2.0, seed=seed)
        return [output.token_ids for output in llm.generate([[1, 2, 3]] * 3, params)]

    llm = small_llm()
    assert len(set(draw(None, llm) + draw(None, llm) + draw(None, small_llm()))) == 9
    assert len(set(draw(4, llm) + draw(4, small_llm()))) == 1
    assert draw(None, small_llm(seed=7)) == draw(None, small_llm(seed=7))


TEXT = "def read_lines(path):\n    "


def test_strings_and_token_ids_are_prompts_of_one_call() -> None:
    llm = LLM(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    tokenizer = bundled_tokenizer()
    text, ids = llm.generate([TEXT, tokenizer.encode(TEXT)], PARAMS)
    assert text.prompt_token_ids == ids.prompt_token_ids == tuple(tokenizer.encode(TEXT))
    assert text.token_ids == ids.token_ids
    assert text.text == ids.text == tokenizer.decode(text.token_ids)
    assert len(text.text) > 20


def test_a_tokenizer_is_loaded_only_for_text() -> None:
    llm = LLM(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    assert llm.tokenizer is not None
    (output,) = llm.generate(bundled_prompts()[:1], PARAMS)
    assert "_plain" not in vars(llm.tokenizer)
    assert output.text
    assert "_plain" in vars(llm.tokenizer)


def llm_with_text(**pair: Any) -> LLM:
    """A random pair with the bundled tokenizer."""
    target = random_target(vocab_size=bundled_draft().config.vocab_size)
    llm = random_llm(target, random_draft(target), 3, max_num_requests=2)
    return LLM(replace(llm.pair, tokenizer=bundled_tokenizer(), **pair))


def test_only_the_answer_to_a_string_ends_at_the_targets_own_stop_tokens() -> None:
    ids = bundled_tokenizer().encode(TEXT)
    (free,) = llm_with_text().generate([ids], PARAMS)
    stop = free.token_ids[5]
    cut = free.token_ids[: free.token_ids.index(stop) + 1]
    llm = llm_with_text(stop_token_ids=(stop,))
    text, same, ignoring = llm.generate([TEXT, ids, TEXT], [PARAMS, PARAMS, replace(PARAMS, ignore_eos=True)])
    assert (text.token_ids, text.finish_reason) == (cut, FinishReason.STOP)
    assert same.token_ids == ignoring.token_ids == free.token_ids


def test_a_string_is_refused_alone_where_the_target_has_no_tokenizer() -> None:
    before, wrong, after = small_llm().generate([[1, 2], "ab", [1, 2]], SMALL)
    assert (wrong.finish_reason, wrong.error_id, wrong.exit_code) == (FinishReason.ERROR, "prompt-without-tokenizer", 2)
    assert before.token_ids == after.token_ids != ()
    assert before.text is wrong.text is None


def test_a_tokenizer_that_cannot_be_loaded_refuses_strings_and_serves_token_ids(tmp_path: Path) -> None:
    target = save_bundled_target(tmp_path / "target", {})
    (target / "tokenizer.json").write_text("{}")
    text, ids = LLM(open_target(target), bundled_draft(), CONFIG).generate([TEXT, bundled_prompts()[0]], PARAMS)
    assert (text.error_id, text.exit_code) == ("tokenizer-not-loaded", 3)
    assert len(ids.token_ids) == 20
    with refuses(CheckpointError, "tokenizer-not-loaded", path=target):
        _ = ids.text


@pytest.mark.parametrize(
    "prompts",
    ["a text", b"a text", [7, 3], [np.int64(7), np.int8(3)], np.array([7, 3]), torch.tensor([7, 3]), range(3), None, 5,
     {"a": [7]}, {(7, 3), (1, 2)}],
    ids=repr,
)  # fmt: skip
def test_one_bare_prompt_is_not_a_list_of_prompts(prompts: Any) -> None:
    llm = small_llm()
    with refuses(UsageError, "prompts-not-a-list", field="prompts") as caught:
        llm.generate(prompts, SMALL)
    assert caught.value.hint is not None
    assert not llm.engine.scheduler.has_work
    assert len(small_texts(llm)) == 3


@pytest.mark.parametrize("prompts", [np.array([[7], [3]]), torch.tensor([[7], [3]]), [range(7, 8), [3]]], ids=repr)
def test_rows_of_one_token_are_prompts(prompts: Any) -> None:
    outputs = small_llm().generate(prompts, SMALL)
    assert [output.prompt_token_ids for output in outputs] == [(7,), (3,)]
    assert all(len(output.token_ids) == SMALL.max_new_tokens for output in outputs)


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), {1, 2}, {1: 2}], ids=repr)
def test_a_prompt_without_an_order_or_of_bytes_is_refused_alone(prompt: Any) -> None:
    wrong, other = small_llm().generate([prompt, [1, 2]], SMALL)
    assert (wrong.finish_reason, wrong.error_id) == (FinishReason.ERROR, "request-error")
    assert other.finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize("params", [{"max_new_tokens": 2}, 3, iter(())], ids=["dict", "int", "iterator"])
def test_params_are_one_set_or_a_list(params: Any) -> None:
    with refuses(UsageError, field="params"):
        small_llm().generate([[1, 2]], params)


def test_an_llm_is_shown_on_one_line() -> None:
    assert re.fullmatch(r"LLM\(native target, 3 draft tokens .*, cpu\)", repr(small_llm()))


def test_an_output_is_shown_on_one_screen() -> None:
    """Counts and the beginning of the answer, however long it is."""
    long = SamplingParams(max_new_tokens=100)
    (text,) = llm_with_text().generate([TEXT], long)
    (ids,) = small_llm().generate([[1, 2, 3]], long)
    (wrong,) = small_llm().generate(["ab"], long)
    assert max(map(len, map(repr, (text, ids, wrong)))) < 800
    assert repr(text.text)[:100] in repr(text)
    assert repr(ids.token_ids)[:100] in repr(ids)
    assert "num_tokens=100" in repr(ids)
    assert "acceptance_length=" in repr(ids)
    assert "error_id='prompt-without-tokenizer'" in repr(wrong)
