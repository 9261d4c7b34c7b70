"""Small random checkpoints of any shape, in either dialect, written without the code under test."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Json = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]
Shapes = dict[str, tuple[int, ...]]

REMOVED: Any = object()
"""Given for a config key: leave it out."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a draft and of the target it belongs to. `draft_vocab` below `vocab` means a reduced head."""

    hidden: int = 16
    inner: int = 24
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 32
    draft_vocab: int = 32
    taps: tuple[int, ...] = (0, 2)
    target_layers: int = 4
    block: int = 4
    mask: int = 31
    bias: bool = False
    windows: tuple[int | None, ...] = field(default=(None, None))
    theta: float = 1000000.0


SMALL = Shape()
REDUCED = Shape(draft_vocab=12)


def body_config(shape: Shape) -> Json:
    """The decoder keys that both dialects share."""
    sizes = [window for window in shape.windows if window is not None]
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": shape.bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in shape.windows],
        "sliding_window": sizes[0] if sizes else None,
        "use_sliding_window": bool(sizes),
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def native_config(shape: Shape = SMALL, **changes: Any) -> Json:
    """A native config; `changes` replace top-level keys, and `REMOVED` takes one out."""
    config = {
        "architectures": ["DFlashDraftModel"],
        **body_config(shape),
        "block_size": shape.block,
        "num_target_layers": shape.target_layers,
        "is_causal": False,
        "dflash_config": {"mask_token_id": shape.mask, "target_layer_ids": list(shape.taps)},
    }
    return _changed(config, changes)


def speculators_config(shape: Shape = SMALL, **changes: Any) -> Json:
    """A speculators config as release 0.9 writes it; `changes` as for `native_config`."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.block - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "acme/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": body_config(shape),
        "draft_vocab_size": shape.draft_vocab,
        "block_size": shape.block,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
        "mask_token_id": shape.mask,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
    }
    return _changed(config, changes)


def target_config(shape: Shape = SMALL, **changes: Any) -> Json:
    """A Qwen3 target that fits the draft."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        **body_config(replace(shape, layers=shape.target_layers, windows=(None,) * shape.target_layers)),
        "eos_token_id": 1,
    }
    return _changed(config, changes)


def body_shapes(shape: Shape) -> Shapes:
    """The tensors every draft owns."""
    shapes: Shapes = {
        "fc.weight": (shape.hidden, len(shape.taps) * shape.hidden),
        "hidden_norm.weight": (shape.hidden,),
        "norm.weight": (shape.hidden,),
    }
    for layer in range(shape.layers):
        shapes |= {f"layers.{layer}.{name}": size for name, size in _layer_shapes(shape).items()}
    return shapes


def body_arrays(shape: Shape = SMALL, seed: int = 0) -> Arrays:
    """Values for them."""
    return random_arrays(body_shapes(shape), seed)


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    """Normal float32 arrays, norms near one."""
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(size) * 0.1 + (1.0 if "norm" in name else 0.0)).astype(np.float32)
        for name, size in shapes.items()
    }


def target_arrays(shape: Shape = SMALL, seed: int = 1) -> Arrays:
    """A whole Qwen3 target with an embedding and a head of its own."""
    layers = {
        f"model.layers.{layer}.{name}": size
        for layer in range(shape.target_layers)
        for name, size in _layer_shapes(shape).items()
    }
    rows = (shape.vocab, shape.hidden)
    return random_arrays(
        {"model.embed_tokens.weight": rows, "lm_head.weight": rows, "model.norm.weight": (shape.hidden,), **layers},
        seed,
    )


def kept_ids(shape: Shape) -> np.ndarray[Any, Any]:
    """The target ids a reduced draft keeps: the stop token and others spread over the vocabulary, ascending."""
    spread = np.linspace(3, shape.vocab - 2, shape.draft_vocab - 2).astype(np.int64)
    return np.concatenate([np.arange(2, dtype=np.int64), spread])


def reduced_arrays(shape: Shape, target: Arrays) -> Arrays:
    """A head cut from the target's, with its id map."""
    ids = kept_ids(shape)
    mask = np.zeros(shape.vocab, dtype=np.bool_)
    mask[ids] = True
    return {
        "lm_head.weight": target["lm_head.weight"][ids],
        "d2t": ids - np.arange(shape.draft_vocab, dtype=np.int64),
        "t2d": mask,
    }


