"""LiLiCorr: DFlash with a correlator over a lattice of candidates."""

from collections.abc import Mapping
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import CONVOLUTIONS, DERIVED, DFLASH_KEYS, DFLASH_LAYERS, OUT
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Service, Tensors

LAYER = "lilicorr.layers.{lattice_layers}"
COVERAGE = r"lilicorr\.|layers\.\d+\.(attention|mlp)_conv\."


def _linear(name: str, rows: str, columns: str) -> dict[str, str]:
    return {f"{name}.weight": f"{rows}, {columns}", f"{name}.bias": rows}


@FORMATS.register("lilicorr")
class LiLiCorr(Kind):
    """LiLiCorr (arXiv 2608.20530).

    Sources: vLLM 0.33.0 model_executor/models/lilicorr.py; SGLang 0.5.23 srt/models/lilicorr.py and
    srt/speculative/lilicorr_utils.py.
    """

    title = "LiLiCorr"
    priority = 9
    projectors = frozenset({"lilicorr"})
    architectures = r"LiLiCorr"
    markers = frozenset({"lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers"})
    tensors = r"lilicorr\."
    difference = "a correlator over candidates chooses the tokens that the block proposes"
    head = (
        "a correlator of {lattice_layers} layers of width {lattice} over {top_k} candidates per position, "
        "edges of {factor_dim} factors"
    )
    serve_flags: ClassVar[frozenset[str]] = frozenset({"v2-runner"})
    stated = (
        *DFLASH_KEYS,
        Key(size="top_k", names=("dflash_config.lilicorr_candidate_topk",), choices=(1, 2, 4, 8, 16)),
        Key(size="lattice_width", names=("dflash_config.lilicorr_hidden_size",), form="index"),
        Key(size="lattice_layers", names=("dflash_config.lilicorr_num_layers",)),
        Key(size="lattice_heads", names=("dflash_config.lilicorr_num_heads",)),
        Key(size="mlp_ratio", names=("dflash_config.lilicorr_mlp_ratio",), form="positive"),
        Key(size="factor_dim", names=("dflash_config.lilicorr_factor_dim",)),
        Key(size="vector_eps", names=("dflash_config.lilicorr_vector_eps",), form="positive"),
        Key(size="edge_scale", names=("dflash_config.lilicorr_logit_scale",), form="positive"),
        Key(size="enabled", names=("dflash_config.lilicorr_enabled",), form="flag", is_needed=False),
        Key(size="projector", names=("dflash_config.projector_type",), form="text", is_needed=False),
        Key(
            size="conv_taps",
            names=("dflash_config.conv_kernel_size",),
            form="index",
            is_needed=False,
            needed_by="conv_group",
        ),
        Key(
            size="conv_group",
            names=("dflash_config.conv_group_size",),
            form="index",
            is_needed=False,
            needed_by="conv_taps",
        ),
        Key(size="own_head", names=("has_own_lm_head",), form="flag", is_needed=False),
    )
    derived: ClassVar[Mapping[str, str]] = {
        **DERIVED,
        **OUT,
        "lattice": "lattice_width or hidden",
        "lattice_mlp": "mlp_ratio*lattice",
        "narrowing": "lattice-hidden",
        "conv_groups": "hidden/conv_group",
    }
    parts = (
        *DFLASH_LAYERS,
        CONVOLUTIONS,
        Tensors(shapes=_linear("lilicorr.token_proj", "lattice", "hidden"), when="narrowing"),
        Tensors(
            shapes={
                **_linear("lilicorr.pass_hidden_proj", "lattice", "hidden"),
                **_linear("lilicorr.context_proj", "lattice", "hidden"),
                **dict.fromkeys(("lilicorr.feature_norm.weight", "lilicorr.feature_norm.bias"), "5"),
                **_linear("lilicorr.feature_mlp.up_proj", "lattice", "5"),
                **_linear("lilicorr.feature_mlp.down_proj", "lattice", "lattice"),
                "lilicorr.slot_embedding": "1, 1, block-1, 1, lattice",
                "lilicorr.rank_embedding": "1, 1, 1, top_k, lattice",
                "lilicorr.relative_slot_bias": "lattice_heads, 2*block-1",
                "lilicorr.same_slot_bias": "lattice_heads",
                f"{LAYER}.attn_norm.weight": "lattice",
                f"{LAYER}.attn.in_proj_weight": "3*lattice, lattice",
                f"{LAYER}.attn.in_proj_bias": "3*lattice",
                **_linear(f"{LAYER}.attn.out_proj", "lattice", "lattice"),
                f"{LAYER}.mlp_norm.weight": "lattice",
                **_linear(f"{LAYER}.mlp.up_proj", "lattice_mlp", "lattice"),
                **_linear(f"{LAYER}.mlp.down_proj", "lattice", "lattice_mlp"),
                "lilicorr.output_norm.weight": "lattice",
                "lilicorr.anchor_norm.weight": "lattice",
                **_linear("lilicorr.factor_input_proj", "lattice", "3*lattice"),
                **_linear("lilicorr.out_head", "factor_dim", "lattice"),
                **_linear("lilicorr.in_head", "factor_dim", "lattice"),
                **_linear("lilicorr.anchor_out_head", "factor_dim", "lattice"),
            }
        ),
    )
    services = (
        Service(
            engine="vllm",
            architectures={"LiLiCorrDraftModel": (0, 31)},
            demands={"enabled": (None, True)},
            coverage=COVERAGE,
            needs_all_ids=True,
        ),
        Service(
            engine="sglang",
            architectures={"LiLiCorrDraftModel": (0, 5, 23)},
            demands={"enabled": (None, True)},
            coverage=COVERAGE,
            needs_all_ids=True,
        ),
    )
