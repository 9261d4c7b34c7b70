"""Targets with their own cache: the trial that finds how they run, the size of the cache, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.terminal import documentation
from dflash_runtime.checkpoint.targets import runs_here
from dflash_runtime.device.setup.loading import hosted_warnings, load_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import TensorMismatch, UnsupportedError
from dflash_runtime.models.hosting import own_cache, own_cache_trial
from dflash_runtime.models.hosting.own_cache import LEAST_PADDING, Member, OwnCacheTarget, TextCache
from dflash_runtime.models.target_loading import find_target_runtime, load_target
from dflash_runtime.target_config import OwnCache
from dflash_testing import checkpoints as support
from dflash_testing.hosted_models import BODY, OWN_CACHE, OWN_CACHE_DEFAULT, host_own_cache, make_model
from dflash_testing.pairs import placement
from dflash_testing.refusals import refuses

KINDS = [kind if kind in OWN_CACHE_DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in OWN_CACHE]

ONE_BY_ONE = ("falcon_mamba", "jamba", "mamba")
WITHOUT_EMBEDDING = ("falcon_mamba", "mamba", "mamba2", "rwkv")
"""Families in which transformers' first hidden state is the output of the first layer, not the embedding."""

UNBATCHED = ("deepseek_v4",)
"""Families with a cache of compressed tokens, which texts of different lengths cannot share."""

CROPPED = ("deepseek_v2", "deepseek_v3", "diffllama", "glm4_moe_lite", "longcat_flash", "mistral4")

