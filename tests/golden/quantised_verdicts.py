"""Record what engines' own code makes of quantised drafts, for tests/behaviour/test_quantised_verdicts.py.

The drafts are the cases of `dflash_testing.quantised_cases`. `engine_verdicts` tells how to install the engines; this
script also needs pytest, loguru and compressed-tensors 0.17.0, or 0.18.0 and bitsandbytes 0.50.2 for SGLang.

vLLM and SGLang build their own quantised layers on a CPU while they believe in a GPU of compute capability 9.0. Before
loading, every parameter gets the same bytes, so that the parameters without a tensor are known afterwards. The work
after loading, such as repacking for a kernel, needs the GPU and does not run.

    env/bin/python tests/golden/quantised_verdicts.py vllm engines/vllm-0.33.0 tests/golden/quantised_verdicts.json
    env/bin/python tests/golden/quantised_verdicts.py sglang engines/sglang tests/golden/quantised_verdicts.json
    TORCHDYNAMO_DISABLE=1 env/bin/python tests/golden/quantised_verdicts.py zlab - tests/golden/quantised_verdicts.json
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import engine_loaders
from engine_loaders import Reading
from filled_parameters import mark, unfilled
from verdict_recorder import Recorder

from dflash_testing import checkpoints as support
from dflash_testing import quantised_cases

engine_loaders.PAIR = quantised_cases


def write(draft: Path, case: quantised_cases.QuantisedCase) -> None:
    """Write a draft with tensors of ones in their element type. The scales of blocks differ."""
    import torch
    from safetensors.torch import save_file

    types = {
        "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
        "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32,
    }  # fmt: skip
    draft.mkdir()
    support.write_config(draft, case.config)
    for name, content in case.files.items():
        (draft / name).write_text(json.dumps(content), encoding="utf-8")
    tensors = {name: torch.ones(shape).to(types[kind]) for name, (kind, shape) in case.tensors.items()}
    for at, name in enumerate(item for item in tensors if item.endswith(SCALES_OF_BLOCKS)):
        if tensors[name].dtype == torch.float32:  # numbers by which a scale is known
            tensors[name] += torch.arange(tensors[name].numel()).view(tensors[name].shape) / 64 + at
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})


SCALE_ENDS = ("_scale", "_scale_inv")
SCALES_OF_BLOCKS = tuple(f".weight{end}" for end in SCALE_ENDS)
UNNEEDED = ("lm_head.", "model.embed_tokens.", "model.mask_embedding")
"""Parameters that a draft leaves to the target. The scales of attention are set without a file."""


def of_model(model: Any, draft: Path) -> Reading:
    """The parameters that kept their bytes, and packed matrices that were loaded as plain numbers, by module."""
    import torch

    left, plain = set(), set()
    for name, parameter in model.named_parameters():
        if unfilled(parameter).any() and not name.startswith(UNNEEDED) and ".attn." not in name:
            left.add(short(name))
        if name.endswith(".weight") and parameter.dtype in (torch.bfloat16, torch.float16, torch.float32):
            plain.add(fused(name.removeprefix("model.")))
    misread = {short(name) for name in map(fused, packed_weights(draft)) if name in plain}
    misread |= {short(name) for name in with_scales_of_others(model, draft)}
    return {"unfilled": sorted(left), "misread": sorted(misread)}


def with_scales_of_others(model: Any, draft: Path) -> list[str]:
    """Return the stored matrices with block scales in which a row gets another scale than in the file.

    A product takes the scale of the block in which a row of the fused matrix lies.
    """
    import torch
    from safetensors.torch import load_file

    tensors, parameters = load_file(draft / "model.safetensors"), dict(model.named_parameters())
    found, at = [], dict[str, int]()
    for name in sorted(tensors, key=in_fused_order):
        scales = next((tensors[name + end] for end in SCALE_ENDS if name + end in tensors), None)
        if not name.endswith(".weight") or scales is None or scales.dim() != 2:
            continue
        whole = fused(name) if fused(name) in parameters else f"model.{fused(name)}"
        used = next((parameters[whole + end] for end in SCALE_ENDS if whole + end in parameters), None)
        block = getattr(model.get_submodule(whole.rpartition(".")[0]), "weight_block_size", None)
        if used is None or block is None:
            continue
        rows, begin = torch.arange(tensors[name].shape[0]), at.get(whole, 0)
        at[whole] = begin + len(rows)
        if not torch.equal(used[(begin + rows) // block[0]], scales[rows // block[0]]):
            found.append(name)
    return found


def in_fused_order(name: str) -> tuple[str, int]:
    """Sort q before k before v, and gate before up."""
    parts = name.split(".")
    return fused(name), next((at for at, part in enumerate(FUSED) if part in parts), 0)


def packed_weights(draft: Path) -> list[str]:
    """Names of stored weights with packed elements."""
    from safetensors import safe_open

    with safe_open(draft / "model.safetensors", "pt") as file:
        weights = [name for name in file.keys() if name.endswith(".weight")]  # noqa: SIM118
        return [name for name in weights if file.get_slice(name).get_dtype() not in ("BF16", "F16", "F32")]


FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip


def fused(name: str) -> str:
    """The name of the parameter that holds a stored tensor."""
    return ".".join(FUSED.get(part, part) for part in name.split("."))


def short(name: str) -> str:
    """A parameter's name without prefixes and number of the layer."""
    return ".".join(part for part in name.split(".") if not part.isdigit() and part not in ("model", "layers"))


def of_vllm(model: Any, config: Any, draft: Path) -> Reading:
    """The tensors that vLLM's model lacks after loading."""
    return of_model(model, draft)


def of_zlab(model: Any, config: Any, draft: Path) -> Reading:
    """The packed matrices that z-lab's model holds as plain numbers."""
    plain = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    return {"misread": sorted({short(name) for name in packed_weights(draft) if name in plain})}


def plain_of(found: Mapping[str, Reading]) -> Reading:
    """The reading of a draft that is packed as a whole, by which the file states the others."""
    return next((found[name] for name in BASES if "stops" not in found.get(name, {"stops": ""})), {})


BASES = ("native, fp8 tensor, all", "native, fp8 block, all", "native, modelopt fp8, plain tensors")


def is_read(case: quantised_cases.QuantisedCase, engine: str) -> bool:
    """Whether the engine is asked.

    Only vLLM reads the speculators dialect. z-lab's package lacks the packages for the methods that transformers knows.
    """
    is_native = case.base == "native"
    return engine == "vllm" or (is_native and (engine == "sglang" or case.is_unknown_to_transformers))


RECORDER = Recorder(
    description=__doc__,
    engines={
        "vllm": ("vllm", partial(engine_loaders.start_vllm, of_vllm, mark, on_gpu=True), "vllm"),
        "sglang": ("sglang", partial(engine_loaders.start_sglang, of_vllm, mark), "sglang 0.5.23"),
        "zlab": ("dflash", partial(engine_loaders.start_zlab, of_zlab), "z-lab 0.1.0"),
    },
    cases=quantised_cases.all_cases(),
    is_read=is_read,
    stem_of=lambda case: "draft",
    plain_of=plain_of,
    base_of=lambda plain, name: plain,
    write=write,
)

if __name__ == "__main__":
    RECORDER.main()
