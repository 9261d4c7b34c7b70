"""Answers that follow a grammar: greedy text equals plain decoding, sampled text has the masked distribution."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from dflash_runtime.documents import from_json, to_json
from dflash_runtime.draft_config import MarkovConfig
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.errors import DFlashError, RequestError, UnsupportedError
from dflash_runtime.llm import LLM
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.grammar import Grammar
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.chi_square import chi_square, chi_square_quantile
from dflash_testing.grammars import JSON, SCHEMA, LetterTokenizer, allowed_ids, matcher, with_tokenizer
from dflash_testing.pairs import (
    DFLASH2,
    ScriptedDraft,
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
    bundled_tokenizer,
    random_draft,
    random_llm,
    random_target,
    target_logits,
)
from dflash_testing.refusals import refuses

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PROMPTS = [prompt[:24] for prompt in bundled_prompts()[:3]]
PARAMS = SamplingParams(max_new_tokens=40, stop_token_ids=(0,), grammar=JSON, seed=5)
ANYTHING = Grammar("regex", "(?s:.*)")
BUNDLED = ("tiny", "tiny:reduced", "tiny:dflash2", "tiny:dspark")


@cache
def llm_with(name: str | None, **engine: Any) -> LLM:
    """The bundled target with a bundled draft, in float64."""
    draft = None if name is None else bundled_draft_model(name, torch.float64)
    num_drafts = 0 if draft is None else draft.config.block_size - 1
    llm = bundled_llm(draft, num_drafts, dtype=torch.float64, max_num_requests=4, **engine)
    return with_tokenizer(llm, bundled_tokenizer())


@cache
def plain_texts(temperature: float) -> list[tuple[int, ...]]:
    outputs = llm_with(None).generate(PROMPTS, replace(PARAMS, temperature=temperature))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", BUNDLED)
def test_greedy_text_equals_plain_decoding_and_every_proposal_obeys_the_grammar(name: str) -> None:
    outputs = llm_with(name).generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == plain_texts(0.0)
    num_accepted = 0
    for output in outputs:
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text or ""), SCHEMA)
        num_accepted += sum(output.acceptance_lengths) - len(output.acceptance_lengths)
        at = matcher(bundled_tokenizer(), JSON, (0,), 2048)
        for step in output.drafts if name != "tiny:reduced" else ():
            at.follow(output.token_ids[: step.start])
            assert all(at.try_draft(token) for token in step.draft_ids)
    assert num_accepted > 10


def test_sampled_text_equals_sampled_plain_decoding() -> None:
    outputs = llm_with("tiny").generate(PROMPTS, replace(PARAMS, temperature=1.0))
    assert [output.token_ids for output in outputs] == plain_texts(1.0)
    assert plain_texts(1.0) != plain_texts(0.0)


@pytest.mark.parametrize("name", ["tiny", "tiny:dflash2", "tiny:dspark"])
def test_a_grammar_that_allows_everything_changes_no_draft_token(name: str) -> None:
    llm, free = llm_with(name), replace(PARAMS, grammar=None, max_new_tokens=24)
    within = llm.generate(PROMPTS, replace(free, grammar=ANYTHING))
    assert [(item.token_ids, item.drafts) for item in within] == [
        (item.token_ids, item.drafts) for item in llm.generate(PROMPTS, free)
    ]


def test_requests_with_and_without_grammars_share_asynchronous_steps() -> None:
    """Few pages, so requests are preempted and get new matchers."""
    llm = llm_with("tiny", scheduling="async", page_size=4, num_pages=42)
    free = replace(PARAMS, grammar=None, max_new_tokens=20)
    outputs = llm.generate([*PROMPTS, *PROMPTS], [*[PARAMS] * 3, *[free] * 3])
    assert [output.token_ids for output in outputs[:3]] == plain_texts(0.0)
    alone = llm_with("tiny").generate(PROMPTS, free)
    assert [output.token_ids for output in outputs[3:]] == [output.token_ids for output in alone]
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("name", "engine"), [("tiny", {"num_tree_nodes": 4}), (None, {"drafting": "ngram"})])
def test_what_excludes_a_grammar_refuses_the_request(name: str | None, engine: dict[str, Any]) -> None:
    (output,) = llm_with(name, **engine).generate(PROMPTS[:1], PARAMS)
    assert (output.finish_reason, output.error_id) == (FinishReason.ERROR, "grammar-excluded")


def test_lossless_check_reads_the_grammar() -> None:
    llm = llm_with("tiny")
    (output,) = llm.generate(PROMPTS[:1], PARAMS)
    assert llm.check_lossless([output], PARAMS).num_wrong == 0
    assert llm.check_lossless([output]).num_wrong > 0
    other = replace(output, token_ids=(*output.token_ids[:2], 300, *output.token_ids[3:]))
    assert llm.check_lossless([other], PARAMS).num_wrong > 0


LETTERS = LetterTokenizer("abcde", 6)
WORDS = Grammar("regex", "(a[bc]|b[cd]|c[ade])[ace]")


@cache
def letter_target() -> Target:
    return random_target(torch.float64, vocab_size=6, num_layers=2, scale=0.15)


def plain_draft() -> Draft:
    return random_draft(letter_target(), torch.float64, block_size=4, target_layer_ids=(0, 1))


def walking_draft() -> Draft:
    return random_draft(letter_target(), torch.float64, block_size=4, target_layer_ids=(0, 1), **DFLASH2)


def markov_draft() -> Draft:
    changes: dict[str, Any] = {"family": "dspark", "markov": MarkovConfig(rank=3, head_type="rnn")}
    changes |= {"sample_from_anchor": True, "block_size": 3}
    return random_draft(letter_target(), torch.float64, target_layer_ids=(0, 1), **changes)


def words_distribution(prompt: list[int]) -> torch.Tensor:
    """The joint distribution of the three letters of a word, by enumeration: [6, 6, 6]."""
    words = [word for word in product(range(5), repeat=3) if _is_word("".join(LETTERS.letters[i] for i in word))]
    joint = torch.zeros(6, 6, 6, dtype=torch.float64)
    for word in words:
        joint[word] = 1.0
        for place in range(3):
            logits = target_logits(letter_target(), [*prompt, *word[:place]])[-1]
            allowed = sorted({other[place] for other in words if other[:place] == word[:place]})
            joint[word] *= logits[allowed].softmax(0)[allowed.index(word[place])]
    return joint


def _is_word(text: str) -> bool:
    return text[:2] in ("ab", "ac", "bc", "bd", "ca", "cd", "ce") and text[2] in "ace"


@pytest.mark.parametrize("make_draft", [plain_draft, walking_draft, pytest.param(markov_draft, marks=pytest.mark.slow)])
def test_sampled_drafts_keep_the_masked_distribution(make_draft: Callable[[], Draft]) -> None:
    """1,000 samples. Chi-square exceeds its 0.9995 quantile once in 2,000."""
    num_samples = 1_000
    llm = random_llm(
        letter_target(), make_draft(), 3, max_num_requests=500, num_pages=4000, draft_sampling="probabilistic",
        prefix_cache=False,
    )  # fmt: skip
    llm = with_tokenizer(llm, LETTERS)
    params = [
        SamplingParams(max_new_tokens=3, temperature=1.0, seed=seed, grammar=WORDS, stop_token_ids=(5,))
        for seed in range(num_samples)
    ]
    counts = torch.zeros(6, 6, 6, dtype=torch.float64)
    num_accepted = 0
    for output in llm.generate([[1, 2, 3]] * num_samples, params):
        counts[output.token_ids] += 1
        num_accepted += sum(output.acceptance_lengths) - len(output.acceptance_lengths)
    assert num_accepted > num_samples / 10
    expected = words_distribution([1, 2, 3]) * num_samples
    assert counts[expected == 0].sum() == 0
    statistic, degrees = chi_square(counts, expected)
    assert statistic < chi_square_quantile(degrees, 3.29)


def test_a_matcher_goes_back_to_the_committed_tokens() -> None:
    at = matcher(LETTERS, WORDS, (5,), 6)
    assert allowed_ids(at) == {0, 1, 2}
    at.follow([2])
    assert [at.try_draft(token) for token in (0, 4, 5)] == [True, True, True]
    assert at.mask() is None
    at.follow([2, 3])
    assert allowed_ids(at) == {0, 2, 4}
    assert not at.try_draft(1)
    at.follow([2, 3, 4])
    assert allowed_ids(at) == {5}
    with pytest.raises(DFlashError) as caught:
        at.follow([2, 3, 4, 0])
    assert caught.value.id == "grammar-failed"


def test_a_stop_token_that_is_text_is_allowed_where_the_text_may_end() -> None:
    at = matcher(LETTERS, Grammar("regex", "ab?e"), (1, 5), 6)
    at.follow([0])
    assert allowed_ids(at) == {4}
    assert not at.try_draft(1)
    at.follow([0, 4])
    assert allowed_ids(at) == {1, 5}


def test_parameters_with_a_grammar_survive_json() -> None:
    """Workers and other ranks receive them as JSON."""
    assert from_json(SamplingParams, to_json(PARAMS)) == PARAMS
    assert "grammar" not in to_json(replace(PARAMS, grammar=None))


@pytest.mark.parametrize(
    ("params", "error_id"),
    [
        (replace(PARAMS, grammar=Grammar("json_schema", '{"type": "objec"}')), "grammar-refused"),
        (replace(PARAMS, grammar=Grammar("json_schema", "[")), "grammar-refused"),
        (replace(PARAMS, grammar=Grammar("regex", "(")), "grammar-refused"),
        (replace(PARAMS, grammar=Grammar("lark", "start: (")), "grammar-refused"),
        (replace(PARAMS, stop_token_ids=()), "grammar-without-stop"),
        (replace(PARAMS, ignore_eos=True), "grammar-without-stop"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(params: SamplingParams, error_id: str) -> None:
    (output,) = llm_with("tiny").generate(PROMPTS[:1], params)
    assert output.error_id == error_id


def test_a_refused_expression_names_the_reason_of_its_parser() -> None:
    """Its message quotes the expression first."""
    with refuses(RequestError, "grammar-refused", field="regex", found="a(?=b)") as refused:
        Grammar("regex", "a(?=b)").compiled()
    assert "look-ahead" in refused.value.message


def test_a_grammar_without_tokens_for_it_ends_the_request() -> None:
    """The vocabulary lacks x. The other request goes on."""
    llm = with_tokenizer(random_llm(letter_target(), plain_draft(), 3, max_num_requests=2), LETTERS)
    params = [
        SamplingParams(max_new_tokens=4, stop_token_ids=(5,), grammar=Grammar("regex", text)) for text in ("ax", "ab")
    ]
    outputs = llm.generate([[1, 2, 3]] * 2, params)
    assert [output.error_id for output in outputs] == ["grammar-failed", None]
    assert outputs[1].token_ids == (0, 1, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("text", ["e(ax|cd)", "e(ab|cd)"])
def test_a_draft_token_before_a_dead_end_fails_an_answer_only_if_the_target_chooses_it(
    text: str, temperature: float
) -> None:
    """The vocabulary lacks x, and b is a stop token. The draft always goes on with a."""
    params = SamplingParams(
        max_new_tokens=5, temperature=temperature, stop_token_ids=(1, 5), grammar=Grammar("regex", text)
    )
    prompts = [[first, 2, 3] for first in range(5)]
    given = [replace(params, seed=seed) for seed in range(5)]
    found = []
    for draft in (None, ScriptedDraft(plain_draft(), lambda position: 0)):
        llm = with_tokenizer(random_llm(letter_target(), draft, 3 if draft else 0, max_num_requests=5), LETTERS)
        found.append([(output.token_ids, output.error_id) for output in llm.generate(prompts, given)])
    assert found[0] == found[1]
    assert {item[1] for item in found[0]} == {None, "grammar-failed"}


def test_a_runner_keeps_few_parsed_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has a grammar of its own, and all are parsed before the first one starts."""
    monkeypatch.setattr("dflash_runtime.device.grammars.MOST_PARSED", 2)
    llm = with_tokenizer(random_llm(letter_target(), plain_draft(), 3, max_num_requests=2), LETTERS)
    params = [
        SamplingParams(max_new_tokens=4, stop_token_ids=(5,), grammar=Grammar("regex", f"{text}e")) for text in "abcd"
    ]
    outputs = llm.generate([[1, 2, 3]] * 4, params)
    assert [output.token_ids for output in outputs] == [(letter, 4, 5) for letter in range(4)]
    assert len(llm.engine.runner.grammars._parsed) == 2
    assert llm.check_lossless(outputs[:1], params[0]).is_lossless


def test_a_target_without_a_tokenizer_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = bundled_llm(None, 0)
    assert llm.generate(PROMPTS[:1], PARAMS)[0].error_id == "grammar-without-tokenizer"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError) as caught:
        JSON.compiled()
    assert (caught.value.id, caught.value.hint) == ("grammar-not-installed", "pip install 'dflash-cli[grammar]'")
