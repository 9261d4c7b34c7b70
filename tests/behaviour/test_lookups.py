"""Drafting from the request's own text: the text stays that of plain decoding, and drafts are what a search finds."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.terminal.sampling_options import LOOKUP_NAMES
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.device.setup.settings import apply_exclusions
from dflash_runtime.drafts.lookups import lookups
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.limits import resolve_num_drafts
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.gpu import gpu_llm
from dflash_testing.hybrid_pair import hybrid_prompts, hybrid_target
from dflash_testing.pairs import bundled_draft, bundled_prompts, bundled_target_model, placement, random_llm
from dflash_testing.widths import seen_widths

K, LENGTH = 6, 40
Text = list[int]


def search_ngram(text: Text, most: int) -> Text:
    """The tokens after the first occurrence of the longest run of 5 to 2 tokens that ends the text."""
    for size in range(5, 1, -1):
        for start in range(len(text) - size):
            if size < len(text) and text[start : start + size] == text[-size:]:
                return text[start + size : start + size + most]
    return []


def search_suffix(text: Text, most: int) -> Text:
    """The likeliest path after an end of the text, by counting every occurrence anew for every token."""
    best, best_score = Text(), 0.0
    for size in range(min(23, len(text)), 0, -1):
        path, score, share = Text(), 0.0, 1.0
        while len(path) < min(most, size) and size + len(path) < 24:
            run = text[-size:] + path
            places = [at + len(run) for at in range(len(text) - len(run)) if text[at : at + len(run)] == run]
            if not places:
                break
            after = Counter(text[at] for at in places)  # in the order of the text
            token, count = max(after.items(), key=lambda item: item[1])
            share *= count / len(places)
            if share < 0.1:
                break
            path.append(token)
            score += share
        if score > best_score:
            best, best_score = path, score
    return best


SEARCHES: dict[str, Callable[[Text, int], Text]] = {"ngram": search_ngram, "suffix": search_suffix}
TARGETS: dict[str, Callable[[torch.dtype], Target]] = {"tiny": bundled_target_model, "hybrid": hybrid_target}


def prompts_of(target: str) -> list[tuple[int, ...]]:
    """Prompts that begin with a repeated part, and one without."""
    given = hybrid_prompts() if target == "hybrid" else bundled_prompts()
    return [given[0][:20] * 2, given[1][:30], given[2][:9] * 3]


def make(target: str, drafting: str, num_drafts: int = K, **engine: Any) -> LLM:
    model = TARGETS[target](torch.float64)
    settings: dict[str, Any] = {"max_num_requests": 3, "drafting": drafting} | engine
    return random_llm(model, None, num_drafts, **settings)


def loop(prompt: Sequence[int], text: Text, search: Callable[[Text, int], Text]) -> list[tuple[Text, int]]:
    """The drafts of each step and how many of them the target's text has, for at least LENGTH tokens."""
    found, num_known = [], 1
    while num_known < LENGTH:
        drafted = search([*prompt, *text[:num_known]], K)
        rest = text[num_known : num_known + len(drafted)]
        accepted = next(
            (at for at, pair in enumerate(zip(drafted, rest, strict=True)) if pair[0] != pair[1]), len(rest)
        )
        found.append(([*drafted, *[-1] * (K - len(drafted))], accepted))
        num_known += accepted + 1
    return found


def steps_of(output: RequestOutput) -> list[tuple[Text, int]]:
    return [(list(step.draft_ids), step.num_accepted) for step in output.drafts]


@pytest.mark.parametrize("drafting", SEARCHES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_steps_of_a_lookup_are_those_of_a_loop_that_searches_the_whole_text(target: str, drafting: str) -> None:
    prompts = prompts_of(target)
    plain = make(target, "model", 0).generate(prompts, SamplingParams(max_new_tokens=LENGTH + K + 1))
    llm = make(target, drafting)
    widths = seen_widths(llm)
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=LENGTH))
    drafted = accepted = 0
    for prompt, own, output in zip(prompts, plain, outputs, strict=True):
        assert output.token_ids == own.token_ids[:LENGTH]
        expected = loop(prompt, list(own.token_ids), SEARCHES[drafting])
        assert steps_of(output) == expected
        assert all(token is None or token >= 0 for token in output.rejected_ids)
        drafted += sum(ids[0] >= 0 for ids, _ in expected)
        accepted += sum(count for _, count in expected)
    assert drafted >= 9
    assert accepted >= 8
    assert set(widths) <= {2, 3, 4, 6, K + 1}
    assert min(widths) == 2
    assert max(widths) > 2


