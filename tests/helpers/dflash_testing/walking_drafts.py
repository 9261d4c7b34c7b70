"""Drafts that walk, made from the bundled drafts: DFlash 2 and DSpark drafts that the target accepts at times."""

import atexit
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_cli.checkpoints.opening import DraftCheckpoint, open_draft
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.draft_config import ConvolutionConfig, DraftConfig, MarkovConfig, SelectorConfig
from dflash_runtime.drafts.draft import Draft, build_draft, load_draft
from dflash_runtime.models.target import Target
from dflash_runtime.models.weights import stack_projections
from dflash_testing.lifted_drafts import Lift, Spark, confidence_tensors, lift, markov_tensors
from dflash_testing.pairs import bundled_draft, bundled_draft_model, bundled_target_model, placement

FOLDERS = {"tiny": "draft", "tiny:reduced": "draft-reduced"}
KINDS: dict[str, Lift | Spark] = {
    "dflash2": Lift(67, 0.02, kernel_size=2, group_size=48, rank=16, top_k=5, block_size=8),
    "dspark": Spark(19, 0.5, "rnn", rank=7, block_size=8, samples_from_anchor=False, top_k=None),
    "anchor-first": Spark(35, 2.0, "gated", rank=7, block_size=8, samples_from_anchor=True, top_k=50),
}
"""Names of drafts that walk. The DSpark draft in the fill-in layout has a reduced vocabulary."""

BASES = {"dspark": "tiny:reduced"}
"""The bundled drafts that KINDS are made of, if not `tiny`."""

ALL = ("tiny", *KINDS)


def sample_of_all(*names: str) -> list[Any]:
    """ALL as parameters of a test; drafts other than `tiny` and `names` are slow."""
    return [pytest.param(name, marks=() if name in ("tiny", *names) else pytest.mark.slow) for name in ALL]


@cache
def files(name: str = "tiny") -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The config and the tensors of a bundled draft."""
    folder = tiny_directory() / FOLDERS[name]
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def lifted_config(case: Lift) -> DraftConfig:
    """The config of the bundled draft with the parts of DFlash 2."""
    layers = bundled_draft().config.num_layers
    return replace(
        bundled_draft().config,
        family="dflash2",
        block_size=case.block_size,
        convolution=ConvolutionConfig(kernel_size=case.kernel_size, group_size=case.group_size),
        selector=SelectorConfig(rank=case.rank, top_k=case.top_k),
        windows=(24 if case.is_windowed else None,) * layers,
        causal=(False,) * layers,
        **case.changes,  # type: ignore[arg-type]
    )


def spark_config(case: Spark, base: str = "tiny") -> DraftConfig:
    """The config of a bundled draft with a Markov head and a confidence head."""
    return replace(
        bundled_draft(base).config,
        family="dspark",
        block_size=case.block_size,
        sample_from_anchor=case.samples_from_anchor,
        markov=MarkovConfig(rank=case.rank, head_type=case.head_type, top_k=case.top_k),
        has_confidence=True,
        confidence_reads_token=case.confidence_reads_token,
    )


def parts_of(case: Lift | Spark, base: str = "tiny") -> tuple[DraftConfig, dict[str, Tensor]]:
    """The config and the float32 tensors of a draft that walks."""
    if isinstance(case, Lift):
        config, (_, found) = lifted_config(case), lift(*files(base), case)  # type: ignore[arg-type]
    else:
        config = spark_config(case, base)
        markov = markov_tensors(case, config.hidden_size, config.vocab_size)
        if config.has_reduced_vocab:
            markov["markov_w2.weight"] = markov["markov_w2.weight"][: config.draft_vocab_size].clone()
        heads = {"markov_head": markov, "confidence_head": confidence_tensors(case, config.hidden_size)}
        own = {f"{head}.{name}": tensor for head, parts in heads.items() for name, tensor in parts.items()}
        found = {**files(base)[1], **own}
    shapes = owned_shapes(config)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in found.items() if name in shapes}
    return config, {name: found[name].float() if found[name].is_floating_point() else found[name] for name in shapes}


def walking_draft(
    case: Lift | Spark,
    dtype: torch.dtype = torch.float32,
    base: str = "tiny",
    target: Target | None = None,
    **changes: Any,
) -> Draft:
    """A draft that walks, bound to the bundled target. `changes` replace values of its config."""
    config, tensors = parts_of(case, base)
    typed = ((name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in tensors.items())
    bound = bundled_target_model(dtype) if target is None else target
    return build_draft(replace(config, **changes), stack_projections(typed), bound, placement(dtype))


def draft_model(
    name: str = "tiny", dtype: torch.dtype = torch.float32, target: Target | None = None, **changes: Any
) -> Draft:
    """A bundled draft, or one of KINDS, bound to the bundled target or to a hosted copy of it."""
    if name in KINDS:
        return walking_draft(KINDS[name], dtype, BASES.get(name, "tiny"), target, **changes)
    if target is None:
        return bundled_draft_model(name, dtype, **changes)
    return load_draft(bundled_draft(name).source, target, placement(dtype))


def config_of(kind: str) -> dict[str, Any]:
    """The config.json of one of KINDS: native, or of speculators for a draft with a reduced vocabulary."""
    case, base = KINDS[kind], BASES.get(kind, "tiny")
    if isinstance(case, Lift):
        return lift(*files(), case)[0]  # type: ignore[arg-type]
    config = dict(files(base)[0])
    config |= {
        "markov_rank": case.rank,
        "markov_head_type": case.head_type,
        "dspark_draft_topk": case.top_k,
        "enable_confidence_head": True,
        "confidence_head_with_markov": case.confidence_reads_token,
        "sample_from_anchor": case.samples_from_anchor,
    }
    if case.top_k is None:
        del config["dspark_draft_topk"]
    is_native = "speculators_model_type" not in config
    return config | ({"architectures": ["Qwen3DSparkModel"]} if is_native else {"speculators_model_type": "dspark"})


@cache
def walking_folder(kind: str) -> Path:
    """A folder with the checkpoint of one of KINDS in bfloat16. It is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="walking-draft-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(config_of(kind)))
    _, tensors = parts_of(KINDS[kind], BASES.get(kind, "tiny"))
    stored = {name: tensor if is_wide(name, tensor) else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def is_wide(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is not stored in bfloat16: an id map, or the confidence head."""
    return not tensor.is_floating_point() or name.startswith("confidence_head")


def stored_draft(name: str) -> DraftCheckpoint:
    """The checkpoint of a bundled draft, or of one of KINDS."""
    return open_draft(walking_folder(name)) if name in KINDS else bundled_draft(name)
