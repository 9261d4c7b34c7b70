"""After any failure the engine continues with the right text, or an error says that it is closed."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_runtime.errors import DFlashError
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.request import FinishReason, Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import random_draft, random_llm, random_target
from dflash_testing.refusals import refuses

PAGE = 4
BEGIN = [7, 3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [[*BEGIN, 11], [*BEGIN, 12, 13, 14], [20, 21], [*BEGIN, 11, 30, 31, 32, 33, 34, 35]]
PARAMS = SamplingParams(max_new_tokens=9)
PLACES = ("schedule", "submit", "forward", "commit")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "Ctrl-C": KeyboardInterrupt,
    "value": lambda: ValueError("Overflow when unpacking long long"),
}
LIKE_OTHERS = ("schedule", "submit")
"""Places where memory runs out in slow tests only. One method handles the errors of every place."""

SAMPLE = {
    "memory": ((1, True), (2, False), (3, True), (9, False)),
    "Ctrl-C": ((1, True), (9, False)),
    "value": ((2, False), (9, True)),
}
"""By kind of error, which call fails, and whether it does so after its work."""


class Breaking:
    """A function that calls another, but raises at its n-th call: before it does anything, or after."""

    def __init__(self, function: Callable[..., Any], nth: int, make: Callable[[], BaseException], *, is_late: bool):
        self._function, self._nth, self._make, self._is_late = function, nth, make, is_late
        self.num_calls = 0
        self.is_missed = False  # the call that was to fail late ended by itself before

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.num_calls += 1
        is_due = self.num_calls == self._nth
        if is_due and not self._is_late:
            raise self._make()
        try:
            result = self._function(*arguments, **options)
        except BaseException:
            self.is_missed |= is_due
            raise
        if is_due:
            raise self._make()
        return result


class TargetAs:
    """A target with a replaced forward. The new forward gets the original target and the arguments."""

    def __init__(self, target: Target, forward: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self.config, self.embedding, self.head = target.config, target.embedding, target.head
        self.embedding_scale = target.embedding_scale
        self._target, self._forward = target, forward

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self._forward(self._target, token_ids, positions, attend, taps, wanted)


@cache
def target() -> Target:
    return random_target(torch.float64, num_layers=3, max_position_embeddings=64)


def make_llm(forward: Callable[..., tuple[Tensor, Tensor | None]] | None = None, **engine: Any) -> LLM:
    settings: dict[str, Any] = {"scheduling": "async", "max_num_requests": 3, "num_pages": 60, "page_size": PAGE,
                "max_batched_tokens": 7} | engine  # fmt: skip
    own = target() if forward is None else TargetAs(target(), forward)
    return random_llm(own, random_draft(target(), torch.float64, target_layer_ids=(0, 1)), 7, **settings)


@cache
def wanted() -> list[tuple[int, ...]]:
    return texts(make_llm(prefix_cache=False).generate(PROMPTS, PARAMS))


def texts(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def break_at(llm: LLM, place: str, nth: int, make: Callable[[], BaseException], *, is_late: bool) -> Breaking:
    """Let one call of the engine's insides fail."""
    owner, name = {
        "schedule": (llm.engine.scheduler, "schedule"),
        "submit": (llm.engine.runner, "submit"),
        "forward": (llm.engine.runner.target, "forward"),
        "commit": (llm.engine.scheduler, "commit"),
    }[place]
    if place == "forward":
        breaking = Breaking(llm.engine.runner.target, nth, make, is_late=is_late)
        llm.engine.runner.target = TargetAs(target(), lambda own, *rest: breaking(*rest))
        return breaking
    breaking = Breaking(getattr(owner, name), nth, make, is_late=is_late)
    setattr(owner, name, breaking)
    return breaking