@pytest.mark.parametrize("drafting", SEARCHES)
def test_an_index_finds_what_a_search_of_the_whole_text_finds(drafting: str) -> None:
    """400 texts of few different tokens, in which runs of every length occur again."""
    generator = torch.Generator().manual_seed(0)
    num_found = 0
    for number in range(400):
        text = torch.randint(2 + number % 4, (number % 60,), generator=generator).tolist()
        index = lookups()[drafting]()
        for token_id in text:
            index.add(token_id)
        found = index.propose(K)
        assert found == SEARCHES[drafting](text, K), text
        num_found += bool(found)
    assert num_found > 300


def test_sampled_text_is_that_of_plain_decoding() -> None:
    """A looked up token is accepted if the target draws it, so each draw is the one of plain decoding."""
    params = SamplingParams(max_new_tokens=LENGTH, temperature=0.3, seed=5)
    prompts = prompts_of("tiny")
    plain = make("tiny", "model", 0).generate(prompts, params)
    for drafting in SEARCHES:
        outputs = make("tiny", drafting, max_num_requests=2).generate(prompts, params)
        assert [item.token_ids for item in outputs] == [item.token_ids for item in plain]
        assert sum(length - 1 for item in outputs for length in item.acceptance_lengths) >= 10


def test_the_command_line_offers_every_lookup() -> None:
    assert set(LOOKUP_NAMES) == set(lookups()) == set(SEARCHES)


def test_features_that_need_a_draft_or_late_results_are_switched_off() -> None:
    config = EngineConfig(drafting="suffix", draft_sampling="probabilistic", adaptive_width=True)
    changed, warnings = apply_exclusions(config, placement(), K)
    assert (changed.scheduling, changed.draft_sampling, changed.adaptive_width) == ("sync", "greedy", False)
    assert [item.id for item in warnings] == ["no-async-lookup", "no-probabilistic-lookup", "no-adaptive-lookup"]


def test_a_lookup_refuses_a_draft_beside_it_and_more_tokens_than_a_step_holds() -> None:
    target = open_target(tiny_directory() / "target")
    with pytest.raises(UsageError) as caught:
        load_pair(target, bundled_draft(), EngineConfig(drafting="ngram"))
    assert caught.value.id == "draft-beside-lookup"
    with pytest.raises(UnsupportedError) as unknown:
        load_pair(target, None, EngineConfig(drafting="nothing"))
    assert unknown.value.id == "unknown-lookup"
    assert resolve_num_drafts(EngineConfig(drafting="ngram"), None) == 7
    with pytest.raises(UsageError) as many:
        resolve_num_drafts(EngineConfig(drafting="ngram", num_draft_tokens=32), None)
    assert many.value.id == "too-many-draft-tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("drafting", SEARCHES)
def test_captured_steps_of_a_lookup_have_the_traces_of_the_cpu(drafting: str) -> None:
    prompts, params = prompts_of("tiny"), SamplingParams(max_new_tokens=LENGTH)
    on_cpu = make("tiny", drafting, 7, max_num_requests=1).generate(prompts, params)
    llm = gpu_llm(None, "float32", max_num_requests=1, drafting=drafting, num_draft_tokens=7)
    assert [output.drafts for output in llm.generate(prompts, params)] == [output.drafts for output in on_cpu]
    assert llm.engine.runner.graphs is not None
    assert {mode.verify_width for _, mode in llm.engine.runner.graphs.captured} <= {1, 2, 3, 4, 6, 8}
    assert len(llm.engine.runner.graphs.captured) > 1
