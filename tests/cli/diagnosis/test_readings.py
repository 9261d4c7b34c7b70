"""`--level run`: a falsified config is caught by its acceptance, and a sound draft passes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import Overrides, open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis import alternatives, readings
from dflash_cli.diagnosis.alternatives import ReadingSpace, alternative_readings
from dflash_cli.diagnosis.mask_candidates import find_specials
from dflash_cli.diagnosis.pair_validation import validate_running
from dflash_cli.diagnosis.reading_results import ReadingSearch
from dflash_cli.diagnosis.reading_runner import ReadingRunner
from dflash_cli.diagnosis.readings import search_readings
from dflash_cli.diagnosis.run_report import RunReport
from dflash_cli.diagnosis.run_settings import RunSettings, SearchBudget
from dflash_cli.rules.subject import ValidationPlan
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.documents import to_json
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import falsify
from dflash_testing.pairs import DenseAttention, bundled_draft, random_draft, random_draft_config, random_target
from dflash_testing.refusals import refuses
from dflash_testing.searches import shorten_search

DRAFT, TARGET = (fetch_directory(TINY, role) for role in (Role.DRAFT, Role.TARGET))


def run(draft: Path, *factors: str, num_prompts: int = 16, prompts: Any = None, max_new_tokens: int = 48) -> RunReport:
    budget = SearchBudget(
        num_prompts=num_prompts, max_new_tokens=max_new_tokens, factors=frozenset(factors) if factors else None
    )
    settings = RunSettings(EngineConfig(max_num_requests=32), budget, prompts=prompts)
    return validate_running(ValidationPlan(draft=draft, target=TARGET, target_reference=TINY), settings)


def shorten_if_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *factors: str) -> None:
    """Shorten the search of a case that runs by default. Slow cases run the whole search."""
    if request.node.get_closest_marker("slow") is None:
        shorten_search(monkeypatch, *factors)


@pytest.mark.parametrize(
    ("name", "num_prompts"),
    [
        pytest.param("tiny", 16, marks=pytest.mark.slow),  # by default in test_diagnose.py
        pytest.param("tiny:reduced", 16, marks=pytest.mark.slow),
    ],
)
def test_sound_drafts_pass(
    name: str, num_prompts: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_if_default(request, monkeypatch)
    report = run(fetch_directory(name, Role.DRAFT), num_prompts=num_prompts)
    assert {item.severity for item in report.findings} <= {"info"}
    assert report.search is not None
    assert {item.factor for item in report.search.readings} >= {"taps", "causality", "rope", "mask", "weights"}
    assert report.search.explanation is None


@pytest.mark.parametrize(
    ("rule", "factor", "location", "change", "right"),
    [
        pytest.param(  # by default in test_diagnose.py
            "R01", "taps", "config.json:dflash_config.target_layer_ids",
            lambda config: config["dflash_config"].update(target_layer_ids=[1, 3, 4, 5]),
            {"target_layer_ids": (0, 2, 3, 4)}, marks=pytest.mark.slow,
        ),
        pytest.param(  # by default through the command
            "R04", "rope", "config.json:rope_theta",
            lambda config: config.update(rope_theta=10000.0), {"rope": RopeConfig(theta=1000000.0)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "R04", "rope", "config.json:rope_theta",
            lambda config: config.update(rope_scaling={"rope_type": "linear", "factor": 8.0}),
            {"rope": RopeConfig(theta=1000000.0)}, marks=pytest.mark.slow,
        ),
        pytest.param(
            "R07", "window", "config.json:sliding_window",
            lambda config: config.update(
                sliding_window=5, use_sliding_window=True, layer_types=["sliding_attention"] * 3
            ),
            {"windows": (None, None, None)}, marks=pytest.mark.slow,
        ),
        pytest.param(
            "R01", "taps", "config.json:dflash_config.target_layer_ids",
            lambda config: config["dflash_config"].update(target_layer_ids=[2, 4, 3, 0]),
            {"target_layer_ids": (0, 2, 3, 4)}, marks=pytest.mark.slow,
        ),
        pytest.param(
            "R03", "mask", "config.json:dflash_config.mask_token_id",
            lambda config: config["dflash_config"].update(mask_token_id=4), {"mask_token_id": 3},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["taps", "rope", "scaling", "window", "order", "mask"],
)  # fmt: skip
def test_a_falsified_config_is_caught(
    rule: str, factor: str, location: str, change: Any, right: dict[str, Any], tmp_path: Path,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shorten_if_default(request, monkeypatch, factor)
    report = run(falsify(DRAFT, tmp_path / "draft", change), factor, num_prompts=8, max_new_tokens=32)
    found = [item for item in report.findings if item.id == rule]
    assert [(item.severity, item.location) for item in found] == [("error", location)]
    assert report.search is not None
    best = report.search.explanation
    assert best is not None
    assert {key: getattr(best.alternative.config, key) for key in right} == right
    assert (report.search.num_prompts, best.num_prompts) == (8, readings.MIN_TEST_PROMPTS)
    assert best.reading in found[0].message
    assert report.fails()


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The bundled draft with other tensors."""
    shutil.copytree(DRAFT, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def lower_norms(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: item - 1 for name, item in tensors.items() if name.endswith("norm.weight")})


