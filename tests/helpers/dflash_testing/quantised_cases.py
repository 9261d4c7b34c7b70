"""Drafts with quantised weights: each packing of exporters, whole, and with one part absent, changed or contradictory.

The cases of tests/golden/quantised_verdicts.py and tests/behaviour/test_quantised_verdicts.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dflash_testing import checkpoints as support
from dflash_testing.config_cases import ABSENT, BODY, changed

SHAPE = support.Shape(
    hidden=128, inner=256, layers=2, heads=4, kv_heads=2, head_dim=64, vocab=128, draft_vocab=128, mask=127
)
TARGET = {
    **support.body_config(SHAPE), "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Tensor = tuple[str, tuple[int, ...]]
"""The element type of a tensor in a header, and its shape."""
Parts = dict[str, Tensor]
"""The end of a tensor's name, after the module's -> the tensor."""


def _float(rows: int, columns: int, scale: str, size: Callable[[int, int], tuple[int, ...]], more: Parts) -> Parts:
    return {"weight": ("F8_E4M3", (rows, columns)), scale: ("F32", size(rows, columns)), **more}


def groups_of(kind: str, bits: int, strategy: str, *, dynamic: bool | None = None, **more: Any) -> dict[str, Any]:
    """The settings of compressed-tensors for every linear layer."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    inputs = {"num_bits": bits, "type": kind, "strategy": "token" if dynamic else "tensor", "symmetric": True,
              "dynamic": bool(dynamic)}  # fmt: skip
    return {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None if dynamic is None else inputs,
            }
        },
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


