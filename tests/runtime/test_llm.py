"""The offline API: how a pair is given, and how few calls it is to the model."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import dflash_runtime
from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.config import EngineConfig
from dflash_runtime.device import loading
from dflash_runtime.device.loading import load_pair
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.pairs import bundled_draft, bundled_prompts, random_draft, random_llm, random_target

CONFIG = EngineConfig(device="cpu", max_model_len=256, num_pages=60)
PARAMS = SamplingParams(max_new_tokens=20)
HOUSE = Path(dflash_runtime.__file__).parent


class Watched:
    """A target that notes by which functions of the runtime each of its forwards was reached, innermost first."""

    def __init__(self, target: Target) -> None:
        self.config, self.embedding, self.head = target.config, target.embedding, target.head
        self.chains: list[list[str]] = []
        self._target = target

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        callers = [frame.function for frame in inspect.stack()[1:] if HOUSE in Path(frame.filename).parents]
        self.chains.append(callers)
        return self._target(token_ids, positions, attend, taps)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_from_generate_to_the_targets_forward_it_is_six_calls(scheduling: str) -> None:
    """The chain that the docstring of `llm.py` states."""
    target = random_target()
    watched = Watched(target)
    random_llm(watched, random_draft(target), 3, scheduling=scheduling).generate([[1, 2, 3]], PARAMS)
    ways = {tuple(chain[::-1]) for chain in watched.chains}
    assert ways == {("generate", "stream", "run", "step", "submit", way) for way in ("_prefill", "_decode")}
    assert all(len(chain) <= 6 for chain in watched.chains)


def test_a_pair_is_given_as_it_was_opened() -> None:
    target = open_target(tiny_directory() / "target")
    with LLM(target, bundled_draft(), CONFIG) as llm:
        found = llm.generate(bundled_prompts()[:2], PARAMS)
    again = LLM(load_pair(target, bundled_draft().source, CONFIG)).generate(bundled_prompts()[:2], PARAMS)
    assert [output.drafts for output in found] == [output.drafts for output in again]
    assert sum(map(sum, (output.acceptance_lengths for output in found))) > 20


def test_several_llms_run_on_one_loaded_pair() -> None:
    pair = load_pair(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    first, second = LLM(pair), LLM(pair.without_draft())
    prompts = bundled_prompts()[:2]
    assert (first.num_draft_tokens, second.num_draft_tokens) == (7, 0)
    texts = [[output.token_ids for output in llm.generate(prompts, PARAMS)] for llm in (first, second, first)]
    assert texts[0] == texts[1] == texts[2]


def test_a_drafts_weights_are_read_by_another_config_without_loading_them_again() -> None:
    pair = load_pair(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    assert pair.draft is not None
    config = pair.draft.config
    other = pair.with_draft(replace(config, causal=(True,) * config.num_layers))
    assert other.draft_weights is pair.draft_weights
    assert other.target is pair.target
    prompts = bundled_prompts()[:4]
    steps = [sum(len(output.drafts) for output in LLM(item).generate(prompts, PARAMS)) for item in (pair, other)]
    same = LLM(pair.with_draft(config)).generate(prompts, PARAMS)
    assert steps[1] != steps[0] == sum(len(output.drafts) for output in same)


def test_packed_weights_are_refused_however_they_are_given(tmp_path: Path) -> None:
    draft = open_draft(support.make_native(tmp_path / "draft", quantization_config={"quant_method": "fp8"}))
    target = open_target(support.make_target(tmp_path / "target"))
    with pytest.raises(UnsupportedError, match=r"quantised weights \(quantization_config\)"):
        LLM(target, draft, EngineConfig(device="cpu"))
    with pytest.raises(UnsupportedError, match=r"quantised weights \(quantization_config\)"):
        _ = draft.source


def test_an_unknown_family_is_refused_by_name() -> None:
    source = bundled_draft().source
    unknown = replace(source, config=replace(source.config, family="dflsh"))
    with pytest.raises(UnsupportedError, match="unknown draft family 'dflsh'; did you mean 'dflash'"):
        load_pair(open_target(tiny_directory() / "target"), unknown, CONFIG)


def test_what_is_wrong_with_a_draft_is_said_before_a_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = support.make_native(tmp_path / "draft")
    (draft / "mask_embedding.safetensors").write_bytes(b"never read")
    target = open_target(support.make_target(tmp_path / "target"))
    monkeypatch.setattr(loading, "load_target", pytest.fail)
    with pytest.raises(UnsupportedError, match="mask embedding"):
        LLM(target, open_draft(draft), EngineConfig(device="cpu"))


def test_what_a_pair_keeps_for_other_configs_takes_no_memory_of_its_own() -> None:
    pair = load_pair(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    assert isinstance(pair.draft, DFlashDraft)
    assert pair.draft_weights is not None
    layer = pair.draft._decoder.layers[0]
    assert layer.attention.qkv.weight is pair.draft_weights["layers.0.self_attn.qkv_proj.weight"]
    assert layer.mlp.gate_up.weight is pair.draft_weights["layers.0.mlp.gate_up_proj.weight"]
