"""A rank's share of a target: sizes, parts of tensors, and refusals."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.split_ends import SplitEmbedding
from dflash_runtime.models.target import target_families
from dflash_runtime.models.target_loading import family_cuts
from dflash_runtime.models.target_shares import Cut, cut_info, share_config
from dflash_runtime.ranks.rank_group import Ranks
from dflash_runtime.target_config import ExpertsConfig, RecurrenceConfig, TargetConfig
from dflash_testing.pairs import random_target
from dflash_testing.refusals import refuses

CONFIG = random_target().config
EXPERTS = ExpertsConfig(
    num_experts=4, num_chosen=2, intermediate_size=16, has_normalised_scores=True, layers=(0, 1, 2, 3), shared_size=24
)
RECURRENCE = RecurrenceConfig(
    layers=(0, 1), num_key_heads=2, num_value_heads=4, key_size=8, value_size=8, num_taps=4
)  # fmt: skip


def test_a_share_has_fewer_heads_and_narrower_feed_forwards() -> None:
    share = share_config(replace(CONFIG, experts=EXPERTS, recurrence=RECURRENCE), 2)
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size) == (2, 1, 24)
    assert share.experts is not None
    assert (share.experts.intermediate_size, share.experts.shared_size, share.experts.num_shared) == (8, 12, 2)
    assert share.recurrence is not None
    assert (share.recurrence.num_key_heads, share.recurrence.num_value_heads) == (1, 2)
    assert (share.hidden_size, share.vocab_size) == (CONFIG.hidden_size, CONFIG.vocab_size)
    assert share_config(CONFIG, 1) is CONFIG


def test_several_ranks_have_the_same_kv_head_if_there_are_fewer() -> None:
    assert share_config(CONFIG, 4).kv_shapes == ((1, 8),) * 4
    family = target_families()["qwen3"]
    cuts = [family_cuts(family, CONFIG, Ranks(rank, 4)) for rank in range(4)]
    keys = [item["model.layers.0.self_attn.k_proj.weight"].ranges for item in cuts]
    assert keys == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]


@pytest.mark.parametrize(
    ("changes", "size", "field", "found"),
    [
        ({}, 3, "num_attention_heads", 4),
        ({"intermediate_size": 50}, 4, "intermediate_size", 50),
        ({"num_heads": 12, "num_kv_heads": 6, "intermediate_size": 48}, 4, "num_key_value_heads", 6),
        ({"experts": replace(EXPERTS, intermediate_size=15)}, 2, "moe_intermediate_size", 15),
        ({"experts": replace(EXPERTS, shared_size=15)}, 2, "shared_expert_intermediate_size", 15),
        ({"recurrence": RECURRENCE}, 4, "linear_num_key_heads", 2),
    ],
)
def test_ranks_that_do_not_divide_the_target_are_refused(
    changes: dict[str, object], size: int, field: str, found: int
) -> None:
    config: TargetConfig = replace(CONFIG, **changes)  # type: ignore[arg-type]
    with refuses(UnsupportedError, "not-divided-by-ranks", field=field, found=found):
        share_config(config, size)


def test_the_parts_of_all_ranks_are_the_whole_tensor() -> None:
    """Every tensor of a dense and of a hybrid target with fused experts, on two ranks."""
    hybrid = replace(
        CONFIG, model_type="qwen3_5_moe_text", experts=replace(EXPERTS, shared_size=None), recurrence=RECURRENCE
    )
    for config in (replace(CONFIG, mlp_bias=True, attention_bias=True), hybrid):
        family = target_families()[config.model_type]
        stored = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(4)]
        cuts = [family_cuts(family, config, Ranks(rank, 2), stored) for rank in range(2)]
        assert cuts[0]
        for name, cut in cuts[0].items():
            whole = sorted([*cut.ranges, *cuts[1][name].ranges])
            assert whole[0][0] == 0
            assert all(first[1] == second[0] for first, second in pairwise(whole)), name
    joined = cuts[1]["model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert joined.ranges == ((8, 16), (24, 32), (48, 64))  # queries, keys and values of the second key head
    fused = cuts[1]["model.layers.0.mlp.experts.gate_up_proj"]
    assert (fused.axis, fused.ranges) == (1, ((8, 16), (24, 32)))


def test_packed_experts_are_filled_up_to_whole_blocks() -> None:
    """An inner width of 160 in blocks of 32 on two ranks: 96 and 64, filled up with 32 zeros."""
    packed = replace(EXPERTS, intermediate_size=160, shared_size=None)
    config = replace(CONFIG, model_type="gpt_oss", experts=packed, quantization="mxfp4", intermediate_size=160)
    assert share_config(config, 2).experts == replace(packed, intermediate_size=96)
    first, second = (family_cuts(target_families()["gpt_oss"], config, Ranks(rank, 2)) for rank in range(2))
    stem = "model.layers.0.mlp.experts"
    assert first[f"{stem}.gate_up_proj_blocks"] == Cut(1, ((0, 192),))
    assert second[f"{stem}.gate_up_proj_blocks"] == Cut(1, ((192, 320),), num_missing=64)
    assert second[f"{stem}.gate_up_proj_bias"] == Cut(1, ((192, 320),), num_missing=64)
    assert second[f"{stem}.down_proj_scales"] == Cut(2, ((3, 5),), num_missing=1)
    assert second[f"{stem}.down_proj_scales"].of(torch.ones(1, 1, 5))[0, 0].tolist() == [1, 1, 0]


def test_a_bias_of_a_sum_is_added_once() -> None:
    config = replace(CONFIG, mlp_bias=True, attention_bias=True)
    family = target_families()["llama"]
    name = "model.layers.0.mlp.down_proj.bias"
    first, second = (family_cuts(family, config, Ranks(rank, 2)) for rank in range(2))
    assert name not in first
    assert second[name].of(torch.ones(32)).tolist() == [0.0] * 32


def test_a_part_in_blocks_does_not_cut_a_block() -> None:
    assert Cut(0, ((128, 256), (384, 400))).in_blocks(128, 400) == Cut(0, ((1, 2), (3, 4)))
    assert Cut(0, ((0, 64),)).in_blocks(128, 400) is None


def test_the_description_of_a_part_has_its_bytes() -> None:
    info = TensorInfo("w", "BF16", (6, 4), None, 100, 148)  # type: ignore[arg-type]
    part = cut_info(info, Cut(0, ((0, 2),)))
    assert (part.shape, part.num_bytes) == ((2, 4), 16)
    assert cut_info(info, None) is info


def test_ids_of_other_ranks_look_up_zeros() -> None:
    """An embedding of 5 ids on two ranks: the second one has two rows, and a row of zeros for the missing id."""
    rows = torch.arange(1.0, 6.0)[:, None]
    ids = torch.tensor([0, 2, 3, 4])
    found = []
    for rank in range(2):
        alone = Ranks(rank, 2)  # without an exchange, a rank sees its own rows only
        embedding = SplitEmbedding(rows[3 * rank : 3 * rank + 3], 5, alone)
        assert len(embedding.own_rows) == 3
        found.append(embedding[ids][:, 0].tolist())
    assert found == [[1, 3, 0, 0], [0, 0, 4, 5]]