BLOCK, GROUP = 128, 128
SCALAR: tuple[int, ...] = ()
BY_BLOCK = partial(_float, scale="weight_scale_inv", size=lambda r, c: (r // BLOCK, c // BLOCK), more={})
BY_TENSOR = partial(_float, scale="weight_scale", size=lambda r, c: SCALAR, more={})
BY_ROW = partial(_float, scale="weight_scale", size=lambda r, c: (r, 1), more={})
STATIC = partial(_float, scale="weight_scale", size=lambda r, c: SCALAR, more={"input_scale": ("F32", SCALAR)})
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
         "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip


VARIANTS = ("layers", "all", "bare config", "plain tensors", "no config", "no scales", "misshapen scales", "ignored")
"""
layers            the matrices of the layers are packed; fc is plain, and listed where modules are ignored
all               fc is packed too
bare config       as `layers`, without a list of ignored modules
plain tensors     the config states the packing, and every tensor is plain
no config         packed tensors, and no statement
no scales         as `layers`, without the scales
misshapen scales  as `layers`; scales with one more row
ignored           as `layers`; the o_proj of the first layer is plain and listed too
"""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A way to store the matrices of linear layers.

    settings  the value of `quantization_config`
    parts     (rows, columns) of a matrix -> the tensors that hold it
    ignored   the key of `settings` with the list of plain modules
    scale     the part that is absent or misshapen in cases about scales
    in_file   whether hf_quant_config.json has the settings instead of config.json
    variants  the variants that are drafts
    """

    settings: Mapping[str, Any]
    parts: Callable[[int, int], Parts]
    ignored: str = "ignore"
    scale: str = "weight_scale"
    in_file: bool = False
    variants: tuple[str, ...] = VARIANTS


def _gptq(rows: int, columns: int) -> Parts:
    return {
        "qweight": ("I32", (columns // 8, rows)),
        "qzeros": ("I32", (columns // GROUP, rows // 8)),
        "scales": ("F16", (columns // GROUP, rows)),
        "g_idx": ("I32", (columns,)),
    }


def _awq(rows: int, columns: int) -> Parts:
    return {
        "qweight": ("I32", (columns, rows // 8)),
        "qzeros": ("I32", (columns // GROUP, rows // 8)),
        "scales": ("F16", (columns // GROUP, rows)),
    }


def _pack(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": ("I32", (rows, columns // 8)),
        "weight_scale": ("BF16", (rows, columns // GROUP)),
        "weight_shape": ("I64", (2,)),
    }


def _nf4(rows: int, columns: int) -> Parts:
    return {
        "weight": ("U8", (rows * columns // 2, 1)),
        "weight.absmax": ("F32", (rows * columns // 64,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (82,)),
    }


EVEN_ROWS, ROWS = 64, (144, 192, 512)
"""Rows of a block that divide the rows of each matrix (128 or 256), and that do not."""


def _in_blocks() -> Iterator[tuple[str, Packing]]:
    """FP8 with scales of blocks in both forms. Engines fuse q, k and v, and gate and up, which may cut a block."""
    for rows in (EVEN_ROWS, *ROWS):
        size = partial(_scales_of_blocks, rows)
        inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True,
                  "dynamic": True}  # fmt: skip
        groups = groups_of("float", 8, "block", block_structure=[rows, BLOCK])
        groups["config_groups"]["group_0"]["input_activations"] = inputs
        yield f"fp8 block of {rows} rows", Packing(
            settings={**FP8, "weight_block_size": [rows, BLOCK]},
            parts=partial(_float, scale="weight_scale_inv", size=size, more={}),
            ignored="modules_to_not_convert", scale="weight_scale_inv", variants=("layers", "all"),
        )  # fmt: skip
        yield f"float-quantized block of {rows} rows", Packing(
            settings={**groups, "format": "float-quantized"},
            parts=partial(_float, scale="weight_scale", size=size, more={}), variants=("layers", "all"),
        )  # fmt: skip


def _scales_of_blocks(block: int, rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // block), -(-columns // BLOCK)


PACKINGS: Mapping[str, Packing] = {
    "fp8 block": Packing(
        settings={**FP8, "weight_block_size": [BLOCK, BLOCK]}, parts=BY_BLOCK, ignored="modules_to_not_convert",
        scale="weight_scale_inv",
    ),
    "fp8 tensor": Packing(settings=FP8, parts=BY_TENSOR, ignored="ignored_layers"),
    "fp8 static": Packing(
        settings={**FP8, "activation_scheme": "static"}, parts=STATIC, ignored="ignored_layers"
    ),
    "fbgemm": Packing(
        settings={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, parts=BY_ROW,
        ignored="modules_to_not_convert",
    ),
    "float-quantized": Packing(
        settings={**groups_of("float", 8, "channel", dynamic=True), "format": "float-quantized"}, parts=BY_ROW
    ),
    "float-quantized tensor": Packing(
        settings={**groups_of("float", 8, "tensor", dynamic=False), "format": "float-quantized"},
        parts=partial(_float, scale="weight_scale", size=lambda r, c: (1,), more={"input_scale": ("F32", (1,))}),
    ),
    "int-quantized": Packing(
        settings={**groups_of("int", 8, "channel", dynamic=True), "format": "int-quantized"},
        parts=lambda r, c: {"weight": ("I8", (r, c)), "weight_scale": ("BF16", (r, 1))},
    ),
    "pack-quantized": Packing(
        settings={**groups_of("int", 4, "group", group_size=GROUP), "format": "pack-quantized"}, parts=_pack
    ),
    "nvfp4-pack-quantized": Packing(
        settings={
            **groups_of("float", 4, "tensor_group"), "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4, "input_activations": {
                **NVFP4, "dynamic": "local"}}},
        },
        parts=lambda r, c: {
            "weight_packed": ("U8", (r, c // 2)), "weight_scale": ("F8_E4M3", (r, c // 16)),
            "weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,)),
        },
    ),
    "gptq": Packing(
        settings={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
                  "checkpoint_format": "gptq"},
        parts=_gptq, ignored="modules_in_block_to_quantize", scale="scales",
    ),
    "awq": Packing(
        settings={"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        parts=_awq, ignored="modules_to_not_convert", scale="scales",
    ),
    "bitsandbytes nf4": Packing(
        settings={"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                  "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
                  "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "uint8"},
        parts=_nf4, ignored="llm_int8_skip_modules", scale="weight.absmax",
    ),
    "bitsandbytes int8": Packing(
        settings={"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
        parts=lambda r, c: {"weight": ("I8", (r, c)), "SCB": ("F32", (r,))},
        ignored="llm_int8_skip_modules", scale="SCB",
    ),
    "mxfp4": Packing(
        settings={"quant_method": "mxfp4"}, ignored="modules_to_not_convert",
        parts=lambda r, c: {"weight": ("U8", (r, c // 2)), "weight_scale": ("U8", (r, c // 32))},
    ),
    "modelopt fp8": Packing(
        settings={"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}, parts=STATIC
    ),
    "modelopt nvfp4": Packing(
        settings={"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                  "producer": {"name": "modelopt"}},
        parts=lambda r, c: {
            "weight": ("U8", (r, c // 2)), "weight_scale": ("F8_E4M3", (r, c // 16)),
            "weight_scale_2": ("F32", SCALAR), "input_scale": ("F32", SCALAR),
        },
    ),
    "modelopt file": Packing(
        settings={"producer": {"name": "modelopt", "version": "0.33"},
                  "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []}},
        parts=STATIC, in_file=True,
    ),
    **dict(_in_blocks()),
}  # fmt: skip
"""Name -> the packing, as its exporter writes it."""

SPOKEN: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(("fp8 block", {f"quantization_config.{key}": value}) for key, value in (
        ("quant_method", ABSENT), ("quant_method", None), ("quant_method", ""), ("quant_method", "nonsense"),
        ("quant_method", 3), ("activation_scheme", ABSENT), ("activation_scheme", "nonsense"),
        ("weight_block_size", ABSENT), ("weight_block_size", None), ("weight_block_size", [128]),
        ("weight_block_size", "128"), ("fmt", ABSENT), ("nonsense", 1), ("modules_to_not_convert", None),
        ("modules_to_not_convert", "fc"), ("modules_to_not_convert", 3),
    )),
    ("fp8 block", {"quantization_config": "fp8"}), ("fp8 block", {"quantization_config": []}),
    ("fp8 block", {"quantization_config": None}), ("fp8 block", {"quantization_config": {}}),
    *(("pack-quantized", {f"quantization_config.{key}": value}) for key, value in (
        ("format", ABSENT), ("format", None), ("format", "nonsense"), ("config_groups", ABSENT),
        ("config_groups", None), ("config_groups", {}), ("ignore", ABSENT), ("ignore", None), ("ignore", ["re:.*"]),
        ("ignore", ["re:fc"]), ("quant_method", "compressed_tensors"), ("quantization_status", ABSENT),
    )),
    *(("gptq", {f"quantization_config.{key}": value}) for key, value in (
        ("bits", ABSENT), ("bits", 8), ("bits", "4"), ("bits", 3), ("group_size", ABSENT), ("group_size", 64),
        ("desc_act", ABSENT), ("desc_act", True), ("sym", False), ("sym", ABSENT), ("checkpoint_format", ABSENT),
    )),
    *(("awq", {f"quantization_config.{key}": value}) for key, value in (
        ("bits", ABSENT), ("bits", 8), ("zero_point", ABSENT), ("group_size", ABSENT), ("version", ABSENT),
    )),
    *(("modelopt fp8", {f"quantization_config.{key}": value}) for key, value in (
        ("quant_method", ABSENT), ("quant_algo", ABSENT), ("quant_algo", None), ("quant_algo", "nonsense"),
        ("quant_algo", "NVFP4"), ("producer", ABSENT), ("kv_cache_quant_algo", "FP8"),
    )),
)  # fmt: skip
"""A packing -> changes of dotted keys in its config, on the variant `layers`."""

LISTS: Mapping[str, str] = {
    "fp8 block": "modules_to_not_convert", "fp8 tensor": "ignored_layers", "float-quantized": "ignore",
    "pack-quantized": "ignore", "nvfp4-pack-quantized": "ignore", "awq": "modules_to_not_convert",
    "modelopt fp8": "exclude_modules", "modelopt nvfp4": "ignore",
}  # fmt: skip
"""Packing -> a key of its list of plain modules, which names fc in other ways."""
IGNORED: tuple[list[str], ...] = (["model.fc"], ["re:.*fc$"], ["*fc*"], ["lm_head", "fc", "norm"])
IN_BLOCK = [
    ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"],
    ["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"],
]  # fmt: skip
"""The modules of a layer in the settings of GPTQ."""

SPECULATORS = (
    "fp8 block", "fp8 tensor", "float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized", "gptq",
    "awq", "modelopt fp8", "bitsandbytes nf4",
)  # fmt: skip
"""The packings of speculators drafts, with the settings at the top level and among the decoder's keys."""


@dataclass(frozen=True, kw_only=True)
class QuantisedCase:
    """A quantised draft: its config with its tensors.

    inner  the settings of a speculators file stand among the decoder's keys
    """

    packing: str
    variant: str = "layers"
    base: str = "native"
    inner: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        said = ", ".join(f"{key}={value!r}" for key, value in self.changes.items()).replace(f"'{ABSENT}'", "absent")
        parts = (self.base, self.packing, self.variant, "in the decoder" if self.inner else "", said)
        return ", ".join(filter(None, parts))

    @property
    def is_unknown_to_transformers(self) -> bool:
        """Whether transformers knows no method for the packing: nothing states one, or Model-Optimizer does."""
        return self.variant == "no config" or self.packing.startswith("modelopt")

    @property
    def _packing(self) -> Packing:
        return PACKINGS[self.packing]

    @property
    def settings(self) -> dict[str, Any] | None:
        """The settings with their list of ignored modules; None if no file states them."""
        if self.variant == "no config":
            return None
        plain = {"bare config": [], "all": []}.get(self.variant, ["fc"])
        if self.variant == "ignored":
            plain = [*plain, "layers.0.self_attn.o_proj"]
        settings = dict(self._packing.settings)
        if self._packing.in_file:
            return {**settings, "quantization": {**settings["quantization"], "exclude_modules": plain}}
        if plain and self.packing != "gptq":  # whose settings name no ignored modules
            settings[self._packing.ignored] = [*settings.get(self._packing.ignored, []), *plain]
        return settings

    @property
    def config(self) -> dict[str, Any]:
        """The draft's config."""
        write = support.speculators_config if self.base == "speculators" else support.native_config
        config: dict[str, Any] = {**write(SHAPE), "dtype": "bfloat16"}
        if self.settings is not None and not self._packing.in_file:
            container = config[BODY.rstrip(".")] if self.inner else config
            container["quantization_config"] = self.settings
        return changed(config, self.changes)

    @property
    def files(self) -> dict[str, Any]:
        """Name -> JSON of the files beside the config."""
        return {"hf_quant_config.json": self.settings} if self._packing.in_file and self.settings else {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name of a tensor -> its element type and shape."""
        found: dict[str, Tensor] = {}
        for name, shape in support.body_shapes(SHAPE).items():
            module, _, _ = name.rpartition(".")
            is_packed = module.endswith("_proj") or (module == "fc" and self.variant == "all")
            if self.variant == "ignored" and module == "layers.0.self_attn.o_proj":
                is_packed = False
            if not is_packed or self.variant == "plain tensors":
                found[name] = ("BF16", shape)
                continue
            for part, (kind, size) in self._packing.parts(shape[0], shape[1]).items():
                if part == self._packing.scale and self.variant == "no scales":
                    continue
                is_odd = part == self._packing.scale and self.variant == "misshapen scales"
                found[f"{module}.{part}"] = (kind, _longer(size) if is_odd else size)
        return found


def _longer(size: tuple[int, ...]) -> tuple[int, ...]:
    return (size[0] + 1, *size[1:]) if size else (3,)


def all_cases() -> dict[str, QuantisedCase]:
    """Name -> case."""
    return {case.name: case for case in _cases()}


def _cases() -> Iterator[QuantisedCase]:
    for packing, kept in PACKINGS.items():
        for variant in kept.variants:
            yield QuantisedCase(packing=packing, variant=variant)
    for packing, changes in SPOKEN:
        yield QuantisedCase(packing=packing, changes=changes)
    for packing, key in LISTS.items():
        for listed in IGNORED:
            yield QuantisedCase(packing=packing, changes={f"quantization_config.{key}": listed})
    for variant in ("layers", "all", "no scales", "plain tensors"):
        changes = {"quantization_config.modules_in_block_to_quantize": IN_BLOCK}
        yield QuantisedCase(packing="gptq", variant=variant, changes=changes)
    for packing in SPECULATORS:
        for inner in (False, True):
            yield QuantisedCase(packing=packing, base="speculators", inner=inner)
        yield QuantisedCase(packing=packing, base="speculators", variant="plain tensors")
        yield QuantisedCase(packing=packing, base="speculators", variant="no scales")
