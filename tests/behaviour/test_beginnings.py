"""Prompts with first rows that another engine computed and that arrive late: text and traces do not change."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_runtime.drafts.draft import Draft
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.vllm_prefills import VllmPrefills, find_vllm_prefills
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.engine_kv import prefill_layers, save_as_vllm
from dflash_testing.handoffs import MemoryConnector
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts

PROMPT = bundled_prompts()[0][:34]
"""Two pages of 16 tokens, and two more tokens."""

GREEDY = SamplingParams(max_new_tokens=6)
SAMPLED = SamplingParams(max_new_tokens=6, temperature=1.0, top_p=0.9, seed=3)
LOOPS: dict[str, dict[str, Any]] = {
    "sync": {"scheduling": "sync"},
    "async": {"scheduling": "async", "max_in_flight": 2},
}


@cache
def draft() -> Draft:
    return bundled_draft_model(dtype=torch.float64)


def engine(**settings: Any) -> LLM:
    return bundled_llm(draft(), 7, dtype=torch.float64, **{"max_num_requests": 4, "num_pages": 60, **settings})


@cache
def prefilled(prompt: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return a prompt's rows by vLLM layer, plus one row, so that blocks of one row hold all rows of the prompt."""
    return {name: torch.cat((rows, rows[:1])) for name, rows in prefill_layers(engine(), prompt).items()}


def trace(outputs: Sequence[RequestOutput]) -> list[object]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(output.token_ids, output.finish_reason, output.drafts) for output in outputs]


class Late:
    """A connector that delivers hand-offs after random delays."""

    name = "late"
    takes_device = False

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._random = random.Random(0)
        self.save = connector.save
        self.refuse = connector.refuse
        self.is_wanted = connector.is_wanted

    def load(self, key: str) -> "Future[Handoff]":
        future: Future[Handoff] = Future()
        handoff = self._connector.load(key).result()
        threading.Timer(self._random.uniform(0, 0.03), future.set_result, (handoff,)).start()
        return future

    def close(self) -> None:
        self._connector.close()


