"""The sizes of a draft or a target that tensor parallelism cuts, from configs and headers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_cli.engines.packed_weights import block_of, first_scheme
from dflash_cli.engines.vllm_packing import stated_packing
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.quantised.stated_quantization import stated_quantization
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.checkpoint.targets.layer_kinds import LATENT
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.target_config import TargetFacts

KV_HEADS, GLOBAL_KV_HEADS = "num_key_value_heads", "num_global_key_value_heads"
DENSE = ("intermediate_size",)
HYBRID = ("linear_num_value_heads",)
EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")
WIDTHS: Mapping[str, tuple[str, ...]] = {
    "qwen2": DENSE, "qwen3": DENSE, "llama": DENSE, "mistral": DENSE, "gemma3_text": DENSE, "mixtral": DENSE,
    "gpt_oss": DENSE, "qwen3_moe": EXPERTS, "qwen3_next": (*EXPERTS, *HYBRID), "qwen3_5_text": (*DENSE, *HYBRID),
    "qwen3_5_moe_text": (*EXPERTS, *HYBRID), "gemma4_text": DENSE, "gemma4_unified_text": DENSE,
}  # fmt: skip
"""Model type of a target -> the keys of sizes that N must divide, beside its heads."""
ROW_CUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that an engine fuses. It cuts their rows."""
COLUMN_CUT = ("o_proj", "down_proj")
"""Matrices that an engine cuts by columns."""
KEY_VALUE = ("k_proj", "v_proj")
CUT = frozenset({name for names in (*ROW_CUT, COLUMN_CUT) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMatrix:
    """A packed matrix [rows, columns] with a scale for each block; groups of columns are blocks of one row."""

    rows: int
    columns: int
    block: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """The sizes of one model that tensor parallelism cuts. None: the config does not state the size.

    is_draft       whether it is the draft
    kv_heads       key -> KV heads of one kind of layers; empty for latent attention too
    widths         key -> size that N must divide: inner widths of feed-forwards, heads of recurrent layers
    vocabularies   key -> rows of an embedding or a head
    num_experts    None without experts
    method         how the weights are packed; empty for plain weights
    matrices       module -> its packed matrix with scales of blocks
    """

    is_draft: bool
    model_type: str
    num_heads: int | None
    kv_heads: Mapping[str, int]
    widths: Mapping[str, int]
    vocabularies: Mapping[str, int]
    num_experts: int | None = None
    method: str = ""
    matrices: Mapping[str, ScaledMatrix] = field(default_factory=dict)

    def replicated(self, num_gpus: int) -> dict[str, int]:
        """The `kv_heads` that are fewer than the GPUs, where each head is kept by equally many GPUs."""
        return {key: kv for key, kv in self.kv_heads.items() if kv < num_gpus and num_gpus % kv == 0}


def split_models(subject: Subject) -> Iterator[SplitModel]:
    """The draft, if its sizes are known, and the target, if it is given."""
    draft = _split_draft(subject)
    if draft is not None:
        yield draft
    if subject.target is not None:
        yield _split_target(subject)


def _split_draft(subject: Subject) -> SplitModel | None:
    config = subject.parsed.config if subject.parsed is not None else subject.dims
    if config is None:
        return None
    settings = as_object(stated_packing(subject))
    return SplitModel(
        is_draft=True,
        model_type=str(subject.stated.body.get("model_type")),
        num_heads=config.num_heads,
        kv_heads={KV_HEADS: config.num_kv_heads},
        widths={"intermediate_size": config.intermediate_size},
        vocabularies={
            "vocab_size": config.vocab_size,
            **({"draft_vocab_size": config.draft_vocab_size} if config.has_reduced_vocab else {}),
        },
        method=method_of(settings),
        matrices=scaled_matrices(subject.tensors or {}, settings),
    )


def _split_target(subject: Subject) -> SplitModel:
    assert subject.target is not None
    assert subject.target_checkpoint is not None
    checkpoint, kind = subject.target_checkpoint, subject.target.model_type
    config, _ = decoder_config(subject.target_json, checkpoint.config_path)
    settings = stated_quantization(checkpoint)
    try:
        tensors: Mapping[str, TensorInfo] = checkpoint.tensors
    except CheckpointError:  # the target may be a config alone
        tensors = {}
    return SplitModel(
        is_draft=False,
        model_type=kind,
        num_heads=subject.target.num_heads,
        kv_heads=_kv_heads(subject.target, config),
        widths={key: config[key] for key in _width_keys(kind, config) if is_int(config.get(key))},
        vocabularies={"vocab_size": subject.target.vocab_size},
        num_experts=subject.target.num_experts if "moe_intermediate_size" in WIDTHS.get(kind, ()) else None,
        method=method_of(settings),
        matrices=scaled_matrices(tensors, settings),
    )


def _kv_heads(target: TargetFacts, config: Mapping[str, Any]) -> dict[str, int]:
    """The KV heads of each kind of layers. Full layers of Gemma 4 may have others."""
    if LATENT in target.layer_kinds:
        return {}
    other = config.get(GLOBAL_KV_HEADS) if config.get("attention_k_eq_v") is True else None
    found = {KV_HEADS: target.num_kv_heads, GLOBAL_KV_HEADS: other}
    return {key: count for key, count in found.items() if is_int(count) and count > 0}


def _width_keys(kind: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of sizes that N must divide. Some layers of a model with experts may be dense."""
    has_dense_layers = bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1
    keys = (*WIDTHS.get(kind, ()), *(EXPERTS if config.get("enable_moe_block") is True else ()))
    return (*keys, *DENSE) if has_dense_layers and "moe_intermediate_size" in keys else keys


def method_of(settings: Mapping[str, Any]) -> str:
    """The method in lower case, which settings of packed weights name; empty if they name none."""
    return str(settings.get("quant_method", "")).lower().replace("_", "-").removesuffix("-marlin")


def scaled_matrices(tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> dict[str, ScaledMatrix]:
    """Module -> its matrix, for the packed matrices that engines cut."""
    block, group = block_of(settings), _group(settings)
    found: dict[str, ScaledMatrix] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if module.rpartition(".")[2] not in CUT or len(info.shape) != 2:
            continue
        weight, (first, second) = tensors.get(f"{module}.weight"), info.shape
        is_matrix = weight is not None and len(weight.shape) == 2
        if block is not None and part in ("weight_scale_inv", "weight_scale") and weight is not None and is_matrix:
            found[module] = ScaledMatrix(rows=weight.shape[0], columns=weight.shape[1], block=block)
        elif group is not None and part == "scales":
            found[module] = ScaledMatrix(rows=second, columns=first * group, block=(1, group))
        elif group is not None and part == "weight_scale" and f"{module}.weight_packed" in tensors:
            found[module] = ScaledMatrix(rows=first, columns=second * group, block=(1, group))
    return found


def _group(settings: Mapping[str, Any]) -> int | None:
    group = settings.get("group_size", settings.get("q_group_size", first_scheme(settings).get("group_size")))
    return group if is_int(group) and group > 0 else None
