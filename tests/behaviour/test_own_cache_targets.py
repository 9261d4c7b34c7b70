"""Targets with transformers' own cache generate transformers' text, however many tokens of a block are rejected."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.kv_transfer.handoff import STATE
from dflash_runtime.models.hosting import own_cache
from dflash_runtime.models.hosting.own_cache import Batching, OwnCacheTarget
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.handoffs import go_on, hand_off
from dflash_testing.hosted_models import (
    OWN_CACHE,
    OWN_CACHE_DEFAULT,
    KnowingDraft,
    Known,
    host_own_cache,
    make_model,
    plain_text,
)
from dflash_testing.pairs import (
    DFLASH2,
    DSPARK,
    bundled_llm,
    bundled_prompts,
    placement,
    random_draft,
    random_llm,
    random_prompts,
)
from dflash_testing.plain_loop import WholeText, plain_loop
from dflash_testing.refusals import refuses
from dflash_testing.searches import shorten_search
from dflash_testing.walking_drafts import draft_model, sample_of_all

KINDS = [kind if kind in OWN_CACHE_DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in OWN_CACHE]
NUM_DRAFTS = 7
NUM_TOKENS, FEW = 20, 12
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 2, 17, 33, 65)


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model, and the same model as a target."""
    path = tmp_path_factory.mktemp("own_cache")
    return make_model(path, request.param), host_own_cache(path)


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model with a recurrent state, and the same model as a target."""
    path = tmp_path_factory.mktemp("stateful")
    return make_model(path, OWN_CACHE_DEFAULT[0]), host_own_cache(path)


def draft_of(target: OwnCacheTarget, known: list[Known] | None = None) -> Draft:
    draft = random_draft(target, rope=RopeConfig(theta=10_000.0))
    return draft if known is None else KnowingDraft(draft, known)


def steps_of(models: Any, num_right: int) -> tuple[list[int], list[int], set[int]]:
    """Run a draft that gets `num_right` tokens of each block right.

    Returns its text, transformers' own text, and the acceptance lengths.
    """
    model, target = models
    (prompt,) = random_prompts((17,), target.config.vocab_size)
    text = plain_text(model, prompt, NUM_TOKENS + NUM_DRAFTS + 1)
    draft = draft_of(target, [Known([*prompt, *text], num_right)])
    (output,) = random_llm(target, draft, NUM_DRAFTS).generate([prompt], PARAMS)
    return list(output.token_ids), text[:NUM_TOKENS], set(output.acceptance_lengths)


@pytest.mark.parametrize(
    "num_right",
    [0, 1, 4, NUM_DRAFTS - 1, NUM_DRAFTS, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3, 5))],
)
def test_a_draft_that_is_right_for_some_tokens(models: Any, num_right: int) -> None:
    said, wanted, accepted = steps_of(models, num_right)
    assert said == wanted
    assert accepted == {num_right + 1}


def test_steps_with_several_residual_streams_equal_the_plain_loop(tmp_path: Path) -> None:
    """A random draft proposes from the mean of the streams, so its tokens depend on all of them."""
    model, target = make_model(tmp_path, "deepseek_v4"), host_own_cache(tmp_path)
    draft, whole = draft_of(target), WholeText(model, target.config)
    (prompt,) = random_prompts((33,), target.config.vocab_size)
    text, steps = plain_loop(whole, draft, list(prompt), NUM_DRAFTS, FEW)
    (output,) = random_llm(target, draft, NUM_DRAFTS).generate([prompt], replace(PARAMS, max_new_tokens=FEW))
    assert list(output.token_ids) == text[:FEW]
    found = [(step.draft_ids, step.num_accepted) for step in output.drafts]
    assert len(found) > 4
    assert found == steps[: len(found)]


@pytest.mark.parametrize(
    "kind",
    [
        "mamba",
        "mamba2",
        "minimax",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in OWN_CACHE
            if kind not in ("mamba", "mamba2", "minimax")
        ),
    ],
)
def test_a_target_runs_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """Some families add their residuals in float32, whatever the dtype of the weights.

    In this minimax the state is in bfloat16, and the weights are so large that the roundings show.
    """
    make_model(tmp_path, kind)
    target = host_own_cache(tmp_path, torch.bfloat16)
    draft = random_draft(target, torch.bfloat16, rope=RopeConfig(theta=10_000.0))
    llm = random_llm(target, draft, NUM_DRAFTS)
    (output,) = llm.generate(random_prompts((17,), target.config.vocab_size), replace(PARAMS, max_new_tokens=FEW))
    assert output.error is None
    assert len(output.token_ids) == FEW


@pytest.mark.parametrize(
    ("scheduling", "is_random"),
    [
        ("async", False),
        pytest.param("sync", True, marks=pytest.mark.slow),
        pytest.param("sync", False, marks=pytest.mark.slow),
        pytest.param("async", True, marks=pytest.mark.slow),
    ],
)
def test_many_prompts_at_once(models: Any, scheduling: str, *, is_random: bool) -> None:
    """Four requests run at once, prefilled in chunks of at most 24 rows, with rows of other requests between chunks."""
    model, target = models
    given = random_prompts(LENGTHS, target.config.vocab_size)
    texts = [plain_text(model, prompt, FEW) for prompt in given]
    known = [Known([*prompt, *text], index) for index, (prompt, text) in enumerate(zip(given, texts, strict=True))]
    draft = draft_of(target, None if is_random else known)
    llm = random_llm(target, draft, NUM_DRAFTS, scheduling=scheduling, max_num_requests=4, max_batched_tokens=24)
    outputs = llm.generate(given, replace(PARAMS, max_new_tokens=FEW))
    assert [list(output.token_ids) for output in outputs] == texts
    assert is_random or max(length for output in outputs for length in output.acceptance_lengths) > 4


def test_requests_of_different_lengths_share_forwards(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompts, every forward has the rows of all running requests, whatever each accepts."""
    model, target = models
    given = random_prompts((5, 17, 33, 33), target.config.vocab_size)
    texts = [plain_text(model, prompt, NUM_TOKENS + NUM_DRAFTS + 1) for prompt in given]
    known = [Known([*prompt, *text], right) for prompt, text, right in zip(given, texts, (3, 3, 1, 5), strict=True)]
    shapes, forward = [], target._forward

    def watch(token_ids: Any, *args: Any, **settings: Any) -> Any:
        shapes.append(len(token_ids))
        return forward(token_ids, *args, **settings)

    monkeypatch.setattr(target, "_forward", watch)
    monkeypatch.setattr(own_cache, "MOST_PENDING", 6)
    outputs = random_llm(target, draft_of(target, known), NUM_DRAFTS, max_num_requests=4).generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [text[:NUM_TOKENS] for text in texts]
    # A draft that takes one text for another may get more tokens right.
    assert all(max(output.acceptance_lengths) >= least for output, least in zip(outputs, (4, 4, 2, 6), strict=True))
    assert shapes[:3] == [1, 1, 2]
    assert shapes[3] == 4