def beginnings(folder: Path, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], llm: LLM) -> HandoffPlan:
    """Return a plan that loads the first `lengths` rows of the prompts from vLLM's files."""
    found = {}
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        saved = folder / str(index)
        save_as_vllm(prefilled(prompt), (*prompt, 0)[: length + 1], saved, block_size=1)
        keys, connector = find_vllm_prefills(saved, [prompt], llm.fingerprint)
        found[f"{index}"] = connector.prefills[keys[0]]
        connector.close()
    return HandoffPlan(connector=Late(VllmPrefills(found, llm.fingerprint)), keys=tuple(found))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_prompt_continues_after_any_of_its_rows(tmp_path: Path, loop: str) -> None:
    """The loaded rows fill pages, lack one row, have one row more, or are all rows; then the last row runs again."""
    lengths = [1, 15, 16, 17, 31, 32, 33, 34] * 2
    prompts, params = [PROMPT] * len(lengths), [GREEDY, SAMPLED] * (len(lengths) // 2)
    lengths.sort()
    wanted = engine(prefix_cache=False).generate([PROMPT] * 2, [GREEDY, SAMPLED])
    llm = engine(prefix_cache=False, max_num_requests=6, max_batched_tokens=24, **LOOPS[loop])
    outputs = llm.generate(prompts, params, handoffs=beginnings(tmp_path, prompts, lengths, llm))
    assert trace(outputs) == trace(wanted) * (len(lengths) // 2)
    assert [output.num_loaded for output in outputs] == [min(length, 33) for length in lengths]
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("loop", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_rows_in_the_prefix_cache_are_not_loaded(tmp_path: Path, loop: str) -> None:
    """The prefix cache may hold more rows than arrive, or fewer."""
    lengths = [1, 15, 16, 17, 32, 33]
    prompts = [(*PROMPT[:16], *bundled_prompts()[index + 1][:18]) for index in range(len(lengths))]
    wanted = engine(prefix_cache=False).generate(prompts, SAMPLED)
    llm = engine(**LOOPS[loop])
    llm.generate([PROMPT], GREEDY)
    outputs = llm.generate(prompts, SAMPLED, handoffs=beginnings(tmp_path, prompts, lengths, llm))
    assert trace(outputs) == trace(wanted)
    assert [output.num_cached for output in outputs] == [16] * len(lengths)
    assert [output.num_loaded for output in outputs] == [max(0, length - 16) for length in lengths]
    llm.engine.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_beginnings_of_prompts_that_share_pages_in_little_memory(tmp_path: Path, seed: int) -> None:
    """Prompts wait for pages, share pages and are preempted while loaded rows arrive late."""
    draw = random.Random(seed)
    texts = [prompt[:34] for prompt in bundled_prompts()[:5]]
    pairs = [draw.sample(texts, 2) for _ in range(14)]
    prompts = [(*first[: draw.choice([0, 16, 20, 32])], *second[: draw.randint(2, 14)]) for first, second in pairs]
    lengths = [draw.randint(1, len(prompt)) for prompt in prompts]
    params = [
        SamplingParams(max_new_tokens=draw.randint(1, 40), temperature=draw.choice([0.0, 1.0]), seed=index)
        for index in range(len(prompts))
    ]
    wanted = engine(prefix_cache=False).generate(prompts, params)
    rows, loop = draw.choice([8, 24, 64]), LOOPS["async" if seed % 2 else "sync"]
    llm = engine(prefix_cache=seed > 0, num_pages=9, max_num_requests=6, max_batched_tokens=rows, **loop)
    outputs = llm.generate(prompts, params, handoffs=beginnings(tmp_path, prompts, lengths, llm))
    assert trace(outputs) == trace(wanted)
    llm.engine.scheduler.check_integrity()


def test_pages_after_loaded_rows_are_published(tmp_path: Path) -> None:
    wanted = engine(prefix_cache=False).generate([PROMPT], SAMPLED)
    llm = engine()
    llm.generate([PROMPT], GREEDY, handoffs=beginnings(tmp_path, [PROMPT], [17], llm))
    outputs = llm.generate([PROMPT], SAMPLED)
    assert trace(outputs) == trace(wanted)
    assert outputs[0].num_cached == 32


def test_a_whole_hand_off_continues_with_the_seed_of_its_sender() -> None:
    """The receiver prefills no row of the prompt."""
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    kept = MemoryConnector()
    sender, receiver = engine(seed=1), engine(seed=2)
    sender.generate([PROMPT], params, handoffs=HandoffPlan(connector=kept, keys=("a",), is_sending=True))
    outputs = receiver.generate([PROMPT], params, handoffs=HandoffPlan(connector=kept, keys=("a",)))
    assert trace(outputs) == trace(engine(seed=1).generate([PROMPT], params))
    assert outputs[0].num_loaded == 34


def test_a_prompt_that_vllm_has_not_prefilled_is_run_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = bundled_prompts()[1][:30]
    wanted = engine().generate([PROMPT, other], GREEDY)
    llm = engine()
    save_as_vllm(prefilled(PROMPT), PROMPT, tmp_path)
    keys, connector = find_vllm_prefills(tmp_path, [PROMPT, other], llm.fingerprint)
    outputs = llm.generate([PROMPT, other], GREEDY, handoffs=HandoffPlan(connector=connector, keys=keys))
    assert trace(outputs) == trace(wanted)
    assert [output.num_loaded for output in outputs] == [32, 0]
    assert [record for record in caplog.records if record.levelname == "WARNING" and "vLLM" in record.getMessage()]


def test_rows_of_another_draft_only_lower_acceptance(tmp_path: Path) -> None:
    """The files do not name their draft. The text is the target's, and acceptance at the first position falls."""
    prompts = [prompt[:49] for prompt in bundled_prompts()[:8]]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    wanted, llm = engine().generate(prompts, params), engine()
    for prompt in prompts:
        layers = prefilled(prompt)
        drafts = list(layers)[llm.pair.target.config.num_layers :]
        turned = {name: layers[name].roll(1, dims=-1) for name in drafts}
        save_as_vllm({**layers, **turned}, prompt, tmp_path)
    keys, connector = find_vllm_prefills(tmp_path, prompts, llm.fingerprint)
    outputs = llm.generate(prompts, params, handoffs=HandoffPlan(connector=connector, keys=keys))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    assert first_accepted(outputs) < 0.5 * first_accepted(wanted)


def first_accepted(outputs: Sequence[RequestOutput]) -> int:
    """Return the number of prompts with a first step that accepts its first draft token."""
    return sum(output.drafts[0].num_accepted > 0 for output in outputs)
