"""Record what engines' own code makes of drafts that N GPUs share, for tests/behaviour/test_split_verdicts.py.

The drafts are the cases of `dflash_testing.split_cases`. `engine_verdicts` and `quantised_verdicts` tell how to install
the engines.

One process builds the draft of each rank in turn: the engine's groups of ranks say that there are N. Layers, loaders
and checks are the engine's own. No rank computes, so the collectives are not called. A draft "drops" if a rank's
parameters keep their bytes, if a row gets another scale than in the file, or if a part has too few scales.

    env/bin/python tests/golden/split_verdicts.py vllm engines/vllm-0.33.0 tests/golden/split_verdicts.json
    env/bin/python tests/golden/split_verdicts.py sglang engines/sglang tests/golden/split_verdicts.json
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_loaders
from filled_parameters import mark, unfilled
from seen_gpu import hopper_of
from stand_ins import with_stand_ins

from dflash_testing import checkpoints as support
from dflash_testing.split_cases import PACKINGS, SplitCase, all_cases

Build = Callable[[Path, Path, int], list[Any]]
"""(draft, target, N) -> the loaded model of each rank."""
UNNEEDED = ("lm_head.", "model.embed_tokens.", "model.mask_embedding")
"""Parameters that a draft leaves to the target."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",), "gate_up_proj": ("gate_proj", "up_proj"),
         "down_proj": ("down_proj",)}  # fmt: skip


def start_vllm() -> Build:
    """vLLM: the checks of its configs, its model of the draft, and its loader."""
    import torch
    import vllm.config.vllm
    import vllm.distributed.parallel_state as state
    import vllm.model_executor.models.registry as registry
    import vllm.platforms as platforms
    from vllm.config import (
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms.cpu import CpuPlatform

    vllm.config.vllm.HAS_TRITON = True
    registry._run_in_subprocess = lambda function: function()
    platforms._current_platform = hopper_of(CpuPlatform)()
    time.sleep = lambda seconds: None
    device = DeviceConfig(device="cpu")
    with set_current_vllm_config(VllmConfig(device_config=device)):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
        initialize_model_parallel(1)

    def be_rank(rank: int, size: int) -> None:
        state.get_tp_group().rank_in_group, state.get_tp_group().world_size = rank, size

    def build(draft: Path, target: Path, size: int) -> list[Any]:
        be_rank(0, 1)
        config = ModelConfig(model=str(target), tokenizer=str(target), max_model_len=128, dtype="bfloat16")
        parallel = ParallelConfig(tensor_parallel_size=size, distributed_executor_backend="mp")
        speculative = SpeculativeConfig(
            model=str(draft), method="dflash", num_speculative_tokens=3, target_model_config=config,
            target_parallel_config=parallel,
        )  # fmt: skip
        whole = VllmConfig(model_config=config, speculative_config=speculative, device_config=device)
        drafted, models = speculative.draft_model_config, []
        found, _ = registry.ModelRegistry.resolve_model_cls(drafted.hf_config.architectures, drafted)
        torch.set_default_dtype(torch.bfloat16)
        for rank in range(size):
            be_rank(rank, size)
            whole.compilation_config.static_forward_context.clear()
            with set_current_vllm_config(whole):
                models.append(found(vllm_config=whole))
                mark(models[-1])
                models[-1].load_weights(engine_loaders.weights_of(draft))
        return models

    return build


def start_sglang() -> Build:
    """SGLang: its config of the draft, its model with its parallel layers, and its loader. Attention is a stand-in."""
    import torch

    engine_loaders.let_sglang_import()
    import sglang.srt.models.dflash as dflash
    import vllm  # noqa: F401 a stand-in
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config
    from sglang.srt.model_loader.utils import get_model_architecture

    class Attention(torch.nn.Module):
        def __init__(self, **given: Any) -> None:
            super().__init__()

    dflash.RadixAttention = Attention
    ranks = SimpleNamespace()

    def be_rank(rank: int, size: int) -> None:
        group = SimpleNamespace(rank_in_group=rank, world_size=size)
        for prefix in ("", "attn_"):
            vars(ranks).update({f"{prefix}tp_size": size, f"{prefix}tp_rank": rank, f"{prefix}tp_group": group})

    def build(draft: Path, target: Path, size: int) -> list[Any]:
        parsed = ModelConfig(
            model_path=str(draft), is_draft_model=True, speculative_algorithm="DFLASH", dtype="bfloat16"
        )
        found, _ = get_model_architecture(parsed)
        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.srt.") and name != "sglang.srt.runtime_context":
                vars(module).update({"get_parallel": lambda: ranks} if "get_parallel" in vars(module) else {})
        torch.set_default_dtype(torch.bfloat16)
        models = []
        for rank in range(size):
            be_rank(rank, size)
            models.append(found(parsed.hf_config, quant_config=_get_quantization_config(parsed, LoadConfig())))
            mark(models[-1])
            models[-1].load_weights(engine_loaders.weights_of(draft))
        return models

    return build


def write(draft: Path, case: SplitCase) -> None:
    """Write a draft with tensors of ones, and with a number of its own for each scale of a block."""
    import torch
    from safetensors.torch import save_file

    types = {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16,
             "F16": torch.float16, "F32": torch.float32}  # fmt: skip
    draft.mkdir()
    support.write_config(draft, case.config)
    tensors = {name: torch.ones(shape).to(types[kind]) for name, (kind, shape) in case.tensors.items()}
    for at, tensor in enumerate(item for item in tensors.values() if item.dtype == torch.float32):
        tensor += torch.arange(tensor.numel()).view(tensor.shape) / 64 + 100 * at
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})


