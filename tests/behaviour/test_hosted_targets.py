"""Targets that transformers' code runs over our pages generate transformers' text in every mode of the engine."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.hosted_models import BODY, DEFAULT, SERVED, KnowingDraft, Known, host, make_model, plain_text
from dflash_testing.pairs import (
    bundled_llm,
    bundled_prompts,
    placement,
    random_draft,
    random_llm,
    random_prompts,
)
from dflash_testing.searches import shorten_search
from dflash_testing.walking_drafts import draft_model, sample_of_all

FAST = [*((kind, True) for kind in DEFAULT), (DEFAULT[0], False)]
KINDS = [
    pytest.param(pair, marks=() if pair in FAST else pytest.mark.slow, id=f"{pair[0]}{'' if pair[1] else '-unswapped'}")
    for pair in product(SERVED, (True, False))
]
"""Each family with and without swapped modules."""

NUM_DRAFTS = 7
NUM_TOKENS = 20
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 2, 15, 16, 17, 31, 48, 65)


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model, and the same model as a target."""
    path, (kind, has_swaps) = tmp_path_factory.mktemp("hosted"), request.param
    model, target = make_model(path, kind), host(path, has_swaps=has_swaps)
    assert bool(target.swaps.modules) == has_swaps
    return model, target


def prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Return random prompts. Prompts of more than 16 tokens begin alike, so that they share pages."""
    first, *others = random_prompts((65, *lengths), vocab_size)
    return [first[:16] + other[16:] if len(other) > 16 else other for other in others]


@pytest.mark.parametrize(
    "num_right",
    [0, 1, 4, NUM_DRAFTS - 1, NUM_DRAFTS, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3, 5))],
)
def test_a_draft_that_is_right_for_some_tokens(models: Any, num_right: int) -> None:
    model, target = models
    (prompt,) = prompts((17,), target.config.vocab_size)
    text = plain_text(model, prompt, NUM_TOKENS + NUM_DRAFTS + 1)
    draft = KnowingDraft(random_draft(target), [Known([*prompt, *text], num_right)])
    (output,) = random_llm(target, draft, NUM_DRAFTS).generate([prompt], PARAMS)
    assert list(output.token_ids) == text[:NUM_TOKENS]
    assert set(output.acceptance_lengths) == {num_right + 1}


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
    """Four requests run at once, share pages, and are prefilled in chunks of at most 24 rows."""
    model, target = models
    given = prompts(LENGTHS, target.config.vocab_size)
    texts = [plain_text(model, prompt, NUM_TOKENS) for prompt in given]
    known = [Known([*prompt, *text], index) for index, (prompt, text) in enumerate(zip(given, texts, strict=True))]
    draft = random_draft(target) if is_random else KnowingDraft(random_draft(target), known)
    llm = random_llm(target, draft, NUM_DRAFTS, scheduling=scheduling, max_num_requests=4, max_batched_tokens=24)
    outputs = [*llm.generate(given[:5], PARAMS), *llm.generate(given[5:], PARAMS)]
    assert [list(output.token_ids) for output in outputs] == texts
    assert any(output.num_cached for output in outputs)
    assert is_random or max(length for output in outputs for length in output.acceptance_lengths) > 4


@pytest.mark.slow
def test_prompts_of_every_length(models: Any) -> None:
    model, target = models
    given = random_prompts(range(1, 66), target.config.vocab_size, seed=3)
    llm = random_llm(target, random_draft(target), NUM_DRAFTS, max_num_requests=4, scheduling="async")
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, item, NUM_TOKENS) for item in given]


@pytest.mark.slow
@pytest.mark.interpreter
def test_the_triton_kernels_serve_it(models: Any) -> None:
    model, target = models
    given = prompts((3, 20), target.config.vocab_size)
    settings: dict[str, Any] = {"kernels": "triton", "max_num_requests": 2, "max_batched_tokens": 12, "num_pages": 30}
    llm = random_llm(target, random_draft(target), NUM_DRAFTS, **settings)
    outputs = llm.generate(given, SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, prompt, 6) for prompt in given]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DEFAULT)
def test_the_text_on_a_gpu_is_the_same(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "target", kind)
    given = prompts(LENGTHS, BODY["vocab_size"])
    sizes = support.Shape(hidden=BODY["hidden_size"], vocab=BODY["vocab_size"], draft_vocab=97, mask=96)
    draft = open_draft(support.make_native(tmp_path / "draft", sizes))
    config = EngineConfig(device="cuda", dtype="float32", num_pages=200, max_num_requests=4, max_batched_tokens=24)
    with LLM(open_target(tmp_path / "target"), draft, config) as llm:
        outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, item, NUM_TOKENS) for item in given]


@pytest.mark.parametrize("name", sample_of_all("dspark"))
def test_the_bundled_pair_gives_the_traces_of_the_native_target(name: str) -> None:
    hosted = load_target(open_target(tiny_directory() / "target"), placement(), "transformers")
    draft = draft_model(name, target=hosted)
    given = [prompt[:40] for prompt in bundled_prompts()[:6]]
    params = SamplingParams(max_new_tokens=32)
    ours = random_llm(hosted, draft, NUM_DRAFTS, max_num_requests=4, scheduling="async").generate(given, params)
    native = bundled_llm(draft_model(name), NUM_DRAFTS, max_num_requests=4, scheduling="async")
    for one, other in zip(ours, native.generate(given, params), strict=True):
        assert one.drafts == other.drafts
        assert one == other


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Return options for prompts and a pair with a target that has no native family."""
    folder, shape = tmp_path_factory.mktemp("labels"), support.SMALL
    sizes = {"hidden_size": shape.hidden, "vocab_size": shape.vocab, "num_hidden_layers": shape.target_layers}
    make_model(folder / "target", "olmoe", head_dim=4, **sizes)
    draft = support.make_native(folder / "draft")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [7, index]}) + "\n" for index in range(8)))
    return draft, "--target", folder / "target", "--prompts", prompts, "--device", "cpu"


