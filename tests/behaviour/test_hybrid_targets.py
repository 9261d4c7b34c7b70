"""Native targets with recurrent layers generate transformers' text, however many tokens of a block are rejected."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.device.storage import recurrent
from dflash_runtime.device.storage.recurrent import LATEST, STATES, BlockRecall
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.hosting.cache_state import TextState
from dflash_runtime.models.target_loading import find_target_runtime, load_target
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.any_models import make_any
from dflash_testing.compared_targets import LENGTHS, NUM_DRAFTS, NUM_TOKENS, PARAMS, ComparedTarget
from dflash_testing.handoffs import MemoryConnector, go_on, hand_off, keys_of
from dflash_testing.hosted_models import KnowingDraft, Known, make_model, plain_text
from dflash_testing.multimodal_models import WRAPPERS, make_wrapper
from dflash_testing.pairs import placement, random_llm, random_prompts
from dflash_testing.refusals import refuses

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {"mlp_only_layers": [1], "norm_topk_prob": False, "shared_expert_intermediate_size": 23},
}
"""Model type -> the keys of its config beyond those of `OWN_CACHE`."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.slow if "moe" in kind else ()) for kind in KINDS],
)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ComparedTarget:
    path, kind = tmp_path_factory.mktemp("hybrid"), request.param
    model = make_model(path, kind, initializer_range=0.15, **KINDS[kind])
    return ComparedTarget(model, load_target(open_target(path), placement()))


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_a_draft_that_is_right_for_some_tokens(hybrid: ComparedTarget, num_right: int) -> None:
    (prompt,) = hybrid.prompts(17)
    (text,) = hybrid.texts([prompt], NUM_TOKENS + NUM_DRAFTS + 1)
    llm = random_llm(hybrid.target, hybrid.draft([Known([*prompt, *text], num_right)]), NUM_DRAFTS)
    (output,) = llm.generate([prompt], PARAMS)
    assert list(output.token_ids) == text[:NUM_TOKENS]
    assert set(output.acceptance_lengths) == {num_right + 1}


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_many_prompts_at_once(hybrid: ComparedTarget, scheduling: str) -> None:
    """Four requests at once, in chunks of at most 24 rows, beside blocks that are rejected at several positions."""
    given = hybrid.prompts(*LENGTHS)
    texts = hybrid.texts(given)
    known = [Known([*prompt, *text], index) for index, (prompt, text) in enumerate(zip(given, texts, strict=True))]
    llm = random_llm(
        hybrid.target, hybrid.draft(known), NUM_DRAFTS,
        scheduling=scheduling, max_num_requests=4, max_batched_tokens=24,
    )  # fmt: skip
    assert [list(output.token_ids) for output in llm.generate(given, PARAMS)] == texts


class SureDraft(KnowingDraft):
    """Gives its tokens a probability of 0.8, so that trees are deep."""

    def logits(self, *arguments: Any) -> torch.Tensor:
        return 6 * super().logits(*arguments)


def test_trees_give_the_text(hybrid: ComparedTarget) -> None:
    """Three requests at once, in chunks of at most 24 rows, beside trees that are rejected at several positions."""
    given = hybrid.prompts(2, 17, 33)
    texts = hybrid.texts(given)
    known = [Known([*prompt, *text], 2 * index) for index, (prompt, text) in enumerate(zip(given, texts, strict=True))]
    llm = random_llm(
        hybrid.target,
        SureDraft(hybrid.draft(), known),
        NUM_DRAFTS,
        num_tree_nodes=12,
        max_num_requests=3,
        max_batched_tokens=24,
    )
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == texts
    assert max(length for output in outputs for length in output.acceptance_lengths) > 3


def test_sampled_text_is_that_of_plain_decoding(hybrid: ComparedTarget) -> None:
    given = hybrid.prompts(3, 17, 40)
    params = [replace(PARAMS, temperature=0.8, seed=seed) for seed in (1, 2, 3)]
    plain = [output.token_ids for output in random_llm(hybrid.target, None, 0).generate(given, params)]
    known = [Known([*prompt, *text], 3) for prompt, text in zip(given, plain, strict=True)]
    outputs = random_llm(hybrid.target, hybrid.draft(known), NUM_DRAFTS).generate(given, params)
    assert [output.token_ids for output in outputs] == plain