@pytest.mark.parametrize("batching", [Batching(), Batching(same_length=True)], ids=["alone", "same-length"])
def test_texts_that_may_not_share_a_cache(stateful: Any, batching: Batching, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = stateful
    monkeypatch.setattr(target, "batching", batching)
    given = random_prompts((5, 17, 17), target.config.vocab_size)
    lens, forward = [], target._forward

    def watch(token_ids: Any, given_lens: Any, *args: Any, **settings: Any) -> Any:
        lens.append(list(given_lens))
        return forward(token_ids, given_lens, *args, **settings)

    monkeypatch.setattr(target, "_forward", watch)
    outputs = random_llm(target, draft_of(target), NUM_DRAFTS, max_num_requests=4).generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, item, NUM_TOKENS) for item in given]
    assert max(map(len, lens)) == (2 if batching.same_length else 1)
    assert all(len(set(some)) == 1 for some in lens)


@pytest.mark.slow
def test_prompts_of_every_length(models: Any) -> None:
    model, target = models
    given, params = random_prompts(range(1, 66), target.config.vocab_size, seed=3), replace(PARAMS, max_new_tokens=6)
    llm = random_llm(target, draft_of(target), NUM_DRAFTS, max_num_requests=4, scheduling="async")
    outputs = llm.generate(given, params)
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, item, 6) for item in given]


def test_sampled_text_is_that_of_plain_decoding(models: Any) -> None:
    _, target = models
    given = random_prompts((3, 17, 40), target.config.vocab_size)
    params = [replace(PARAMS, temperature=0.8, seed=seed) for seed in (1, 2, 3)]
    plain = [output.token_ids for output in random_llm(target, None, 0).generate(given, params)]
    known = [Known([*prompt, *text], 3) for prompt, text in zip(given, plain, strict=True)]
    llm = random_llm(target, draft_of(target, known), NUM_DRAFTS, max_num_requests=4, scheduling="async")
    outputs = llm.generate(given, params)
    assert [output.token_ids for output in outputs] == plain
    assert any(length == 4 for output in outputs for length in output.acceptance_lengths)


