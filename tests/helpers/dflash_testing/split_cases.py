"""Drafts that N GPUs share: sizes that N divides and does not divide, plain and packed.

The cases of tests/golden/split_verdicts.py and tests/behaviour/test_split_verdicts.py.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_testing import checkpoints as support
from dflash_testing.quantised_cases import FP8, Parts, Tensor, groups_of

GROUPED = [["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]]
"""The modules of a layer in vLLM, which finds packed modules of GPTQ by its own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPacking:
    """A way to store matrices.

    settings  the value of `quantization_config`
    parts     (rows, columns) of a matrix -> the tensors that hold it
    plain     the key of `settings` that lists plain modules; None if no key does
    block     the rows and columns with one scale
    """

    settings: Mapping[str, Any]
    parts: Callable[[int, int], Parts]
    plain: str | None
    block: tuple[int, int]


def _in_blocks(scale: str, block: tuple[int, int], rows: int, columns: int) -> Parts:
    size = (-(-rows // block[0]), -(-columns // block[1]))
    return {"weight": ("F8_E4M3", (rows, columns)), scale: ("F32", size)}


def _transposed(group: int, qweight: Callable[[int, int], tuple[int, int]], rows: int, columns: int) -> Parts:
    return {
        "qweight": ("I32", qweight(rows, columns)),
        "qzeros": ("I32", (columns // group, rows // 8)),
        "scales": ("F16", (columns // group, rows)),
    }


def _packed(group: int, rows: int, columns: int) -> Parts:
    return {
        "weight_packed": ("I32", (rows, columns // 8)),
        "weight_scale": ("BF16", (rows, columns // group)),
        "weight_shape": ("I64", (2,)),
    }


def _fp8(*block: int) -> SplitPacking:
    rows, columns = block
    settings = {**FP8, "weight_block_size": [rows, columns]}
    parts = partial(_in_blocks, "weight_scale_inv", (rows, columns))
    return SplitPacking(settings=settings, parts=parts, plain="modules_to_not_convert", block=(rows, columns))


def _compressed(*block: int) -> SplitPacking:
    rows, columns = block
    settings = {**groups_of("float", 8, "block", block_structure=[rows, columns]), "format": "float-quantized"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": columns, "symmetric": True,
              "dynamic": True}  # fmt: skip
    settings["config_groups"]["group_0"]["input_activations"] = inputs
    parts = partial(_in_blocks, "weight_scale", (rows, columns))
    return SplitPacking(settings=settings, parts=parts, plain="ignore", block=(rows, columns))


def _gptq(group: int) -> SplitPacking:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True,
                "modules_in_block_to_quantize": GROUPED}  # fmt: skip

    def parts(rows: int, columns: int) -> Parts:
        packed = _transposed(group, lambda rows, columns: (columns // 8, rows), rows, columns)
        return {**packed, "g_idx": ("I32", (columns,))}

    return SplitPacking(settings=settings, parts=parts, plain=None, block=(1, group))


def _awq(group: int) -> SplitPacking:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    parts = partial(_transposed, group, lambda rows, columns: (columns, rows // 8))
    return SplitPacking(settings=settings, parts=parts, plain="modules_to_not_convert", block=(1, group))


def _four_bits(group: int) -> SplitPacking:
    settings = {**groups_of("int", 4, "group", group_size=group), "format": "pack-quantized"}
    return SplitPacking(settings=settings, parts=partial(_packed, group), plain="ignore", block=(1, group))


PACKINGS: Mapping[str, SplitPacking] = {
    "fp8 128x128": _fp8(128, 128), "fp8 128x64": _fp8(128, 64), "fp8 64x128": _fp8(64, 128),
    "fp8 192x128": _fp8(192, 128), "compressed 128x128": _compressed(128, 128),
    "compressed 64x128": _compressed(64, 128), "gptq 128": _gptq(128), "gptq 32": _gptq(32),
    "awq 128": _awq(128), "awq 32": _awq(32), "int4 64": _four_bits(64),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCase:
    """A draft of one layer on `num_gpus` GPUs. Its target has the same sizes."""

    num_gpus: int
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    inner: int = 480
    vocab: int = 960
    packing: str = ""

    @property
    def name(self) -> str:
        """Every field, in order."""
        sizes = (self.heads, self.kv_heads, self.head_dim, self.inner, self.vocab)
        return f"{self.packing or 'plain'}, {' '.join(map(str, sizes))}, {self.num_gpus} GPUs"

    @property
    def shape(self) -> support.Shape:
        return support.Shape(
            hidden=128, inner=self.inner, layers=1, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            vocab=self.vocab, draft_vocab=self.vocab, mask=self.vocab - 1, windows=(None,),
        )  # fmt: skip

    @property
    def config(self) -> dict[str, Any]:
        config = {**support.native_config(self.shape), "dtype": "bfloat16"}
        if self.packing:
            packing = PACKINGS[self.packing]
            settings = copy.deepcopy(dict(packing.settings))
            if packing.plain is not None:
                settings[packing.plain] = [*settings.get(packing.plain, []), "fc", "model.fc"]
            config["quantization_config"] = settings
        return config

    @property
    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, (*size,) in support.body_shapes(self.shape).items():
            if self.packing and name.endswith("_proj.weight"):
                parts = PACKINGS[self.packing].parts(*size)
                found |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
            else:
                found[name] = ("BF16", tuple(size))
        return found


def _all() -> Iterator[SplitCase]:
    for heads in (4, 5, 6, 8, 12, 16, 32):
        for kv_heads in (count for count in (1, 2, 3, 4, 5, 6, 8) if heads % count == 0):
            for num_gpus in (2, 3, 4, 5, 6, 8, 16):
                yield SplitCase(num_gpus=num_gpus, heads=heads, kv_heads=kv_heads)
    for inner in (96, 100, 250, 256, 480):
        for vocab in (64, 100, 128, 192, 320, 960):
            for num_gpus in (2, 3, 4, 6, 8, 12):
                yield SplitCase(num_gpus=num_gpus, heads=24, kv_heads=12, inner=inner, vocab=vocab)
    for packing in PACKINGS:
        for kv_heads in (1, 2, 4, 8):
            for head_dim in (32, 64):
                for inner in (256, 384, 512):
                    for num_gpus in (2, 4, 8):
                        yield SplitCase(
                            num_gpus=num_gpus, kv_heads=kv_heads, head_dim=head_dim, inner=inner, vocab=128,
                            packing=packing,
                        )  # fmt: skip


def all_cases() -> dict[str, SplitCase]:
    """Name -> case."""
    return {case.name: case for case in _all()}
