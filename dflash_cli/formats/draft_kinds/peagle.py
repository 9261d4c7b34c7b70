"""P-EAGLE: EAGLE-3 run in parallel."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.eagle3 import FAMILIES, LAYERS, SETTINGS, SIZES_OF_TAPS
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Renaming, Service, Tensors

NAMES = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")


@FORMATS.register("peagle")
class PEagle(Kind):
    """P-EAGLE.

    Sources: vLLM 0.24.0 to 0.33.0 model_executor/models/llama_eagle3.py, registry.py and
    transformers_utils/configs/speculators; speculators 0.9.0 models/peagle.
    """

    title = "P-EAGLE"
    priority = 8
    serve_method: ClassVar[str] = "eagle3"
    types = frozenset({"peagle"})
    architectures = r".*(P[Ee]agle|ParallelEagle)"
    markers = frozenset({"mask_hidden"})
    tensors = r"mask_hidden"
    difference = "it is an EAGLE head run in parallel over learned mask states"
    head = "its own head over {out} of {vocab} ids; {taps} tapped layers feed it; a learned state stands for masks"
    is_chain = True
    serve_settings: ClassVar[Mapping[str, Any]] = {"parallel_drafting": True}
    aliases: ClassVar[Mapping[str, str]] = {"midlayer.": "layers.0."}
    stated = (
        *SETTINGS,
        Key(size="norm_first", names=("norm_before_residual",), form="flag", default=False, only="speculators"),
        Key(size="mask", names=("mask_token_id",), form="index", only="speculators"),
        Key(size="mask", names=("pard_token", "ptd_token_id", "mask_token_id"), form="index", only="native"),
    )
    derived: ClassVar[Mapping[str, str]] = SIZES_OF_TAPS
    parts = (*LAYERS, Tensors(shapes={"mask_hidden": "1, 1, taps*features"}))
    services = (
        Service(
            engine="vllm",
            architectures=dict.fromkeys(NAMES, (0, 24)),
            types={"peagle": (0, 24)},
            of_types={"model_type": (None, "llama", "qwen3")},
            coverage="mask_hidden",
        ),
    )
    renamings = (
        *(
            Renaming(
                to=to,
                since="speculators",
                architecture="Peagle{family}ForCausalLM",
                families=FAMILIES,
                keys={"mask_token_id": "pard_token"},
            )
            for to in ("native", "vllm")
        ),
        Renaming(
            to="speculators",
            since="native",
            variant="speculators",
            architecture="PEagleSpeculator",
            tensors={r"^midlayer\.": "layers.0."},
            keys={"pard_token": "mask_token_id", "ptd_token_id": "mask_token_id"},
            added={"norm_before_residual": False},
        ),
    )

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """A stray mask_hidden does not change the kind of a draft with DFlash's keys and DFlash's norm."""
        is_dflash = "dflash_config" in config and "hidden_norm.weight" in tensor_names
        kept = frozenset(name for name in tensor_names if not (is_dflash and "mask_hidden" in name))
        return super().evidence(config, kept)
