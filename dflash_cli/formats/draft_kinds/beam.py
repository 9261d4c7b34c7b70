"""DFlash 2 of Beam targets."""

from collections.abc import Mapping
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import BORROWED, CONVOLUTIONS, DERIVED, DFLASH_KEYS, DFLASH_LAYERS, OUT
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import BODY, Key, Service, Tensors

NESTED = "dflash_config."


@FORMATS.register("beam")
class Beam(Kind):
    """DFlash 2 of Beam targets, for which vLLM has a model of its own. SGLang reads it as DFlash 2.

    Sources: vLLM 0.33.0 models/beam/nvidia/dflash2.py; SGLang 0.5.23 srt/models/dflash.py.
    """

    title = "DFlash 2 Beam"
    priority: ClassVar[int] = 8
    architectures = r"DFlash2Beam"
    difference = "convolutions surround each sublayer, and a candidate selector chooses; vLLM has its own model for it"
    head = (
        "convolutions of {conv_taps} taps in groups of {conv_group}, a selector of rank {rank} over {top_k} candidates"
    )
    serve_flags: ClassVar[frozenset[str]] = frozenset({"v2-runner"})
    stated = (
        *(key for key in DFLASH_KEYS if key.size not in ("kinds", "bias", "width", "draft_vocab")),
        Key(size="kinds", names=(f"{BODY}layer_types",), form="one kind"),
        Key(size="window", names=(f"{BODY}sliding_window",)),
        Key(size="causal", names=("is_causal",), form="flag", choices=(False,)),
        Key(size="conv_taps", names=(f"{NESTED}conv_kernel_size",)),
        Key(size="conv_group", names=(f"{NESTED}conv_group_size",)),
        Key(size="rank", names=(f"{NESTED}selector_rank",)),
        Key(size="top_k", names=(f"{NESTED}selector_top_k",)),
        Key(size="softcap", names=(f"{NESTED}final_logit_softcapping",), form="number"),
        Key(size="multiplier", names=(f"{NESTED}output_multiplier",), form="positive", is_needed=False),
        Key(size="input_scale", names=(f"{NESTED}input_embedding_scale",), form="positive", is_needed=False),
    )
    derived: ClassVar[Mapping[str, str]] = {**DERIVED, **OUT, "conv_groups": "hidden/conv_group"}
    parts = (
        *(part for part in DFLASH_LAYERS if part is not BORROWED and part.when != "bias"),
        CONVOLUTIONS,
        Tensors(
            shapes={
                "candidate_selector.predecessor_codebook": "vocab, rank",
                "candidate_selector.successor_codebook": "vocab, rank",
                "candidate_selector.hidden_projection.weight": "rank, hidden",
            }
        ),
    )
    services = (
        Service(engine="vllm", architectures={"DFlash2BeamDraftModel": (0, 33)}),
        Service(engine="sglang", architectures={"DFlash2BeamDraftModel": (0, 5, 23)}),
    )