@pytest.mark.parametrize(
    ("scheduling", "is_random", "num_tokens"),
    [
        ("sync", True, FEW),
        ("async", False, FEW),
        *(
            pytest.param(scheduling, is_random, NUM_TOKENS, marks=pytest.mark.slow)
            for scheduling in ("sync", "async")
            for is_random in (True, False)
        ),
    ],
)
def test_a_text_goes_on_in_another_engine(models: Any, scheduling: str, num_tokens: int, *, is_random: bool) -> None:
    """The hand-off includes the state and the draft's context KV, and the steps equal the steps of a single engine."""
    _, target = models
    lengths = (1, 2, 17, 17, 33)
    given, params = random_prompts(lengths, target.config.vocab_size), replace(PARAMS, max_new_tokens=num_tokens)
    known = None
    if not is_random:
        texts = random_llm(target, None, 0).generate(given, params)
        known = [Known([*prompt, *text.token_ids], 2) for prompt, text in zip(given, texts, strict=True)]
    draft = draft_of(target, known)
    one, sender, receiver = (
        random_llm(target, draft, NUM_DRAFTS, scheduling=scheduling, max_num_requests=3, max_batched_tokens=24)
        for _ in range(3)
    )
    wanted = one.generate(given, params)
    found = go_on(receiver, given, params, hand_off(sender, given, params))
    assert [(item.token_ids, item.drafts) for item in found] == [(item.token_ids, item.drafts) for item in wanted]
    assert [item.num_loaded for item in found] == list(lengths)


@pytest.mark.parametrize("changes", [DFLASH2, DSPARK], ids=["dflash2", "dspark"])
def test_a_text_with_a_draft_that_walks_goes_on_in_another_engine(stateful: Any, changes: dict[str, Any]) -> None:
    model, target = stateful
    given, params = random_prompts((1, 17, 33), target.config.vocab_size), replace(PARAMS, max_new_tokens=FEW)
    draft = random_draft(target, rope=RopeConfig(theta=10_000.0), **changes)
    settings: dict[str, Any] = {"scheduling": "async", "max_num_requests": 3, "max_batched_tokens": 24}
    one, sender, receiver = (random_llm(target, draft, NUM_DRAFTS, **settings) for _ in range(3))
    wanted = one.generate(given, params)
    assert [list(item.token_ids) for item in wanted] == [plain_text(model, prompt, FEW) for prompt in given]
    found = go_on(receiver, given, params, hand_off(sender, given, params))
    assert [(item.token_ids, item.drafts) for item in found] == [(item.token_ids, item.drafts) for item in wanted]


def test_a_state_of_another_target_is_refused(stateful: Any) -> None:
    """A part is missing, unknown to this target, or of another dtype."""
    _, target = stateful
    (prompt,) = random_prompts((17,), target.config.vocab_size)
    connector = hand_off(random_llm(target, draft_of(target), NUM_DRAFTS), [prompt], PARAMS)
    tensors = dict(connector.saved["00000"].tensors)
    name = next(name for name in tensors if name.startswith(STATE))
    for changed, named in (
        ({key: item for key, item in tensors.items() if key != name}, name.removeprefix(STATE)),
        ({**tensors, f"{STATE}unheard_of": tensors[name]}, "unheard_of"),
        ({**tensors, name: tensors[name].double()}, "torch.float64"),
    ):
        connector.saved["00000"] = connector.saved["00000"].with_tensors(changed)
        (output,) = go_on(random_llm(target, draft_of(target), NUM_DRAFTS), [prompt], PARAMS, connector)
        assert output.exit_code == 3
        assert output.error is not None
        assert named in output.error


def test_the_prefix_cache_finds_nothing_for_a_target_with_a_state(stateful: Any) -> None:
    """Cached pages do not hold a state."""
    model, target = stateful
    (prompt,) = random_prompts((48,), target.config.vocab_size)
    llm = random_llm(target, draft_of(target), NUM_DRAFTS, prefix_cache=True)
    outputs = [llm.generate([prompt], PARAMS)[0] for _ in range(2)]
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, prompt, NUM_TOKENS)] * 2
    assert not any(output.num_cached for output in outputs)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_preempted_requests_begin_again(stateful: Any, scheduling: str) -> None:
    model, target = stateful
    given = random_prompts((20, 21, 22, 23), target.config.vocab_size)
    llm = random_llm(
        target, draft_of(target), NUM_DRAFTS, max_num_requests=4, page_size=4, num_pages=35, scheduling=scheduling
    )
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, item, NUM_TOKENS) for item in given]
    assert any(output.num_preemptions for output in outputs)


def test_a_step_that_fails_is_run_again(stateful: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = stateful
    given, calls, forward = random_prompts((20, 21), target.config.vocab_size), [0], target._forward

    def fail_once(*args: Any, **settings: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise RuntimeError("once")
        return forward(*args, **settings)

    monkeypatch.setattr(target, "_forward", fail_once)
    outputs = random_llm(target, draft_of(target), NUM_DRAFTS, max_num_requests=4).generate(given, PARAMS)
    assert calls[0] > 12
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, item, NUM_TOKENS) for item in given]