def exchange(first: str, second: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        old = dict(tensors)
        for name in old:
            if first in name:
                other = name.replace(first, second)
                tensors[name], tensors[other] = old[other], old[name]

    return change


def interleave(tensors: dict[str, torch.Tensor]) -> None:
    """Put the rows of queries and keys in neighbouring pairs, like a model that was trained with interleaved rope."""
    for name, item in tensors.items():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            halves = item.unflatten(0, (-1, 2, 16))
            tensors[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(interleave, "rope over interleaved pairs", marks=pytest.mark.slow),
        pytest.param(exchange("gate_proj", "up_proj"), "gate_proj and up_proj exchanged", marks=pytest.mark.slow),
        pytest.param(exchange("k_proj", "v_proj"), "k_proj and v_proj exchanged", marks=pytest.mark.slow),
        pytest.param(exchange("layers.0.", "layers.1."), "layers in the order [1, 0, 2]", marks=pytest.mark.slow),
    ],
    ids=["interleaved", "gate", "values", "layers"],
)
def test_rewritten_tensors_are_named(change: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch)
    report = run(rewrite(tmp_path / "draft", change), "weights", num_prompts=6, max_new_tokens=32)
    (found,) = [item for item in report.findings if item.level == "run"]
    assert (found.id, found.severity) == ("R09", "error")
    assert report.search is not None
    assert report.search.explanation is not None
    assert report.search.explanation.reading == name


@pytest.mark.slow
def test_norms_stored_without_their_one_are_found_in_the_tensors(tmp_path: Path) -> None:
    """A reading of the same tensors names the same cause."""
    report = run(rewrite(tmp_path / "draft", lower_norms), "weights", num_prompts=6, max_new_tokens=32)
    assert "N31" in {finding.id for finding in report.findings}
    assert report.search is not None
    assert report.search.explanation is not None
    assert report.search.explanation.reading == "every norm weights read as 1 + w"


@pytest.mark.slow
def test_an_exchange_is_named_that_no_half_of_it_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch)
    change = exchange("input_layernorm", "post_attention_layernorm")
    report = run(rewrite(tmp_path / "draft", change), "weights", num_prompts=6, max_new_tokens=32)
    assert report.search is not None
    first = report.search.readings[0]
    assert first.reading == "input_layernorm and post_attention_layernorm exchanged"
    assert first.doubt is None
    assert report.search.explanation == first


def search(name: str, causality: Any, *factors: str) -> ReadingSearch:
    """The search on a bundled draft that is read with another causality."""
    budget = SearchBudget(num_prompts=8, max_new_tokens=32, factors=frozenset(factors))
    draft = open_draft(fetch_directory(name, Role.DRAFT), overrides=Overrides(causality))
    settings = RunSettings(EngineConfig(max_num_requests=32), budget, lambda *_: None)
    return search_readings(draft, open_target(TARGET), None, settings=settings)


def test_a_causal_flag_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduced draft loses 14 % of its accepted tokens."""
    monkeypatch.setattr(readings, "MIN_TEST_PROMPTS", 16)
    found = search("tiny:reduced", "causal", "causality").explanation
    assert found is not None
    assert not any(found.alternative.config.causal)


@pytest.mark.slow
def test_a_causal_flag_that_costs_little_is_no_cause() -> None:
    """The full draft loses 4 %. `test_what_explains_a_draft` tests the thresholds by default."""
    assert search("tiny", "causal", "causality").explanation is None


def test_a_mask_is_found_among_rarely_used_ids() -> None:
    """A mask that no special token names is searched among unused rows of the embedding."""
    space = ReadingSpace(config=bundled_draft().config, target=open_target(TARGET).config, rare_ids=(7, 11))
    guesses = [item for item in alternative_readings(space) if item.is_guess and item.factor == "mask"]
    assert [item.config.mask_token_id for item in guesses] == [7, 11]


@pytest.mark.parametrize("factors", [("taps", "mask"), pytest.param((), marks=pytest.mark.slow)])
def test_an_untrained_draft_has_no_cause(
    factors: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained draft proposes noise under every reading, so no reading is named."""
    shorten_search(monkeypatch, *factors)
    generator = torch.Generator().manual_seed(0)

    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for name, item in tensors.items():
            if item.dim() == 2:
                tensors[name] = (torch.randn(item.shape, generator=generator) * 0.02).to(item.dtype)

    report = run(rewrite(tmp_path / "draft", forget), *factors, num_prompts=4, max_new_tokens=16)
    (found,) = [item for item in report.findings if item.severity != "info"]
    assert (found.id, found.severity) == ("R06", "error")
    assert report.search is not None
    assert report.search.explanation is None