def run(command: str, pair: tuple[object, ...], *options: object, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the document that a command prints about a pair, and its lines on stderr."""
    draft, *rest = pair
    named = ("--draft", draft) if command == "generate" else (draft,)
    outcome = invoke(command, *named, *rest, *options, "--json")
    assert outcome.code == code, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    return document, outcome.err


def slow_warnings(err: str) -> list[str]:
    """Return the warnings that name the type of the slow target."""
    return [line for line in err.splitlines() if line.startswith("warning: ") and "olmoe" in line]


class TestLabels:
    """Every command that runs a slow target warns once, and its document names the code that ran the target."""

    def test_generate(self, pair: tuple[object, ...]) -> None:
        document, err = run("generate", pair, "-n", 4)
        assert document["measured"]["target_runtime"] == "transformers"
        assert len(slow_warnings(err)) == 1
        assert "Loading weights" not in err  # transformers' own progress bar

    def test_eval_acceptance(self, pair: tuple[object, ...]) -> None:
        document, err = run("eval-acceptance", pair, "-n", 4)
        assert document["measured"]["target_runtime"] == "transformers"
        assert len(slow_warnings(err)) == 1

    def test_validate(self, pair: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        shorten_search(monkeypatch, "rope")
        document, _ = run("validate", pair, "--level", "run", "-n", 8, code=3)
        assert document["search"]["target_runtime"] == "transformers"
        assert [note for note in document["notes"] if "olmoe" in note]

    @pytest.mark.slow
    def test_bench(self, pair: tuple[object, ...]) -> None:
        document, _ = run("bench", pair, "-n", 8, "--concurrency", 1, "--rounds", 1)
        assert document["measured"]["target_runtime"] == "transformers"

    def test_the_native_runtime_refuses_it(self, pair: tuple[object, ...]) -> None:
        draft, *rest = pair
        outcome = invoke("eval-acceptance", draft, *rest, "--target-runtime", "native")
        assert outcome.code == 5
        assert "olmoe" in outcome.err