def test_caches_of_finished_requests_are_dropped(stateful: Any) -> None:
    _, target = stateful
    llm = random_llm(target, draft_of(target), NUM_DRAFTS, max_num_requests=4)
    stream = llm.stream(random_prompts((5, 6, 7), target.config.vocab_size), PARAMS)
    next(stream)
    texts = llm.engine.runner.texts
    assert texts is not None
    assert len(texts) == 3
    stream.close()
    llm.generate(random_prompts((3,), target.config.vocab_size), PARAMS)
    assert len(texts) == 1


def test_the_last_positions_of_the_model(stateful: Any) -> None:
    """A request without room for a block decodes plainly, and no row past the last position runs."""
    model, target = stateful
    length = target.config.max_position_embeddings
    (prompt,) = random_prompts((length - 12,), target.config.vocab_size)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    (output,) = random_llm(target, draft_of(target), NUM_DRAFTS).generate([prompt], params)
    assert list(output.token_ids) == plain_text(model, prompt, 12)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_text_ends_before_its_rope_would_change(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        rope |= {**factors, "original_max_position_embeddings": 64}
    model = make_model(
        tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64 if kind == "dynamic" else 256
    )
    target = host_own_cache(tmp_path)
    (prompt,) = random_prompts((40,), target.config.vocab_size)
    text = plain_text(model, prompt, 24)
    draft = draft_of(target, [Known([*prompt, *text], 5)])
    (output,) = random_llm(target, draft, NUM_DRAFTS).generate([prompt], replace(PARAMS, max_new_tokens=100))
    assert list(output.token_ids) == text


class TestWithoutRestoring:
    """Without copies of the cache, rejected tokens stay in the state, as in z-lab's own loop."""

    def test_the_text_differs(self, stateful: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(own_cache, "copy_cache", lambda cache, layout: cache)
        said, wanted, _ = steps_of(stateful, 0)
        assert said != wanted

    def test_the_trial_sees_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model(tmp_path, OWN_CACHE_DEFAULT[0])
        monkeypatch.setattr(own_cache, "copy_cache", lambda cache, layout: cache)
        with refuses(UnsupportedError, "target-cache-differs"):
            host_own_cache(tmp_path)


@pytest.mark.parametrize("name", sample_of_all("dflash2"))
def test_the_bundled_pair_gives_the_traces_of_the_native_target(name: str) -> None:
    target = load_target(open_target(tiny_directory() / "target"), placement(), "transformers-cache")
    draft = draft_model(name, target=target)
    given = [prompt[:40] for prompt in bundled_prompts()[:3]]
    params = SamplingParams(max_new_tokens=16)
    settings: dict[str, Any] = {"max_num_requests": 2, "scheduling": "async", "prefix_cache": False}
    ours = random_llm(target, draft, NUM_DRAFTS, **settings)
    native = bundled_llm(draft_model(name), NUM_DRAFTS, **settings)
    outputs = ours.generate(given, params)
    assert outputs == native.generate(given, params)
    assert ours.check_lossless(outputs).is_lossless


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Return options for prompts and a pair with a target that has a state."""
    folder, shape = tmp_path_factory.mktemp("labels"), support.SMALL
    sizes = {"hidden_size": shape.hidden, "vocab_size": shape.vocab, "num_hidden_layers": shape.target_layers}
    make_model(folder / "target", "lfm2", layer_types=["conv", "full_attention"] * (shape.target_layers // 2), **sizes)
    draft = support.make_native(folder / "draft")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [7, index]}) + "\n" for index in range(8)))
    return draft, "--target", folder / "target", "--prompts", prompts, "--device", "cpu"


class TestLabels:
    """Every command that runs such a target warns, and its document says that transformers' cache was used."""

    def test_generate(self, pair: tuple[object, ...]) -> None:
        outcome = invoke("generate", "--draft", *pair, "-n", 4, "--check-lossless", "--json")
        assert outcome.code == 0, outcome.err
        measured = json.loads(outcome.out)["measured"]
        assert measured["target_runtime"] == "transformers-cache"
        assert measured["prefix_cache"] is False
        assert len([line for line in outcome.err.splitlines() if line.startswith("warning: ") and "lfm2" in line]) == 1

    def test_validate(self, pair: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        shorten_search(monkeypatch, "rope")
        draft, *rest = pair
        outcome = invoke("validate", draft, *rest, "--level", "run", "-n", 8, "--json")
        assert outcome.code == 3, outcome.err
        assert json.loads(outcome.out)["search"]["target_runtime"] == "transformers-cache"
