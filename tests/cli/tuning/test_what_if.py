"""What-ifs: the named parts of a pair are rounded, and no other parts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_cli.checkpoints.references import TINY
from dflash_cli.generation.loaded_pair import PairSession, open_session
from dflash_cli.tuning import tuner
from dflash_cli.tuning.rounded_pairs import changes_nothing, rounded
from dflash_cli.tuning.roundings import to_fp8
from dflash_cli.tuning.what_if import FORMATS, WhatIf, parse_what_ifs
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.models.target import target_families
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.command_line import run_main
from dflash_testing.pairs import bundled_prompts
from dflash_testing.refusals import refuses

PARAMS = SamplingParams(max_new_tokens=24)


@pytest.fixture(scope="module")
def session() -> PairSession:
    return open_session(TINY, None, EngineConfig(device="cpu", num_pages=60))


def pair_of(session: PairSession, text: str) -> LoadedPair:
    (what_if,) = parse_what_ifs(text)
    return rounded(session.llm.pair, session.target, what_if)


def answers(pair: LoadedPair) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(pair)
    return llm.generate(bundled_prompts()[:2], PARAMS), llm


def test_parts_and_formats_are_parsed() -> None:
    first, second = parse_what_ifs("draft=fp8, kv=fp8+target=int4")
    assert first == WhatIf((("draft", "fp8"),))
    assert (second.name, second.file_name) == ("kv=fp8+target=int4", "what-if-kv-fp8-target-int4")
    assert len(parse_what_ifs("all")) == sum(map(len, FORMATS.values()))
    for text in ("draft", "draft=fp9", "head=fp8", "", "kv=int4"):
        with refuses(UsageError, "unknown-what-if", field="--what-if", found=text):
            parse_what_ifs(text)


def test_a_part_has_one_format_and_each_what_if_is_measured_once() -> None:
    for text in ("draft=fp8+draft=int4", "kv=fp8,draft=fp8+kv=fp8+draft=fp8"):
        with refuses(UsageError, "part-twice", field="--what-if", found=text.rpartition(",")[2]):
            parse_what_ifs(text)
    found = parse_what_ifs("draft=fp8,draft=fp8+kv=fp8,draft=fp8,kv=fp8+draft=fp8")
    assert [item.name for item in found] == ["draft=fp8", "draft=fp8+kv=fp8"]


def test_a_rounded_draft_changes_acceptance_and_no_text(session: PairSession) -> None:
    before, _ = answers(session.llm.pair)
    after, _ = answers(pair_of(session, "draft=int4"))
    assert [item.token_ids for item in after] == [item.token_ids for item in before]
    assert [item.drafts for item in after] != [item.drafts for item in before]


def test_a_rounded_target_gives_another_text(session: PairSession) -> None:
    """Its text differs from the original target's, and equals its own text without a draft."""
    before, _ = answers(session.llm.pair)
    pair = pair_of(session, "target=int4")
    after, _ = answers(pair)
    alone, _ = answers(pair.without_draft())
    assert [item.token_ids for item in after] == [item.token_ids for item in alone]
    assert [item.token_ids for item in after] != [item.token_ids for item in before]
    assert torch.equal(pair.target.embedding, session.llm.pair.target.embedding)


def test_a_rounded_target_has_the_config_that_its_family_reads(
    session: PairSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(session.target.config, max_position_embeddings=99)
    family = target_families()[session.target.config.model_type]
    monkeypatch.setattr(family, "read_config", lambda config, path: own, raising=False)
    assert pair_of(session, "target=int8").target.config == own


def kept_rows(llm: LLM) -> list[Tensor]:
    """Keys and values of target and draft, without page 0: nothing reads it."""
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    return [item[:, 1:] for cache in (runner.target_kv, runner.draft_kv) for item in (cache.keys, cache.values)]


def test_keys_and_values_are_kept_in_the_format(session: PairSession) -> None:
    """Both models store rounded keys and values in prefill and decode. Without a what-if they are not rounded."""
    outputs, llm = answers(pair_of(session, "kv=fp8"))
    _, plain = answers(session.llm.pair)
    for rows, others in zip(kept_rows(llm), kept_rows(plain), strict=True):
        assert torch.equal(to_fp8(rows), rows)
        assert not torch.equal(to_fp8(others), others)
        assert 0.8 < int(rows.count_nonzero()) / int(others.count_nonzero()) < 1.2
    alone, _ = answers(pair_of(session, "kv=fp8").without_draft())
    assert [item.token_ids for item in outputs] == [item.token_ids for item in alone]


def test_settings_name_the_rounding(session: PairSession) -> None:
    """Therefore --resume cannot mix answers of different pairs."""
    own = replace(session, llm=LLM(pair_of(session, "kv=fp8+draft=int8")))
    assert own.run_settings(PARAMS, chat=False)["rounding"] == "kv=fp8+draft=int8"
    assert "rounding" not in session.run_settings(PARAMS, chat=False)


def test_rounding_to_bfloat16_changes_nothing_in_a_bfloat16_run(session: PairSession) -> None:
    (what_if,) = parse_what_ifs("draft=bf16")
    pair = session.llm.pair
    assert not changes_nothing(what_if, pair)
    half = replace(pair, placement=replace(pair.placement, dtype=torch.bfloat16))
    assert changes_nothing(what_if, half)
    assert not changes_nothing(WhatIf((("draft", "bf16"), ("kv", "fp8"))), half)


def test_a_hosted_target_is_not_rounded(session: PairSession) -> None:
    hosted = replace(session.llm.pair, target_runtime="transformers")
    for text in ("target=fp8", "kv=fp8"):
        with refuses(UnsupportedError, "hosted-target-rounded", field="--what-if"):
            rounded(hosted, session.target, parse_what_ifs(text)[0])
    assert rounded(hosted, session.target, parse_what_ifs("draft=fp8")[0]).rounding == "draft=fp8"


def test_a_quantised_target_is_not_rounded_again(session: PairSession) -> None:
    packed = replace(session.llm.pair, target_quantization="fp8")
    with refuses(UnsupportedError, "quantised-target-rounded", field="--what-if"):
        rounded(packed, session.target, parse_what_ifs("target=int8")[0])
    assert rounded(packed, session.target, parse_what_ifs("draft=fp8")[0]).rounding == "draft=fp8"


def test_it_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_measure", lambda *_: pytest.fail("measured first"))
    hosted = ("--target-runtime", "transformers", "--device", "cpu", "--what-if", "draft=fp8,kv=fp8")
    done = run_main("tune", TINY, *hosted)
    assert done.error is not None
    assert (done.code, done.error.id, done.error.found) == (5, "hosted-target-rounded", "kv=fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_keep_the_format_too(dtype: str) -> None:
    own = open_session(TINY, None, EngineConfig(device="cuda", dtype=dtype, num_pages=60))
    pair = pair_of(own, "kv=fp8")
    assert pair.has_graphs
    _, llm = answers(pair)
    for rows in kept_rows(llm):
        assert torch.equal(to_fp8(rows), rows)
        assert rows.count_nonzero() > 1000