@pytest.mark.parametrize(("given", "used"), [("auto", "exact"), ("exact", "exact"), ("at-once", "at-once")])
def test_users_choose_how_blocks_run(hybrid: ComparedTarget, given: str, used: str) -> None:
    (prompt,) = hybrid.prompts(17)
    llm = random_llm(hybrid.target, hybrid.draft(), NUM_DRAFTS, recurrent_rows=given)
    states = llm.engine.runner.states
    assert states is not None
    called = set()

    def watched(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            called.add(name)
            return rule(*arguments)

        return run

    kernels = states.kernels
    states.kernels = replace(
        kernels,
        delta_rule=watched("exact", kernels.delta_rule),
        delta_blocks=watched("at-once", kernels.delta_blocks),
    )
    (output,) = llm.generate([prompt], PARAMS)
    assert list(output.token_ids) == hybrid.texts([prompt])[0]
    assert called == {used}
    assert llm.pair.recurrent_rows == used


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", ["exact", "at-once"])
def test_triton_kernels_give_the_text(hybrid: ComparedTarget, rows: str) -> None:
    (prompt,) = hybrid.prompts(5)
    (text,) = hybrid.texts([prompt])
    draft = hybrid.draft([Known([*prompt, *text], 2)])
    llm = random_llm(hybrid.target, draft, 3, kernels="triton", recurrent_rows=rows)
    (output,) = llm.generate([prompt], replace(PARAMS, max_new_tokens=9))
    assert list(output.token_ids) == text[:9]
    assert set(output.acceptance_lengths) == {3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_the_decay_are_rounded_as_by_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    """Published checkpoints store A_log in float32. In a run in bfloat16 transformers rounds it, and so do we."""
    from transformers import AutoModelForCausalLM

    make_model(tmp_path, "qwen3_5_text", initializer_range=0.15)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    target: Any = load_target(open_target(tmp_path), placement(dtype))
    for ours, theirs in zip(target._decoder.layers[:3], loaded.model.layers[:3], strict=True):
        assert ours.mixer.log_rate.dtype == ours.mixer.bias.dtype == torch.float32
        assert torch.equal(ours.mixer.log_rate, theirs.linear_attn.A_log.float())
        assert torch.equal(ours.mixer.bias, theirs.linear_attn.dt_bias.float())
        assert torch.equal(ours.mixer.norm, theirs.linear_attn.norm.weight)


@pytest.mark.parametrize("scheduling", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_text_goes_on_in_another_engine(hybrid: ComparedTarget, scheduling: str) -> None:
    hybrid.check_handed_requests(scheduling)


@pytest.mark.parametrize(
    ("name", "change"), [(STATES, None), (LATEST, lambda item: item[1:]), (STATES, torch.Tensor.double)]
)
def test_a_state_of_another_target_is_refused(
    hybrid: ComparedTarget, name: str, change: Callable[..., Any] | None
) -> None:
    (prompt,) = hybrid.prompts(17)
    connector = hand_off(random_llm(hybrid.target, hybrid.draft(), NUM_DRAFTS), [prompt], PARAMS)
    tensors = dict(connector.saved["00000"].tensors)
    part = tensors.pop(name)
    changed = tensors if change is None else {**tensors, name: change(part)}
    connector.saved["00000"] = connector.saved["00000"].with_tensors(changed)
    (output,) = go_on(random_llm(hybrid.target, hybrid.draft(), NUM_DRAFTS), [prompt], PARAMS, connector)
    assert output.exit_code == 3
    assert name in str(output.error)


def test_a_state_that_cannot_be_copied_ends_its_request(
    hybrid: ComparedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has its only token already, so no later step would find that its hand-off was never sent."""
    given = hybrid.prompts(5, 17)
    sender = random_llm(hybrid.target, hybrid.draft(), NUM_DRAFTS)
    take = sender.engine.runner.take_state

    def failing(request: Request) -> TextState:
        if request.prompt_len == 5:
            raise torch.OutOfMemoryError("out of memory")
        return take(request)

    monkeypatch.setattr(sender.engine.runner, "take_state", failing)
    connector = MemoryConnector()
    outputs = sender.generate(
        given, PARAMS, handoffs=HandoffPlan(connector=connector, keys=keys_of(given), is_sending=True)
    )
    assert [(output.error_id, output.exit_code) for output in outputs] == [("state-not-copied", 6), (None, 0)]
    assert set(connector.saved) == {"00001"}


@pytest.mark.parametrize("scheduling", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_preempted_requests_begin_again(hybrid: ComparedTarget, scheduling: str) -> None:
    hybrid.check_preempted_requests(scheduling)


def test_a_prompt_that_is_asked_again(hybrid: ComparedTarget) -> None:
    """The second answer continues from the snapshot of the prompt's last full page."""
    hybrid.check_repeated_prompt()


def test_the_last_positions_of_the_model(hybrid: ComparedTarget) -> None:
    (prompt,) = hybrid.prompts(hybrid.target.config.max_position_embeddings - 12)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    (output,) = random_llm(hybrid.target, hybrid.draft(), NUM_DRAFTS).generate([prompt], params)
    assert list(output.token_ids) == plain_text(hybrid.model, prompt, 12)


def test_texts_are_lossless_by_one_forward(hybrid: ComparedTarget) -> None:
    llm = random_llm(hybrid.target, hybrid.draft(), NUM_DRAFTS)
    assert llm.check_lossless(llm.generate(hybrid.prompts(*LENGTHS), PARAMS)).is_lossless


def test_outputs_of_every_layer_equal_transformers(hybrid: ComparedTarget) -> None:
    hybrid.check_layer_outputs()


@pytest.mark.parametrize("engine", [{"scheduling": "sync"}, {"scheduling": "async", "max_batched_tokens": 9}], ids=str)
def test_steps_equal_a_loop_over_transformers(hybrid: ComparedTarget, engine: dict[str, Any]) -> None:
    hybrid.check_steps(engine)


def test_a_target_without_recurrent_layers(tmp_path: Path) -> None:
    """It keeps no states, so its pages can be shared and its hand-offs are those of a dense target."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    model = make_model(tmp_path, "qwen3_5_text", initializer_range=0.15, **kinds)
    found = ComparedTarget(model, load_target(open_target(tmp_path), placement()))
    assert found.target.config.recurrence is None
    given = found.prompts(5, 40)
    sender, receiver = (random_llm(found.target, found.draft(), NUM_DRAFTS) for _ in range(2))
    outputs = go_on(receiver, given, PARAMS, hand_off(sender, given, PARAMS))
    assert [list(output.token_ids) for output in outputs] == found.texts(given)


def test_a_target_without_attention_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    with refuses(UnsupportedError, "target-not-run", field="model_type", found="qwen3_5_text"):
        find_target_runtime(open_target(tmp_path), "native")


class TestPoisoned:
    """The texts above show faults: without its state, or with rejected tokens in it, a text differs."""

    def said(self, hybrid: ComparedTarget) -> tuple[list[int], list[int]]:
        (prompt,) = hybrid.prompts(17)
        (text,) = hybrid.texts([prompt], NUM_TOKENS)
        draft = hybrid.draft([Known([*prompt, *text], 2)])
        (output,) = random_llm(hybrid.target, draft, NUM_DRAFTS).generate([prompt], PARAMS)
        return list(output.token_ids), text

    def test_accepted_rows_that_are_not_replayed(self, hybrid: ComparedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        made = BlockRecall.of

        def forgetful(*given: Any) -> BlockRecall:
            found = made(*given)
            return replace(found, texts=found.texts._replace(state_lens=found.texts.lens))

        monkeypatch.setattr(recurrent.BlockRecall, "of", forgetful)
        said, wanted = self.said(hybrid)
        assert said != wanted

    def test_rejected_rows_that_are_replayed(self, hybrid: ComparedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        made = BlockRecall.of

        def greedy(*given: Any) -> BlockRecall:
            found = made(*given)
            late = (found.texts.lens - found.texts.state_lens) > 0
            return replace(found, texts=found.texts._replace(lens=found.texts.lens + late))

        monkeypatch.setattr(recurrent.BlockRecall, "of", greedy)
        said, wanted = self.said(hybrid)
        assert said != wanted


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "minicpmv4_6"])
def test_the_text_part_of_a_multimodal_model_is_native(kind: str, tmp_path: Path) -> None:
    """Parts for images may have any name, such as the merger of minicpmv4_6."""
    make = make_wrapper if kind in WRAPPERS else make_any
    make(tmp_path, kind)
    source = open_target(tmp_path)
    runtime, config = find_target_runtime(source, "auto")
    assert runtime == "native"
    assert config.nested_in == "text_config"
    text = random_prompts((20,), config.vocab_size)[0]
    native, hosted = (
        read_features(load_target(source, placement(), kind), placement(), 16, text, [0, 1, 2])
        for kind in ("native", "transformers-cache")
    )
    torch.testing.assert_close(native, hosted, rtol=1e-3, atol=1e-3)