def write_checkpoint(path: Path, config: Json, arrays: Arrays, *, metadata: Mapping[str, str] | None = None) -> Path:
    """A directory with one safetensors file."""
    path.mkdir(parents=True, exist_ok=True)
    write_config(path, config)
    save_file(arrays, path / "model.safetensors", metadata={"format": "pt", **(metadata or {})})
    return path


def write_config(path: Path, config: Json) -> None:
    """Replace a checkpoint's config."""
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_sharded(path: Path, config: Json, arrays: Arrays, num_shards: int = 2) -> Path:
    """A directory with several safetensors files and their index."""
    path.mkdir(parents=True, exist_ok=True)
    write_config(path, config)
    names = sorted(arrays)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        members = {name: arrays[name] for name in names[shard::num_shards]}
        save_file(members, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    index = {"metadata": {"total_size": sum(array.nbytes for array in arrays.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


def make_native(path: Path, shape: Shape = SMALL, **changes: Any) -> Path:
    """A native draft."""
    return write_checkpoint(path, native_config(shape, **changes), body_arrays(shape))


def make_speculators(path: Path, shape: Shape = SMALL, extra: Arrays | None = None, **changes: Any) -> Path:
    """A speculators draft; a reduced one takes its head from `target_arrays`."""
    reduced = reduced_arrays(shape, target_arrays(shape)) if shape.draft_vocab != shape.vocab else {}
    arrays = {**body_arrays(shape), **reduced, **(extra or {})}
    return write_checkpoint(path, speculators_config(shape, **changes), arrays)


def make_target(path: Path, shape: Shape = SMALL, **changes: Any) -> Path:
    """A target that the drafts of this shape fit."""
    return write_checkpoint(path, target_config(shape, **changes), target_arrays(shape))


def _changed(config: Json, changes: Json) -> Json:
    return {key: value for key, value in {**config, **changes}.items() if value is not REMOVED}


def _layer_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (shape.hidden,),
        "post_attention_layernorm.weight": (shape.hidden,),
        "self_attn.q_proj.weight": (queries, shape.hidden),
        "self_attn.k_proj.weight": (keys, shape.hidden),
        "self_attn.v_proj.weight": (keys, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, queries),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "mlp.gate_proj.weight": (shape.inner, shape.hidden),
        "mlp.up_proj.weight": (shape.inner, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.inner),
    }
    if shape.bias:
        shapes |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
            "self_attn.o_proj.bias": (shape.hidden,),
        }
    return shapes


@cache
def json_junk() -> "SearchStrategy[Any]":
    """Any small JSON value, of a type that a key does not expect as likely as not.

    Characters are all but surrogates, which is Hypothesis's default. The default finds them by encoding each character.
    """
    from hypothesis import strategies as st

    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    return st.recursive(
        st.none() | st.booleans() | st.integers(-3, 70) | st.floats(-2.0, 80.0) | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=2),
        max_leaves=4,
    )


LOGIT_CASES = ("full", "sliding", "sliding causal", "reduced")
"""Pairs for comparisons of draft logits with the logits of speculators' own code."""


def make_logit_case(path: Path, name: str) -> tuple[Path, Path]:
    """The draft and the target of a case; windows are wider than the context."""
    wide = replace(SMALL, windows=(64, 64))
    shape = {"full": SMALL, "sliding": wide, "sliding causal": wide, "reduced": REDUCED}[name]
    target = make_target(path / "target", shape)
    if name == "reduced":
        return make_speculators(path / "draft", shape), target
    return make_native(path / "draft", shape, is_causal=name == "sliding causal"), target


def convert(source: Path, destination: Path, to: str, *, target: Path | None = None, **request: Any) -> dict[str, Any]:
    """Convert and return the manifest that was written."""
    from dflash_cli.checkpoints.opening import open_draft, open_target
    from dflash_cli.conversion.execute import convert_draft
    from dflash_cli.conversion.plan import plan_conversion
    from dflash_cli.conversion.spec import ConversionSpec

    conversion = ConversionSpec(
        to=to,
        target=None if target is None else open_target(target),
        target_reference=None if target is None else str(target),
        **request,
    )
    convert_draft(plan_conversion(open_draft(source), conversion), destination, force=True)
    return dict(json.loads((destination / "conversion.json").read_text(encoding="utf-8")))


def assert_same_tensors(one: Path, other: Path) -> None:
    """Every tensor of two single-file checkpoints is the same, byte for byte."""
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.tobytes() == theirs[name].tobytes(), name