def check_fault(place: str, nth: int, kind: str, *, is_late: bool, **engine: Any) -> bool:
    """Fail once, then ask the same again; whether the call was reached."""
    llm = make_llm(**engine)
    breaking = break_at(llm, place, nth, ERRORS[kind], is_late=is_late)
    if kind == "Ctrl-C" and breaking.num_calls < nth:
        try:
            outputs = llm.generate(PROMPTS, PARAMS)
            assert breaking.num_calls < nth or breaking.is_missed
        except KeyboardInterrupt:
            outputs = None
    else:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert outputs is None or texts(outputs) == wanted()
    scheduler = llm.engine.scheduler
    assert not scheduler.has_work
    scheduler.check_integrity()
    assert scheduler.pages.num_available == scheduler.pages.num_pages - 1
    if breaking.num_calls < nth:
        return False  # another call would reach it
    assert texts(llm.generate(PROMPTS, PARAMS)) == wanted()
    return True


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(place, kind, marks=pytest.mark.slow if kind == "memory" and place in LIKE_OTHERS else ())
        for place in PLACES
        for kind in ERRORS
    ],
)
def test_after_a_failed_step_the_same_engine_gives_the_right_text(place: str, kind: str) -> None:
    """A sample of the calls: the first ones, in which prompts are begun, and one that decodes."""
    for nth, is_late in SAMPLE[kind]:
        assert check_fault(place, nth, kind, is_late=is_late)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"scheduling": "sync"}, {"num_pages": 12, "max_in_flight": 3}], ids=str)
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_after_any_failed_step_the_same_engine_gives_the_right_text(
    place: str, kind: str, engine: dict[str, Any]
) -> None:
    for is_late in (False, True):
        nth = 1
        while check_fault(place, nth, kind, is_late=is_late, **engine):
            nth += 1
        assert nth > 8


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_prompt_that_failed_while_it_was_read_is_not_found_in_the_cache(scheduling: str) -> None:
    """The pages of a long prompt, begun and never written, were found by the next request that began like it."""
    prompt = [*range(1, 33)]
    right = make_llm(prefix_cache=False).generate([prompt], PARAMS)[0]
    llm = make_llm(scheduling=scheduling, max_batched_tokens=100)
    break_at(llm, "forward", 1, KeyboardInterrupt, is_late=False)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt], PARAMS)
    assert len(llm.engine.scheduler.cache) == 0
    again = llm.generate([prompt], PARAMS)[0]
    assert (again.num_cached, again.token_ids) == (0, right.token_ids)
    assert llm.check_lossless([again]).is_lossless


def test_pages_are_found_once_their_step_is_committed_and_not_before() -> None:
    llm = make_llm(max_in_flight=2, max_batched_tokens=100)
    llm.engine.add(Request(index=0, prompt_token_ids=tuple(range(1, 17)), params=PARAMS))
    llm.engine.step()
    assert len(llm.engine.scheduler.cache) == 0
    while not len(llm.engine.scheduler.cache):
        assert len(llm.engine._in_flight) > 0
        llm.engine.step()
    late = Request(index=1, prompt_token_ids=tuple(range(1, 18)), params=PARAMS)
    llm.engine.add(late)
    while llm.engine.scheduler.has_work:
        llm.engine.step()
    assert late.num_cached == 16


def test_chunks_in_the_middle_of_a_prompt_are_published_when_they_have_run() -> None:
    llm = make_llm(max_in_flight=1, max_batched_tokens=8)
    llm.engine.add(Request(index=0, prompt_token_ids=tuple(range(1, 31)), params=PARAMS))
    sizes = []
    for _ in range(4):
        llm.engine.step()
        sizes.append(len(llm.engine.scheduler.cache))
    assert sizes == [0, 2, 4, 6]


def fails_on(token: int, error: BaseException) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A forward that fails whenever this token is among its rows."""

    def forward(own: Target, token_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        if bool((token_ids == token).any()):
            raise error
        return own(token_ids, *rest)

    return forward


@pytest.mark.parametrize("place", range(4))
def test_a_request_that_cannot_be_run_fails_alone(place: int) -> None:
    """Found by running fewer at a time; the prompt's last token is one that no text of the others has."""
    assert not any(90 in text for text in wanted())
    prompts = [*PROMPTS[:place], [3, 2, 90], *PROMPTS[place:]]
    llm = make_llm(fails_on(90, RuntimeError("no kernel image")), max_num_requests=5, max_batched_tokens=64)
    outputs = llm.generate(prompts, PARAMS)
    wrong = outputs.pop(place)
    assert (wrong.finish_reason, wrong.error, wrong.exit_code) == (
        FinishReason.ERROR, "RuntimeError: no kernel image", 1
    )  # fmt: skip
    assert texts(outputs) == wanted()
    assert all(output.error is None for output in outputs)