def is_misread(models: list[Any], draft: Path, case: SplitCase) -> bool:
    """Whether a parameter keeps its bytes, or a rank multiplies a part by other scales than those of the file."""
    for model in models:
        for name, parameter in model.named_parameters():
            is_needed = not name.startswith(UNNEEDED) and ".attn." not in name
            if is_needed and unfilled(parameter).any():
                return True
    if not case.packing:
        return False
    return any(has_other_scales(model, rank, draft, case) for rank, model in enumerate(models))


def has_other_scales(model: Any, rank: int, draft: Path, case: SplitCase) -> bool:
    """Whether a part of a rank has other scales than in the file. A group of columns is known by its number only."""
    import torch
    from safetensors.torch import load_file

    tensors, parameters = load_file(draft / "model.safetensors"), dict(model.named_parameters())
    block = PACKINGS[case.packing].block
    for fused, names in FUSED.items():
        end = next(end for end in ("weight_scale_inv", "weight_scale", "scales")
                   if any(name.endswith(f".{fused}.{end}") for name in parameters))  # fmt: skip
        used = next(parameter for name, parameter in parameters.items() if name.endswith(f".{fused}.{end}"))
        if block[0] == 1:
            columns = {"o_proj": case.heads * case.head_dim, "down_proj": case.inner}.get(fused)
            num_groups = used.shape[0] if end == "scales" else used.shape[1]
            if columns is not None and num_groups * block[1] != columns // case.num_gpus:
                return True
            continue
        begin = 0
        for name in names:
            stored = next(tensor for key, tensor in tensors.items() if key.endswith(f".{name}.{end}"))
            rows, columns_of = part_of(name, rank, case)
            own = (begin + torch.arange(len(rows))) // block[0]
            begin += len(rows)
            numbers = torch.arange(len(columns_of)) // block[1]
            if own.max() >= used.shape[0]:
                return True
            wanted = stored[torch.tensor(rows) // block[0]][:, torch.tensor(columns_of) // block[1]]
            if not torch.equal(used[own][:, numbers].float(), wanted.float()):
                return True
    return False


def part_of(name: str, rank: int, case: SplitCase) -> tuple[range, range]:
    """The rows and columns of a matrix that a rank holds."""
    hidden, size = case.shape.hidden, case.num_gpus
    heads, width = case.heads * case.head_dim // size, case.inner // size
    if name in ("o_proj", "down_proj"):
        part = heads if name == "o_proj" else width
        return range(hidden), range(rank * part, (rank + 1) * part)
    part = {"q_proj": heads, "gate_proj": width, "up_proj": width}.get(name, 0)
    if not part:  # keys and values, whose heads several ranks may share
        part, rank = max(1, case.kv_heads // size) * case.head_dim, rank // max(1, size // case.kv_heads)
    return range(rank * part, (rank + 1) * part), range(hidden)


def outcome_of(build: Build, case: SplitCase, folder: Path) -> str:
    """`serves`, `drops`, or `stops: ERROR`. Each case needs a new folder: SGLang remembers configs by their paths."""
    draft, target = folder / "dflash-draft", folder / "target"
    folder.mkdir()
    write(draft, case)
    target.mkdir()
    support.write_config(target, {**support.target_config(case.shape), "dtype": "bfloat16", "bos_token_id": 1})
    try:
        return "drops" if is_misread(build(draft, target, case.num_gpus), draft, case) else "serves"
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:
        return f"stops: {type(error).__name__}"
    finally:
        import torch

        torch.set_default_dtype(torch.float32)
        shutil.rmtree(folder)


def main() -> None:
    """Let one engine load every case, and replace its entry in the file."""
    engine, code, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    sys.path.insert(0, str(code))
    build = with_stand_ins({"vllm": start_vllm, "sglang": start_sglang}[engine], engine)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, case) in enumerate(all_cases().items()):
            with Path(os.devnull).open("w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
                outcome = outcome_of(build, case, Path(folder) / str(index))
            found.setdefault(outcome, []).append(name)
    entry = f"vllm {code.name.partition('-')[2]}" if engine == "vllm" else "sglang 0.5.23"
    document = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    document[entry] = dict(sorted(found.items()))
    output.write_text(json.dumps(dict(sorted(document.items())), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
