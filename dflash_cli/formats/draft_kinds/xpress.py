"""XPress: a causal refiner on DFlash."""

from collections.abc import Mapping
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import DERIVED, DFLASH_KEYS, DFLASH_LAYERS, OUT
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Renaming, Service, Tensors

NATIVE_NAMES = {
    "w1.weight": "vocab, rank",
    "down_h.weight": "rank, hidden",
    "down_g.weight": "rank, hidden",
    "in_proj.weight": "rank, 3*rank",
    "mix.L": "rank, span, span",
    "mlp.gate_proj.weight": "mlp, rank",
    "mlp.up_proj.weight": "mlp, rank",
    "mlp.down_proj.weight": "rank, mlp",
    "w2.weight": "vocab, rank",
}
OTHER_NAMES = {
    "w1.weight": "token_embed.weight",
    "mix.L": "mix_l",
    "mlp.gate_proj.weight": "mlp_gate.weight",
    "mlp.up_proj.weight": "mlp_up.weight",
    "mlp.down_proj.weight": "mlp_down.weight",
    "w2.weight": "readout.weight",
}
"""Name in vLLM's dialect -> name in speculators'. The other names are equal."""

TO_NATIVE = {
    rf"^refiner_head\.{OTHER_NAMES.get(name, name)}$".replace(".weight", r"\.weight"): f"xpress_head.{name}"
    for name in NATIVE_NAMES
}
TO_SPECULATORS = {
    rf"^xpress_head\.{name}$".replace(".weight", r"\.weight"): f"refiner_head.{OTHER_NAMES.get(name, name)}"
    for name in NATIVE_NAMES
}


@FORMATS.register("xpress")
class XPress(Kind):
    """XPress (arXiv 2608.02438).

    Sources: vLLM 0.33.0 model_executor/models/qwen3_xpress.py and v1/worker/gpu/spec_decode/xpress/speculator.py;
    speculators 0.9.0 models/xpress/config.py and model_definitions.py.
    """

    title = "XPress"
    types = frozenset({"xpress"})
    architectures = r".*XPress"
    markers = frozenset({"xpress_rank", "xpress_topc", "xpress_mlp_ratio", "xpress_block_size"})
    tensors = r"(xpress|refiner)_head\."
    difference = "a refiner adds a bias to the logits of each position, in several passes over the block"
    head = "a causal refiner of rank {rank} with an MLP of {mlp}, {passes} passes over blocks of {span} rows"
    serve_flags: ClassVar[frozenset[str]] = frozenset({"v2-runner"})
    stated = (
        *DFLASH_KEYS,
        Key(size="rank", names=("xpress_rank",), default=256),
        Key(size="mlp_size", names=("xpress_mlp_hidden",), default=512, only="native"),
        Key(size="mlp_ratio", names=("xpress_mlp_ratio",), default=2, only="speculators"),
        Key(size="stored_span", names=("xpress_block_size",), default=16, only="native"),
        Key(size="candidates", names=("xpress_topc",), form="index", default=512, only="native"),
        Key(size="passes", names=("num_jacobi_passes",), default=6, only="speculators"),
        Key(size="passes", names=("xpress_num_passes", "num_jacobi_passes"), default=6, only="native"),
        Key(size="from_anchor", names=("sample_from_anchor",), form="flag", is_needed=False, default=False),
    )
    derived: ClassVar[Mapping[str, str]] = {
        **DERIVED,
        **OUT,
        "mlp": "mlp_size or mlp_ratio*rank",
        "span": "stored_span or block",
    }
    parts = (
        *DFLASH_LAYERS,
        Tensors(shapes={f"xpress_head.{name}": shape for name, shape in NATIVE_NAMES.items()}, only="native"),
        Tensors(
            shapes={f"refiner_head.{OTHER_NAMES.get(name, name)}": shape for name, shape in NATIVE_NAMES.items()},
            only="speculators",
        ),
    )
    services = (
        Service(
            engine="vllm",
            architectures={"Qwen3XPressModel": (0, 33), "DFlashQwen3XPressModel": (0, 33)},
            coverage=r"xpress_head\.mix\.L",
            demands={"from_anchor": (False,)},
            needs_all_ids=True,
        ),
    )
    renamings = (
        *(
            Renaming(
                to=to,
                since="speculators",
                architecture="Qwen3XPressModel",
                tensors=TO_NATIVE,
                keys={"num_jacobi_passes": "xpress_num_passes"},
                added={"xpress_mlp_hidden": "{mlp}", "xpress_block_size": "{block}"},
                demands={"from_anchor": (False,)},
            )
            for to in ("native", "vllm")
        ),
        Renaming(
            to="speculators",
            since="native",
            variant="speculators",
            architecture="XPressSpeculator",
            tensors=TO_SPECULATORS,
            keys={"xpress_num_passes": "num_jacobi_passes"},
            added={"xpress_mlp_ratio": "{mlp/rank}"},
        ),
    )
