"""Domino: DFlash with a recurrent head."""

from collections.abc import Mapping
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import DERIVED, DFLASH_KEYS, DFLASH_LAYERS, OUT
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Renaming, Service, Tensors


@FORMATS.register("domino")
class Domino(Kind):
    """Domino, also under the architecture name DFlashDraftModel.

    Sources: SGLang 0.5.23 srt/speculative/dflash_utils.py and srt/models/dflash.py; NVIDIA/Model-Optimizer
    hf_spec_export.py; SpecForge's drafts name DominoDraftModel.
    """

    title = "Domino"
    projectors = frozenset({"domino", "causal_v5"})
    architectures = r"Domino"
    markers = frozenset({"gru_hidden_dim", "pure_draft_prefix_len", "shift_label"})
    tensors = r"prefix_gru\.|embed_proj\.|logit_head\."
    difference = "a recurrent head rewrites the logits of each position from the tokens before it"
    head = "a GRU of {gru} over the chosen tokens, and a projection through {emb} to {vocab} logits"
    stated = (
        *DFLASH_KEYS,
        Key(
            size="projector", names=("dflash_config.projector_type", "projector_type"), choices=("domino", "causal_v5")
        ),
        Key(size="gru", names=("dflash_config.gru_hidden_dim", "gru_hidden_dim")),
        Key(size="emb", names=("dflash_config.emb_dim", "emb_dim")),
        Key(size="prefix_len", names=("dflash_config.pure_draft_prefix_len", "pure_draft_prefix_len"), form="index"),
        Key(size="shift_label", names=("dflash_config.shift_label", "shift_label"), form="flag"),
    )
    derived: ClassVar[Mapping[str, str]] = {**DERIVED, **OUT}
    parts = (
        *DFLASH_LAYERS,
        Tensors(
            shapes={
                "prefix_gru.weight_ih_l0": "3*gru, hidden",
                "prefix_gru.weight_hh_l0": "3*gru, gru",
                "embed_proj.0.weight": "emb, hidden+gru",
                "embed_proj.2.weight": "vocab, emb",
            }
        ),
    )
    services = (
        Service(
            engine="sglang",
            architectures={"DFlashDraftModel": (0, 5, 23)},
            demands={"projector": ("domino",), "prefix_len": (1,)},
            coverage=r"prefix_gru\.|embed_proj\.",
        ),
    )
    renamings = tuple(
        Renaming(to=to, architecture=name, demands={"projector": ("domino",)})
        for to, name in (("sglang", "DFlashDraftModel"), ("native", "DominoDraftModel"))
    )
