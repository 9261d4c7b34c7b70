"""Every slot that a step writes is in a page that only its request holds."""

from functools import cache
from typing import Any

import pytest
import torch

from dflash_kernels.kv.rope_store import KVPlace
from dflash_runtime.device.prefill import RaggedAttention
from dflash_runtime.device.storage.kv import PagedAttention
from dflash_runtime.device.storage.results import PendingForward
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import DraftStep, Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import ScriptedDraft, bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.walking_drafts import draft_model

ROOMY: dict[str, Any] = {"scheduling": "sync", "max_num_requests": 3, "num_pages": 40}
SHORT: dict[str, Any] = {"scheduling": "async", "max_num_requests": 4, "num_pages": 14, "max_batched_tokens": 11}


@pytest.mark.parametrize(
    ("draft", "num_draft_tokens", "engine"),
    [
        ("tiny", 1, SHORT),
        pytest.param("tiny", 3, ROOMY, marks=pytest.mark.slow),
        ("tiny", 7, SHORT),
        ("dflash2", 7, SHORT),
        ("dspark", 3, ROOMY),
        ("anchor-first", 8, SHORT),
        *(pytest.param("tiny", *case, marks=pytest.mark.slow) for case in ((1, ROOMY), (3, SHORT), (7, ROOMY))),
    ],
    ids=str,
)
def test_written_slots_are_owned_unshared_and_unpublished(
    draft: str, num_draft_tokens: int, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = bundled_llm(draft_model(draft), num_draft_tokens, **engine)
    checked = check_every_step(llm, monkeypatch)
    prompt = max(bundled_prompts(), key=len)
    for index in range(8):
        tokens = prompt[: 14 + 3 * index] + bundled_prompts()[index][:5]
        llm.engine.add(Request(index=index, prompt_token_ids=tokens, params=SamplingParams(max_new_tokens=20)))
    while llm.engine.scheduler.has_work:
        llm.engine.step()
    assert len(checked) > 300


def check_every_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check the slots of each step against the pages of its requests when it is queued. Returns the checked slots.

    A page is published when the step that filled it is committed, and is never written afterwards.
    """
    runner, scheduler = llm.engine.runner, llm.engine.scheduler
    submit, schedule = runner.submit, scheduler.schedule
    written: list[int] = []
    checked: list[int] = []
    published: dict[int, bytes] = {}

    def watch(kind: type[PagedAttention] | type[RaggedAttention]) -> None:
        original = kind.place

        def watched(self: Any, layer: int) -> KVPlace | None:
            found = original(self, layer)
            if found is not None:
                written.extend(slot for slot in found.slots.tolist() if slot >= 0)
            return found

        monkeypatch.setattr(kind, "place", watched)

    def watched_schedule(*, is_drained: bool) -> Batch:
        published.clear()
        published.update(scheduler.cache._digests)
        return schedule(is_drained=is_drained)

    def watched_submit(batch: Batch) -> PendingForward | None:
        written.clear()
        now = scheduler.cache._digests
        final = {page for page, digest in published.items() if now.get(page) == digest}
        held = {
            page for request in [*batch.decode, *(chunk.request for chunk in batch.chunks)] for page in request.pages
        }
        result = submit(batch)
        pages = {slot // runner.page_size for slot in written}
        assert pages <= held, "written outside the pages of the requests that run"
        assert not pages & final, "written into a page published before"
        assert all(scheduler.pages._references[page] == 1 for page in pages - set(now)), "written into a shared page"
        checked.extend(written)
        return result

    watch(PagedAttention)
    watch(RaggedAttention)
    runner.submit = watched_submit  # type: ignore[method-assign]
    scheduler.schedule = watched_schedule  # type: ignore[method-assign]
    return checked


@cache
def plain_text(prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    """The output tokens of plain decoding."""
    return bundled_llm(None, 0).generate([prompt], SamplingParams(max_new_tokens=max_new_tokens))[0].token_ids


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("stub", ["random", "alternating"])
def test_text_does_not_depend_on_the_draft(stub: str, num_draft_tokens: int) -> None:
    """The draft is right at some positions, in a random or an alternating pattern."""
    draft = bundled_draft_model()
    prompt = bundled_prompts()[2][:17]
    params = SamplingParams(max_new_tokens=40)
    plain = plain_text(prompt, 40)
    sequence = prompt + plain + (0,) * 8

    def script(position: int) -> int:
        is_right = (position * 2654435761 >> 7) % 3 > 0 if stub == "random" else position % 2 == 0
        return sequence[position] if is_right else 1

    output = bundled_llm(ScriptedDraft(draft, script), num_draft_tokens).generate([prompt], params)[0]
    assert output.token_ids == plain
    assert max(output.acceptance_lengths) > 1


@cache
def steps_of(**engine: Any) -> list[tuple[DraftStep, ...]]:
    """The verify steps of four prompts, some of them longer than a page."""
    prompts = [prompt[:length] for prompt, length in zip(bundled_prompts(), (1, 16, 33, 40), strict=False)]
    llm = bundled_llm(bundled_draft_model(dtype=torch.float64), 7, dtype=torch.float64, **engine)
    return [output.drafts for output in llm.generate(prompts, SamplingParams(max_new_tokens=14))]


@pytest.mark.parametrize(
    "chunk", [1, 8, 17, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (4, 7, 15, 16))]
)
def test_chunks_of_any_size_prefill_the_same(chunk: int) -> None:
    """The sizes are around the page size, K and K + 1."""
    assert steps_of(max_batched_tokens=chunk, max_num_requests=2, scheduling="async") == steps_of()