COUNTS = ("target-cache-counts", "layers.0.cumulative_length")
ON_HOST = ("target-reads-on-host", "_local_scalar_dense")
UNCAPTURED = {
    "deepseek_v4": ("target-not-padded", None), "gemma2": COUNTS, "gemma4_text": COUNTS, "gpt_oss": COUNTS,
    "inkling_text": COUNTS, "inkling2_text": COUNTS, "lfm3": ON_HOST, "llama4_text": COUNTS, "longcat_flash": ON_HOST,
    "mimo_v2_flash": COUNTS,
}  # fmt: skip
"""Families with forwards that are not captured, and id and field of the reason."""


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_hidden_states(kind: str, tmp_path: Path) -> None:
    """Taps have the requested order, and the last layer's is before the final norm, in a text and in later blocks."""
    model, target = make_model(tmp_path, kind), host_own_cache(tmp_path)
    last: list[Tensor] = []
    decoder = own_cache._find_decoder(model)
    layers = next(item for item in decoder.children() if isinstance(item, nn.ModuleList) and len(item) == 4)
    ids = torch.randint(0, BODY["vocab_size"], (23,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hook = layers[3].register_forward_hook(
            lambda module, given, out: last.append(out if isinstance(out, Tensor) else out[0])
        )
        wanted = model(ids[None], output_hidden_states=True, use_cache=False)
        hook.remove()
        hidden, features = target(ids, torch.arange(23), lambda *_: ids, (3, 0, 2))  # type: ignore[arg-type]
        text = TextCache()
        parts = [target.fill(text, ids[None, :9], (3, 0, 2))]
        for begin, end in ((9, 17), (17, 23)):
            text = target.join([Member(text, 0, begin)])
            parts.append(target.verify(text, ids[None, begin:end], (3, 0, 2)))
        logits = target.head(hidden)
    first = 0 if kind in WITHOUT_EMBEDDING else 1
    stated = (last[0][0], wanted.hidden_states[first][0], wanted.hidden_states[first + 2][0])
    streams = [item if item.dim() == 2 else item.sum(1) / item.shape[1] for item in stated]  # a draft reads the mean
    states = torch.cat(streams, dim=-1)
    assert features is not None
    torch.testing.assert_close(features, states, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        torch.cat([part[1][0] for part in parts if part[1] is not None]), states, rtol=1e-3, atol=2e-3
    )
    logits = logits[:, : wanted.logits.shape[2]]  # the model's own logits leave out padding rows
    torch.testing.assert_close(logits, wanted.logits[0], rtol=1e-4, atol=1e-4 * float(wanted.logits.abs().max()))
    assert not any(module._forward_hooks for module in target._layers)


class TestTrial:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_trial_finds_how_a_family_runs(self, kind: str, tmp_path: Path) -> None:
        make_model(tmp_path, kind)
        target = host_own_cache(tmp_path)
        assert target.reads_at_once == (kind not in ONE_BY_ONE)
        assert target.can_crop == (kind in CROPPED)
        assert target.makes_masks == (kind == "minimax")
        is_shared = kind not in UNBATCHED
        assert target.batching[:2] == (is_shared, is_shared)
        assert (target.batching.problem is None) == is_shared
        reason = UNCAPTURED.get(kind)
        assert (target.uncaptured is None) == (reason is None)
        slow, *others = hosted_warnings(target, can_be_captured=True)
        assert slow.id == "slow-target"
        assert [(item.id, item.field) for item in others] == ([] if reason is None else [reason])

    @pytest.mark.parametrize(
        ("kind", "is_mixed"),
        [
            pytest.param(kind, is_mixed, marks=pytest.mark.slow if is_mixed and kind != OWN_CACHE_DEFAULT[0] else ())
            for kind in OWN_CACHE_DEFAULT
            for is_mixed in (False, True)
        ],
    )
    def test_rows_that_differ_from_texts_alone_share_no_cache(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_mixed: bool
    ) -> None:
        """The model ignores padding, or mixes the rows of a batch."""
        make_model(tmp_path, kind)
        forward = OwnCacheTarget._run_decoder

        def wrong(self: Any, token_ids: Tensor, taps: Any, **given: Any) -> Any:
            if not is_mixed:
                given.pop("attention_mask", None)
                return forward(self, token_ids, taps, **given)
            hidden, features, output = forward(self, token_ids, taps, **given)
            return hidden.roll(1, 0), features, output

        monkeypatch.setattr(OwnCacheTarget, "_run_decoder", wrong)
        target = host_own_cache(tmp_path)
        has_padding = bool(target.layout.grown)
        # A target that reads token by token or is cropped commits other numbers of tokens in each row at once.
        shares = not is_mixed and (not has_padding or (target.reads_at_once and not target.can_crop))
        assert target.batching.same_length == shares
        assert target.batching.any_length == (shares and not has_padding)
        assert (target.batching.problem is None) == target.batching.any_length

    def test_a_cache_that_is_wrong_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The model takes every cache for one token shorter than it is."""
        make_model(tmp_path, "deepseek_v3")
        forward = OwnCacheTarget._forward

        def behind(self: Any, token_ids: Tensor, lens: Any, taps: Any, **settings: Any) -> Any:
            return forward(self, token_ids, [max(0, length - 1) for length in lens], taps, **settings)

        monkeypatch.setattr(OwnCacheTarget, "_forward", behind)
        with refuses(UnsupportedError, "target-cache-differs", found="deepseek_v3"):
            host_own_cache(tmp_path)

    def test_a_state_outside_the_cache_is_refused(self, tmp_path: Path) -> None:
        make_model(tmp_path, "recurrent_gemma", lru_width=32, attention_window_size=8)
        with refuses(UnsupportedError, "target-cache-differs", found="recurrent_gemma"):
            host_own_cache(tmp_path)

    def test_code_that_fails_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model(tmp_path, "deepseek_v3")
        monkeypatch.setattr(own_cache_trial, "_measure", lambda *_: 1 // 0)
        with refuses(UnsupportedError, "target-code-fails", found="deepseek_v3") as caught:
            host_own_cache(tmp_path)
        assert "ZeroDivisionError" in caught.value.message

    def test_many_accepted_tokens_go_into_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Up to MOST_PENDING accepted tokens are read again with each block instead."""
        monkeypatch.setattr(own_cache, "MOST_PENDING", 3)
        make_model(tmp_path, OWN_CACHE_DEFAULT[0])
        target = host_own_cache(tmp_path)
        ids = torch.randint(0, BODY["vocab_size"], (40,), generator=torch.Generator().manual_seed(1))
        text, lens = TextCache(), list[int]()
        with torch.inference_mode():
            target.fill(text, ids[None, :5], ())
            for start in (5, 7, 9, 11):
                text = target.join([Member(text, 0, start)])
                target.verify(text, torch.cat((ids[start : start + 2], ids[:3]))[None], ())
                lens += text.lens
            hidden, _ = target.verify(target.join([Member(text, 0, 13)]), ids[None, 13:], ())
            wanted, _ = target(ids, torch.arange(40), lambda *_: ids, ())  # type: ignore[arg-type]
        assert lens == [5, 5, 9, 9]
        torch.testing.assert_close(hidden[0], wanted[13:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", OWN_CACHE_DEFAULT)
def test_a_long_text_is_read_in_pieces(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, kind)
    target = host_own_cache(tmp_path)
    monkeypatch.setattr(own_cache, "SCORE_BYTES", 1)
    monkeypatch.setattr(own_cache, "LEAST_ROWS", 4)
    ids = torch.randint(0, BODY["vocab_size"], (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden, features = target.fill(TextCache(), ids[None], (1,))
        wanted, tapped = target(ids, torch.arange(40), lambda *_: ids, (1,))  # type: ignore[arg-type]
    assert features is not None
    torch.testing.assert_close(hidden[0], wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(features[0], tapped, rtol=1e-3, atol=1e-3)


def test_a_head_that_divides_and_has_rows_of_padding(tmp_path: Path) -> None:
    """90 of the 97 rows are ids. The logits of the other rows are finite, and too small to be chosen."""
    model, target = make_model(tmp_path, "inkling_text"), host_own_cache(tmp_path)
    hidden = torch.randn(3, 32)
    logits = target.head(hidden)
    torch.testing.assert_close(logits[:, :90], model.lm_head(hidden / 3.0)[:, :90].detach())
    assert logits[:, 90:].unique().tolist() == [-1e4]


def test_a_text_model_in_the_list_of_multimodal_models(tmp_path: Path) -> None:
    """transformers lists Mistral 4 only there."""
    make_model(tmp_path, "mistral4")
    assert host_own_cache(tmp_path).can_crop


class TestSizes:
    def test_latent_attention_caches_one_vector_for_all_heads(self, tmp_path: Path) -> None:
        """Each of 4 layers caches a vector of 16 numbers and a rotated key of 8 numbers."""
        make_model(tmp_path, "deepseek_v3")
        token = 4 * (16 + 8) * 4
        padded = token + token // 4  # two copies, each with a quarter of padding
        assert host_own_cache(tmp_path).config.own_cache == OwnCache(2 * padded, 2 * LEAST_PADDING * token)
        captured = replace(placement(), has_graphs=True)  # two more copies, with the padding of graphs too
        padded_twice, most = padded + padded // 4, 2 * LEAST_PADDING + 4 * LEAST_PADDING
        found = load_target(open_target(tmp_path), captured, "transformers-cache").config.own_cache
        assert found == OwnCache(2 * padded + 2 * padded_twice, most * token)

    def test_a_text_takes_memory_for_its_tokens_and_for_its_states(self, tmp_path: Path) -> None:
        """Both copies of a text's cache hold every token and every state."""
        make_model(tmp_path, OWN_CACHE_DEFAULT[0])
        sizes = host_own_cache(tmp_path).config.own_cache
        assert sizes is not None
        token = 2 * 2 * 8 * 4  # keys and values, heads of 8 in one layer
        assert sizes.token_bytes == 2 * (token + token // 4)  # two copies, each with a quarter of padding
        states = 3 * 4 * 8 * 8 * 4  # at least the states of three layers
        assert sizes.text_bytes > 2 * (states + LEAST_PADDING * token)


class TestChoice:
    @pytest.mark.parametrize("kind", ["olmo_hybrid", "lfm2", "nemotron_h", "deepseek_v32"])
    def test_auto_chooses_the_own_cache_if_pages_cannot_serve_the_target(self, kind: str, tmp_path: Path) -> None:
        make_model(tmp_path, kind)
        assert isinstance(load_target(open_target(tmp_path), placement(), "auto"), OwnCacheTarget)

    def test_the_trial_over_pages_may_choose_the_own_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a release of transformers without recorded trials, a target is loaded twice."""
        monkeypatch.setattr(runs_here, "recorded_trials", dict)
        make_model(tmp_path, "diffllama")
        source = open_target(tmp_path)
        assert find_target_runtime(source, "auto")[0] == "transformers"
        pair = load_pair(source, None, EngineConfig(device="cpu", max_model_len=64))
        assert pair.target_runtime == "transformers-cache"

    def test_a_warning_says_that_it_is_slow(self, tmp_path: Path) -> None:
        make_model(tmp_path, "lfm2")
        pair = load_pair(open_target(tmp_path), None, EngineConfig(device="cpu", max_model_len=64))
        assert pair.target_runtime == "transformers-cache"
        assert not pair.has_graphs
        assert not pair.config.prefix_cache
        (warning,) = pair.warnings
        assert "lfm2" in warning

    def test_the_own_cache_can_be_chosen(self, tmp_path: Path) -> None:
        source = open_target(support.make_target(tmp_path))
        assert find_target_runtime(source, "transformers-cache")[0] == "transformers-cache"


class TestRefused:
    def test_attention_to_later_tokens(self, tmp_path: Path) -> None:
        make_model(tmp_path, "gemma3_text", use_bidirectional_attention=True)
        with refuses(UnsupportedError, "target-not-run", found="gemma3_text") as caught:
            find_target_runtime(open_target(tmp_path), "auto")
        assert "use_bidirectional_attention" in caught.value.message

    def test_quantised_weights_without_scales(self, tmp_path: Path) -> None:
        make_model(tmp_path, "lfm2", quantization_config={"quant_method": "fp8"})
        with refuses(UnsupportedError, field="quant_method", found="fp8"):
            host_own_cache(tmp_path)

    def test_tensors_of_another_shape(self, tmp_path: Path) -> None:
        make_model(tmp_path / "other", "deepseek_v3", kv_lora_rank=24)
        make_model(tmp_path / "one", "deepseek_v3")
        (tmp_path / "other" / "model.safetensors").rename(tmp_path / "one" / "model.safetensors")
        with pytest.raises(TensorMismatch):
            host_own_cache(tmp_path / "one")


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 256),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
                    "original_max_position_embeddings": 64,
                },
            },
            64,
        ),
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_a_rope_that_changes_with_the_length_limits_the_text(
    changes: dict[str, Any], length: int, tmp_path: Path
) -> None:
    make_model(tmp_path, "llama", **changes)
    found, config = find_target_runtime(open_target(tmp_path), "transformers")
    assert (found, config.max_position_embeddings) == ("transformers-cache", length)


def test_a_target_without_heads_or_positions(tmp_path: Path) -> None:
    make_model(tmp_path, "mamba")
    config = find_target_runtime(open_target(tmp_path), "auto")[1]
    assert (config.num_heads, config.windows) == (4, (None,) * 4)


def test_the_document_names_every_family_that_was_tried() -> None:
    text = documentation.text("hosted-targets")
    assert not [kind for kind in OWN_CACHE if f"`{kind}`" not in text]