def test_a_reading_is_tested_on_text_that_did_not_choose_it() -> None:
    """Made prompts start from other ids. Given prompts are continued by different samples."""
    draft, target = open_draft(fetch_directory(TINY, Role.DRAFT)), open_target(TARGET)
    budget = SearchBudget(num_prompts=4, max_new_tokens=16)
    runner = ReadingRunner(draft, target, EngineConfig(device="cpu"), budget, longest=12)
    first, new = runner.make_prompts(range(4)), runner.make_prompts(range(4, 12))
    assert len({tuple(prompt[: budget.start_len]) for prompt in [*first, *new]}) == 12
    given = [list(range(30 + index, 42 + index)) for index in range(4)]
    longer = runner.make_prompts(range(4, 12), given)
    assert [prompt[:12] for prompt in longer] == given * 2
    assert len(set(map(tuple, longer))) == 8


def test_through_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts of ids: exit 3, the findings on stdout and progress on stderr."""
    shorten_search(monkeypatch, "rope")
    monkeypatch.setattr(alternatives, "FAMILIES", (alternatives._rope,))
    draft = falsify(DRAFT, tmp_path / "draft", lambda config: config.update(rope_theta=10000.0))
    rows = [{"prompt_token_ids": list(range(30 + index, 60 + index))} for index in range(6)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    outcome = invoke(
        "validate", draft, "--target", TINY, "--level", "run", "--prompts", prompts, "-n", 32, "--device", "cpu"
    )
    assert outcome.code == 3
    assert "R04 error" in outcome.out
    assert all(name in outcome.err for name in (str(draft), "tiny", "cpu"))


def test_a_pair_that_cannot_run_is_not_run(tmp_path: Path) -> None:
    draft = falsify(DRAFT, tmp_path / "draft", lambda config: config.update(hidden_size=100))
    report = run(draft)
    assert report.search is None
    assert "P01" in report.notes[0]


@pytest.mark.slow
def test_a_prompt_that_fails_is_left_out_of_every_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch)
    prompts = six_prompts()
    path = falsify(DRAFT, tmp_path / "draft", lambda config: config.update(rope_theta=10000.0))
    alone = run(path, "rope", prompts=prompts, max_new_tokens=32)
    mixed = run(path, "rope", prompts=[prompts[0], [99_999], *prompts[1:]], max_new_tokens=32)
    assert [item.id for item in alone.findings if item.level == "run"] == ["R04"]
    assert [to_json(item) for item in mixed.findings] == [to_json(item) for item in alone.findings]
    (note,) = mixed.notes
    assert "prompt 2" in note
    assert "99999" in note
    with refuses(UsageError, "too-few-prompts", field="--prompts", found=3):
        run(path, "rope", prompts=[*prompts[:3], [99_999]], max_new_tokens=16)


def six_prompts() -> list[list[int]]:
    return [list(range(30 + index, 60 + index)) for index in range(6)]


def test_too_few_prompts_are_refused() -> None:
    with refuses(UsageError, "too-few-prompts", field="--prompts", found=1):
        run(fetch_directory(TINY, Role.DRAFT), prompts=[[1, 2, 3]])


def test_no_target_is_refused(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    assert invoke("validate", draft, "--level", "run").code == 2


def test_readings_change_one_factor() -> None:
    config, target = bundled_draft().config, open_target(TARGET)
    space = ReadingSpace(config=config, target=target.config, masks=find_specials(target), text_len=100)
    names = {
        "taps": "target_layer_ids", "causality": "causal", "rope": "rope", "mask": "mask_token_id",
        "window": "windows", "block": "block_size", "eps": "rms_norm_eps",
    }  # fmt: skip
    for reading in alternative_readings(space):
        key = names.get(reading.factor)
        kept = replace(reading.config, **{key: getattr(config, key)}) if key is not None else reading.config
        if reading.factor == "anchor":
            kept = replace(kept, family=config.family, sample_from_anchor=False)
        assert kept == config, reading.name
        assert key is None or getattr(reading.config, key) != getattr(config, key)
        assert (key is None) == (reading.rewrite is not None or reading.factor == "anchor")
        assert reading.cause


def test_special_tokens_put_masks_first() -> None:
    assert next(iter(find_specials(open_target(TARGET)).items())) == (3, "<|mask|>")


def test_anchor_first_reads_the_rows_before() -> None:
    """The blocks have the same rows, and in this reading the anchor's row gives a token too."""
    target = random_target()
    config = random_draft_config(target.config)
    space = ReadingSpace(config=config, target=target.config)
    (reading,) = [item for item in alternative_readings(space) if item.factor == "anchor"]
    changes = {name: getattr(reading.config, name) for name in ("family", "sample_from_anchor")}
    draft, anchor_first = random_draft(target), random_draft(target, **changes)
    ids, positions = torch.tensor([[5, 96, 96, 96, 96]]), torch.arange(10, 15)[None]
    attend = DenseAttention(is_causal=False)
    usual, found = draft.logits(ids[:, :-1], positions[:, :-1], attend), anchor_first.logits(ids, positions, attend)
    torch.testing.assert_close(found[:, 1:], usual)
    assert found.shape[1] == reading.config.num_draft_tokens - config.num_draft_tokens + usual.shape[1]
