"""KV in FP8: the engine gives the texts and drafts of an engine whose keys and values a reference has rounded.

Float64 runs compare forwards of different shapes.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_cli.checkpoints.references import TINY
from dflash_cli.generation.loaded_pair import open_session
from dflash_cli.tuning.rounded_pairs import rounded
from dflash_cli.tuning.what_if import parse_what_ifs
from dflash_kernels.attention.row_attention import attend_in_turn
from dflash_kernels.fp8.fp8_weight import FP8
from dflash_kernels.kv.kv_format import UNSCALED, KVScales
from dflash_kernels.kv.kv_store import kv_store_ref
from dflash_kernels.kv.rope_store import HALVES, KVPlace, Turn, rope_store_ref
from dflash_kernels.suite import REFERENCE, Kernels
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.kv_transfer.handoff import TARGET_PAGES
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.command_line import run_main
from dflash_testing.gpu import gpu_llm
from dflash_testing.handoffs import go_on, hand_off, traces
from dflash_testing.hybrid_pair import hybrid_draft, hybrid_prompts, hybrid_target
from dflash_testing.pairs import (
    bundled_draft_model,
    bundled_prompts,
    bundled_target_model,
    random_draft,
    random_llm,
    random_prompts,
    random_target,
)
from dflash_testing.preemption import preempt_youngest
from dflash_testing.refusals import refuses
from dflash_testing.walking_drafts import KINDS, draft_model

WIDE = torch.float64
PARAMS = SamplingParams(max_new_tokens=16)
SCALES = {0: KVScales(0.013, 0.4), 2: KVScales(3.0, 0.07)}
NUM_DRAFTS = 5


def models() -> tuple[Any, Draft]:
    target = random_target(WIDE, scale=0.2)
    return target, random_draft(target, WIDE)


def make_llm(*, is_plain: bool = False, kv_dtype: str = "fp8", **engine: Any) -> LLM:
    target, draft = models()
    engine = {"max_num_requests": 4} | engine
    return random_llm(target, None if is_plain else draft, 0 if is_plain else NUM_DRAFTS, kv_dtype=kv_dtype, **engine)


def prompts() -> list[list[int]]:
    return random_prompts((1, 16, 17, 40, 63), 96)


def to_fp8(rows: Tensor, scale: float) -> Tensor:
    return (rows / scale).clamp(-448, 448).to(FP8).to(rows.dtype) * scale


def rounding_kernels(kernels: Kernels, scales: Mapping[int, KVScales], num_layers: int) -> Kernels:
    """Reference kernels that round keys and values when they are stored in pages of another format.

    Rows of a draft's block are not stored, and so are not rounded. Calls of a target go through its layers in order.
    """
    calls = iter(range(10**9))

    def kv_store(keys: Tensor, values: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        own = scales.get(next(calls) % num_layers, UNSCALED)
        return kv_store_ref(to_fp8(keys, own.key), to_fp8(values, own.value), *place)

    def rope_store(
        parts: Tensor, norms: Tensor | None, eps: float, cos: Tensor, sin: Tensor, num_kv: int, place: KVPlace | None,
        turn: Turn = HALVES,
    ) -> Tensor:  # fmt: skip
        rows = rope_store_ref(parts, norms, eps, cos, sin, num_kv, None, turn)
        if place is None:
            return rows
        kept = kv_store(rows[:, -2 * num_kv : -num_kv], rows[:, -num_kv:], *place)
        return torch.cat((rows[:, : -2 * num_kv], *kept), dim=1)

    def context_kv_store(*arguments: Any) -> None:
        kernels.context_kv_store(*arguments)
        *_, key_cache, value_cache, slots = arguments
        kept = slots[slots >= 0]
        where = kept // key_cache.shape[2], kept % key_cache.shape[2]
        for side in (key_cache, value_cache):
            side[:, *where] = to_fp8(side[:, *where], 1.0)

    return replace(
        kernels, kv_store=kv_store, rope_store=rope_store, context_kv_store=context_kv_store,
        row_attention=partial(attend_in_turn, rope_store, kernels.block_attention),
    )  # fmt: skip


def rounded_llm(llm: LLM, scales: Mapping[int, KVScales]) -> LLM:
    """An engine with pages in the dtype of the run, whose models round with reference kernels."""
    pair = llm.pair
    assert pair.draft is not None
    kernels = rounding_kernels(REFERENCE, scales, len(pair.target.config.kv_layers))
    target = random_target(WIDE, scale=0.2, kernels=kernels)
    draft = random_draft(target, WIDE, kernels=kernels)
    placed = replace(pair.placement, kernels=kernels, kv_dtype=None)
    return LLM(replace(pair, target=target, draft=draft, placement=placed, kv_scales={}))


MODES: list[dict[str, Any]] = [
    {"scheduling": "sync", "max_num_requests": 1},
    {"scheduling": "async", "max_batched_tokens": 20},
    {"scheduling": "async", "prefix_cache": False, "draft_sampling": "probabilistic"},
]


@pytest.mark.parametrize(
    ("engine", "scales"),
    [
        *((engine, SCALES) for engine in MODES),
        (MODES[1], {}),
        *(pytest.param(engine, {}, marks=pytest.mark.slow) for engine in MODES[::2]),
    ],
    ids=str,
)
def test_texts_and_drafts_equal_an_engine_that_rounds_by_reference(
    engine: dict[str, Any], scales: Mapping[int, KVScales]
) -> None:
    llm = make_llm(kv_scales=scales, **engine)
    params = replace(PARAMS, temperature=0.7, seed=3) if "draft_sampling" in engine else PARAMS
    found, wanted = llm.generate(prompts(), params), rounded_llm(llm, scales).generate(prompts(), params)
    assert traces(found) == traces(wanted)
    other = make_llm(kv_dtype="auto", **engine).generate(prompts(), params)
    assert traces(found) != traces(other)


@pytest.mark.parametrize("scales", [pytest.param({}, marks=pytest.mark.slow), SCALES], ids=["unscaled", "scaled"])
def test_text_equals_plain_decoding_in_fp8(scales: Mapping[int, KVScales]) -> None:
    """Also one prompt at a time, and with prompts cut into chunks: every row sees the same rounded keys."""
    wanted = ids(make_llm(is_plain=True, kv_scales=scales, max_num_requests=1))
    for engine in MODES[:2]:
        assert ids(make_llm(kv_scales=scales, **engine)) == wanted
    assert ids(make_llm(is_plain=True, kv_scales=scales, max_batched_tokens=7)) == wanted
    assert ids(make_llm(is_plain=True, kv_dtype="auto")) != wanted


def ids(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in llm.generate(prompts(), PARAMS)]


@cache
def plain_texts() -> list[tuple[int, ...]]:
    """Texts of the bundled target without a draft, in FP8."""
    llm = random_llm(bundled_target_model(), None, 0, max_num_requests=1, kv_dtype="fp8")
    return [item.token_ids for item in llm.generate(bundled_prompts()[:3], PARAMS)]


@pytest.mark.parametrize("kind", ["tiny", "tiny:reduced", *KINDS])
def test_every_kind_of_draft_stores_fp8(kind: str) -> None:
    draft = draft_model(kind)
    num_drafts = min(5, draft.config.num_draft_tokens)
    engine: dict[str, Any] = {"max_num_requests": 1, "kv_dtype": "fp8"}
    llm = random_llm(bundled_target_model(), draft, num_drafts, **engine)
    found = llm.generate(bundled_prompts()[:3], PARAMS)
    assert [item.token_ids for item in found] == plain_texts()
    assert sum(sum(item.acceptance_lengths) - len(item.acceptance_lengths) for item in found) > 4
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    assert runner.target_kv.pages.dtype == runner.draft_kv.pages.dtype == FP8
    assert all(bool(kv.pages.float().any()) for kv in (runner.target_kv, runner.draft_kv))


def test_attention_layers_of_a_hybrid_store_fp8_and_states_do_not() -> None:
    engine: dict[str, Any] = {"max_num_requests": 2, "kv_dtype": "fp8"}
    target, given = hybrid_target(WIDE), hybrid_prompts()[:4]
    llm = random_llm(target, hybrid_draft(WIDE), 7, **engine)
    found = llm.generate(given, PARAMS)
    plain = random_llm(target, None, 0, **engine).generate(given, PARAMS)
    assert [item.token_ids for item in found] == [item.token_ids for item in plain]
    assert llm.engine.runner.target_kv.pages.dtype == FP8
    assert llm.engine.runner.states is not None
    assert {item.dtype for item in llm.engine.runner.states.all_layers if isinstance(item, Tensor)} == {WIDE}


def test_a_prefix_hit_reads_the_stored_numbers() -> None:
    long = prompts()[-1]
    given = [long, [*long[:50], 3, 4], long[:33]]
    llm = make_llm(kv_scales=SCALES)
    llm.generate([long], PARAMS)
    found = llm.generate(given, PARAMS)
    assert [output.num_cached for output in found] == [48, 48, 32]
    assert traces(found) == traces(make_llm(kv_scales=SCALES, prefix_cache=False).generate(given, PARAMS))


def test_a_preempted_request_continues_with_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = make_llm().generate(prompts(), PARAMS)
    llm = make_llm()
    step, count = llm.engine.step, iter(range(10**6))

    def preempting() -> Any:
        if next(count) % 4 == 3:
            preempt_youngest(llm)
        return step()

    monkeypatch.setattr(llm.engine, "step", preempting)
    found = llm.generate(prompts(), PARAMS)
    assert sum(output.num_preemptions for output in found) > 2
    assert traces(found) == traces(wanted)


@pytest.mark.parametrize("scales", [{}, SCALES], ids=["unscaled", "scaled"])
def test_a_hand_off_continues_with_the_same_trace(scales: Mapping[int, KVScales]) -> None:
    given = prompts()
    connector = hand_off(make_llm(kv_scales=scales), given, PARAMS)
    assert {tensor.dtype for item in connector.saved.values() for tensor in item.tensors.values()} == {FP8}
    found = go_on(make_llm(kv_scales=scales), given, PARAMS, connector)
    assert traces(found) == traces(make_llm(kv_scales=scales).generate(given, PARAMS))
    assert [output.num_loaded for output in found] == [len(prompt) for prompt in given]


@pytest.mark.parametrize(
    ("here", "there", "field"),
    [
        ({"kv_dtype": "fp8"}, {"kv_dtype": "auto"}, "KV dtype"),
        ({"kv_dtype": "auto"}, {"kv_dtype": "fp8"}, "KV dtype"),
        ({"kv_scales": SCALES}, {}, "target KV scales"),
    ],
    ids=["fp8-from-auto", "auto-from-fp8", "other-scales"],
)
def test_pages_of_another_format_are_refused(here: dict[str, Any], there: dict[str, Any], field: str) -> None:
    given = prompts()[2:4]
    connector = hand_off(make_llm(**there), given, PARAMS)
    found = go_on(make_llm(**here), given, PARAMS, connector)
    assert {output.error_id for output in found} == {"handoff-does-not-fit"}
    assert all(field in (output.error or "") for output in found)


@pytest.mark.parametrize(("here", "there"), [("fp8", "auto"), ("auto", "fp8")])
def test_pages_of_another_format_are_left_empty_even_if_forced(here: str, there: str) -> None:
    sender, receiver = make_llm(kv_dtype=there), make_llm(kv_dtype=here)
    (handoff,) = hand_off(sender, prompts()[2:3], PARAMS).saved.values()
    runner = receiver.engine.runner
    moving = runner.porter.begin_in(handoff.tensors, [1, 2], 0)
    runner.target_kv.pages.view(torch.uint8).fill_(1)
    assert runner.porter.advance(moving)
    assert not runner.target_kv.pages[1:3].double().any()
    same = make_llm(kv_dtype=there).engine.runner
    assert same.porter.advance(same.porter.begin_in(handoff.tensors, [1, 2], 0))
    assert torch.equal(same.target_kv.pages[1:3].double(), handoff.tensors[TARGET_PAGES].double())


def test_a_prefix_store_is_read_by_runs_of_the_same_format_only(tmp_path: Path) -> None:
    def run(kv_dtype: str) -> list[RequestOutput]:
        llm = make_llm(kv_dtype=kv_dtype, prefix_store=str(tmp_path))
        outputs = llm.generate(prompts()[-1:], PARAMS)
        llm.close()
        return outputs

    first, second, other = run("fp8"), run("fp8"), run("auto")
    assert [first[0].num_loaded, second[0].num_loaded, other[0].num_loaded] == [0, 48, 0]
    assert traces(second) == traces(first)


def test_a_page_takes_an_eighth_of_float64_memory() -> None:
    sizes = [make_llm(kv_dtype=name).engine.runner.target_kv.page_bytes for name in ("auto", "fp8")]
    assert sizes[0] == 8 * sizes[1]
    counts = [
        open_session(TINY, None, EngineConfig(device="cpu", kv_dtype=name, kv_memory_bytes=2**20)).llm
        .engine.scheduler.pages.num_pages for name in ("auto", "fp8")
    ]  # fmt: skip
    assert counts[1] == pytest.approx(4 * counts[0], abs=4)


def test_a_lossless_text_has_no_regret() -> None:
    """The check rounds keys and values too. With other KV the same text has regret."""
    llm = make_llm(kv_scales=SCALES)
    outputs = llm.generate(prompts(), PARAMS)
    assert llm.check_lossless(outputs).largest_regret_nats < 1e-9
    assert make_llm(kv_dtype="auto").check_lossless(outputs).largest_regret_nats > 1e-3


def test_features_of_a_text_are_those_of_the_run() -> None:
    """Dumps and diagnoses read features in one forward."""
    llm, text = make_llm(kv_scales=SCALES), prompts()[-1]
    taps = llm.pair.draft.config.target_layer_ids if llm.pair.draft is not None else ()
    seen: list[Tensor] = []
    draft: Any = llm.pair.draft
    write = draft.write_context

    def write_and_keep(features: Tensor, *rest: Any) -> None:
        seen.append(features.clone())
        write(features, *rest)

    draft.write_context = write_and_keep
    llm.generate([text], replace(PARAMS, max_new_tokens=1))
    found = read_features(llm.pair.target, llm.pair.placement, 16, text, taps, llm.pair.kv_scales)
    torch.testing.assert_close(found, seen[0], rtol=1e-12, atol=1e-12)
    other = read_features(llm.pair.target, replace(llm.pair.placement, kv_dtype=None), 16, text, taps)
    assert (other - seen[0]).abs().max() > 1e-3


def test_a_hosted_target_over_pages_stores_fp8() -> None:
    config = EngineConfig(device="cpu", kv_dtype="fp8", num_pages=60, max_num_requests=1)
    native = open_session(TINY, None, config).llm.generate(bundled_prompts()[:2], PARAMS)
    for has_swaps in (True, False):
        hosted = open_session(TINY, None, replace(config, target_runtime="transformers", module_swaps=has_swaps)).llm
        assert hosted.engine.runner.target_kv.pages.dtype == FP8
        found = hosted.generate(bundled_prompts()[:2], PARAMS)
        assert [item.token_ids for item in found] == [item.token_ids for item in native]


def test_a_target_with_its_own_cache_is_refused() -> None:
    config = EngineConfig(device="cpu", kv_dtype="fp8", target_runtime="transformers-cache")
    with refuses(UnsupportedError, "fp8-kv-without-pages", field="--kv-dtype", found="fp8"):
        open_session(TINY, None, config)


def test_what_if_writes_the_text_of_a_run_in_fp8() -> None:
    """The what-if also rounds the block of the draft, as engines do that keep it in pages."""
    config = EngineConfig(device="cpu", num_pages=60, max_num_requests=1)
    session = open_session(TINY, None, config)
    (what_if,) = parse_what_ifs("kv=fp8")
    told = LLM(rounded(session.llm.pair, session.target, what_if)).generate(bundled_prompts()[:2], PARAMS)
    fp8 = open_session(TINY, None, replace(config, kv_dtype="fp8"))
    found = fp8.llm.generate(bundled_prompts()[:2], PARAMS)
    assert [item.token_ids for item in found] == [item.token_ids for item in told]
    assert fp8.run_settings(PARAMS, chat=False)["kv_dtype"] == "fp8"
    assert "kv_dtype" not in session.run_settings(PARAMS, chat=False)
    with refuses(UnsupportedError, "fp8-kv-rounded", field="--what-if", found="kv=fp8"):
        rounded(fp8.llm.pair, fp8.target, what_if)


def test_a_dump_in_fp8_is_replayed_with_the_steps_of_its_run(tmp_path: Path) -> None:
    common = ("--device", "cpu", "--kv-dtype", "fp8", "--num-prompts", "3", "--max-new-tokens", "24")
    dump = str(tmp_path / "dump")
    run = run_main("eval-acceptance", TINY, *common, "--json")
    run_main("dump", TINY, "--taps-from", TINY, *common, "--output", dump)
    told = run_main(
        "eval-acceptance", TINY, "--mode", "replay", "--dump", dump, "--head-from", TINY, *common[:4], "--json"
    )
    wanted, found = json.loads(run.out), json.loads(told.out)
    assert (
        wanted["settings"]["kv_dtype"] == found["settings"]["kv_dtype"] == found["settings"]["dump_kv_dtype"] == "fp8"
    )
    assert found["per_pos_accepted"] == wanted["per_pos_accepted"]
    assert found["num_drafts"] == wanted["num_drafts"]


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["tiny", *KINDS])
@pytest.mark.parametrize(
    "engine", [{"max_num_requests": 1}, {"max_num_requests": 4, "max_batched_tokens": 40}], ids=str
)
def test_a_gpu_writes_the_plain_text_in_fp8(engine: dict[str, Any], draft: str) -> None:
    """Captured steps in float32, and pieces: at most one near-tie of 8 texts may differ."""
    given = bundled_prompts()[:8]
    llm = gpu_llm(draft, "float32", kv_dtype="fp8", **engine)
    assert llm.pair.has_graphs
    found = llm.generate(given, PARAMS)
    plain = gpu_llm(None, "float32", kv_dtype="fp8", **engine).generate(given, PARAMS)
    on_cpu = random_llm(bundled_target_model(), None, 0, max_num_requests=1, kv_dtype="fp8").generate(given, PARAMS)
    for other in (plain, on_cpu):
        assert sum(a.token_ids == b.token_ids for a, b in zip(found, other, strict=True)) >= 7
    assert llm.engine.runner.target_kv.pages.dtype == FP8
    again = llm.generate(given, PARAMS)
    assert any(output.num_cached for output in again)
    assert sum(a.token_ids == b.token_ids for a, b in zip(found, again, strict=True)) >= 7


@pytest.mark.gpu
def test_a_gpu_accepts_as_many_drafts_in_bfloat16_with_fp8() -> None:
    """16 prompts of 64 tokens: the acceptance length of the CPU in float32, within 15%."""
    params, given = SamplingParams(max_new_tokens=64), bundled_prompts()[:16]

    def length(outputs: list[RequestOutput]) -> float:
        lengths = [item for output in outputs for item in output.acceptance_lengths]
        return sum(lengths) / len(lengths)

    found = length(gpu_llm("tiny", "bfloat16", max_num_requests=16, kv_dtype="fp8").generate(given, params))
    on_cpu = random_llm(bundled_target_model(), bundled_draft_model(), 7, max_num_requests=1, kv_dtype="fp8").generate(
        given, params
    )
    print(f"acceptance {found:.3f}, on the CPU {length(on_cpu):.3f}")
    assert abs(found - length(on_cpu)) < 0.15 * length(on_cpu)