def needs_memory(most: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a forward that runs out of memory if it gets more than `most` rows."""

    def forward(own: Target, token_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        if len(token_ids) > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(token_ids)} GiB.\nmore")
        return own(token_ids, *rest)

    return forward


@pytest.mark.parametrize("most", [8, 20])
def test_out_of_memory_sheds_load_and_everything_is_finished(most: int) -> None:
    """8 rows are one request's block; four requests of 8 rows, or 16 prompt rows, are more."""
    llm = make_llm(needs_memory(most), max_num_requests=4, max_batched_tokens=64)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert texts(outputs) == wanted()
    assert not any(output.error for output in outputs)
    assert llm.engine.scheduler.load.max_running == 4  # the next call begins with all of it again


def test_out_of_memory_that_less_load_does_not_help_is_each_requests_error() -> None:
    outputs = make_llm(needs_memory(0)).generate(PROMPTS, PARAMS)
    assert {(output.exit_code, output.error) for output in outputs} <= {
        (6, f"out of memory: CUDA out of memory. Tried to allocate {rows} GiB.") for rows in range(1, 8)
    }
    assert [output.index for output in outputs] == [0, 1, 2, 3]


def read_until_interrupted(llm: LLM, params: Any) -> list[RequestOutput]:
    """The outputs a reader of a stream has by the time Ctrl-C reaches it."""
    seen = []
    try:
        for delta in llm.stream(PROMPTS, params):
            if delta.output is not None:
                seen.append(delta.output)
    except KeyboardInterrupt:
        return seen
    pytest.fail("was not interrupted")


def test_what_had_ended_is_yielded_before_an_interruption_is_raised() -> None:
    llm = make_llm()
    params = [SamplingParams(max_new_tokens=count) for count in (1, 2, 30, 30)]
    break_at(llm, "submit", 12, KeyboardInterrupt, is_late=True)
    seen = read_until_interrupted(llm, params)
    assert [(output.index, output.token_ids) for output in seen[:2]] == [
        (index, wanted()[index][: index + 1]) for index in (0, 1)
    ]
    assert texts(llm.generate(PROMPTS, PARAMS)) == wanted()


@pytest.mark.parametrize(("nth", "is_late"), [(1, True), (2, False)])
def test_tokens_of_the_step_in_which_it_is_interrupted_are_yielded_too(nth: int, is_late: bool) -> None:
    """Four requests end in one step, and Ctrl-C comes between the first and the second."""
    llm = make_llm(scheduling="sync", max_batched_tokens=64, max_num_requests=4)
    break_at(llm, "commit", nth, KeyboardInterrupt, is_late=is_late)
    seen = read_until_interrupted(llm, SamplingParams(max_new_tokens=1))
    assert texts(seen) == [wanted()[0][:1]]


def test_a_failed_assertion_is_a_bug_and_is_raised() -> None:
    llm = make_llm()
    break_at(llm, "commit", 3, lambda: AssertionError("host and device disagree"), is_late=False)
    with pytest.raises(AssertionError, match="disagree"):
        llm.generate(PROMPTS, PARAMS)
    assert texts(llm.generate(PROMPTS, PARAMS)) == wanted()


def test_an_engine_that_is_stepped_on_after_a_failure_loses_nothing() -> None:
    llm = make_llm()
    requests = [Request(index=index, prompt_token_ids=tuple(prompt), params=PARAMS)
                for index, prompt in enumerate(PROMPTS)]  # fmt: skip
    for request in requests:
        llm.engine.add(request)
    break_at(llm, "forward", 5, KeyboardInterrupt, is_late=False)
    got: dict[int, list[int]] = {index: [] for index in range(len(PROMPTS))}
    while llm.engine.scheduler.has_work:
        try:
            for committed in llm.engine.step():
                got[committed.request.index] += committed.token_ids
        except KeyboardInterrupt:
            continue
    assert [tuple(request.output_token_ids) for request in requests] == wanted()
    assert [tuple(tokens) for tokens in got.values()] == wanted()


def test_a_device_that_fails_closes_the_engine() -> None:
    llm = make_llm()
    break_at(llm, "submit", 4, lambda: torch.AcceleratorError("CUDA error: an illegal memory access"), is_late=False)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(output.error is None or "illegal memory access" in output.error for output in outputs)
    assert any(output.finish_reason is FinishReason.ERROR for output in outputs)
    with refuses(DFlashError, "llm-closed") as refused:
        llm.generate(PROMPTS, PARAMS)
    assert "illegal memory access" in refused.value.message


def not_finite_from(place: int, value: float) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a forward that gives `value` in every row from a position on."""

    def forward(
        own: Target, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        hidden, features = own(token_ids, positions, attend, taps, wanted)
        rows = positions if wanted is None else positions[wanted]
        return torch.where((rows >= place)[:, None], value, hidden), features

    return forward


NOT_FINITE = [
    ("reference", {}, "greedy", torch.nan),
    ("reference", {}, "greedy", torch.inf),
    ("reference", {"temperature": 1.0}, "greedy", torch.nan),
    ("reference", {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, "greedy", torch.nan),
    ("reference", {"temperature": 1.0}, "probabilistic", torch.nan),
    ("reference", {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, "probabilistic", torch.nan),
    pytest.param("triton", {}, "greedy", torch.nan, marks=pytest.mark.interpreter),
    pytest.param("triton", {"temperature": 1.0}, "probabilistic", torch.nan, marks=pytest.mark.interpreter),
]


@pytest.mark.parametrize(("kernels", "sampling", "draft_sampling", "value"), NOT_FINITE)
def test_logits_that_are_not_finite_end_their_request_in_both_kernel_sets(
    kernels: str, sampling: dict[str, Any], draft_sampling: str, value: float
) -> None:
    """The text before them is whole, and no id comes of them, in or outside the vocabulary."""
    small = random_target(num_layers=2, max_position_embeddings=64)
    draft = random_draft(small, target_layer_ids=(0,), block_size=4)
    settings: dict[str, Any] = {"max_num_requests": 2, "page_size": PAGE, "draft_sampling": draft_sampling}
    prompts = [[4, 5, 6, 7, 8, 9], [1, 2, 3]][: 1 if kernels == "triton" else 2]
    params = SamplingParams(max_new_tokens=8, seed=3, **sampling)
    whole = random_llm(small, draft, 3, **settings).generate(prompts, params)
    broken = random_llm(TargetAs(small, not_finite_from(9, value)), draft, 3, kernels=kernels, **settings)
    for output, right in zip(broken.generate(prompts, params), whole, strict=True):
        assert output.error_id == "non-finite-logits"
        assert output.token_ids == right.token_ids[: 10 - len(output.prompt_token_ids)]
        assert (output.finish_reason, output.exit_code) == (FinishReason.ERROR, 3)
    fewer = SamplingParams(max_new_tokens=4, seed=3, **sampling)
    ended = broken.generate(prompts[:1], fewer)[0]
    assert (ended.finish_reason, ended.token_ids) == (FinishReason.LENGTH, whole[0].token_ids[:4])


def test_a_prompt_that_gives_no_numbers_fails_and_its_neighbour_does_not() -> None:
    embedding = target().embedding.clone()
    embedding[90] = torch.nan
    broken = random_target(torch.float64, num_layers=3, max_position_embeddings=64)
    broken.embedding = embedding
    llm = random_llm(broken, random_draft(target(), torch.float64, target_layer_ids=(0, 1)), 7, max_num_requests=5,
                     page_size=PAGE)  # fmt: skip
    outputs = llm.generate([*PROMPTS, [3, 90]], PARAMS)
    assert (outputs[4].error_id, outputs[4].exit_code) == ("non-finite-logits", 3)
    assert outputs[4].token_ids == ()
    assert texts(outputs[:4]) == wanted()
