"""Projections that engines load in part or extend by zeros, because the config states other sizes than the file has.

An engine splits a projection between its ranks along one axis, the outputs of q, k, v, gate and up, and the inputs of o
and down. Along this axis vLLM and SGLang take the part of their rank without a check of the stored size.
Source: vLLM 0.33.0 layers/linear.py weight_loader; SGLang 0.5.23 layers/linear.py:528, :864, :1329, :1695 and
layers/utils/common.py:20. Run on the cases of tests/golden/engine_verdicts.json.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_cli.rules.subject import Subject

MLP = ("gate_proj", "up_proj", "down_proj")
BY_INPUT = ("o_proj", "down_proj")
"""Projections that engines split by columns. They split the others by rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialLoads:
    """Names of the tensors that an engine loads with another size than the file has.

    cut     the engine takes the first rows or columns
    padded  the engine adds rows or columns of zeros
    """

    cut: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()


def partial_loads(found: Mapping[str, Any], subject: Subject, *, padding: Collection[str] = ()) -> PartialLoads:
    """The projections with other sizes in the file than in the resolved config.

    padding  the projections that the engine extends by zeros; it stops at the other ones if they are too small
    """
    width, inner = found["hidden_size"], found["intermediate_size"]
    queries, keys = (found[key] * found["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    split = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries, **dict.fromkeys(MLP, inner)}
    cut, padded = [], []
    for name, info in (subject.tensors or {}).items():
        module, _, kind = name.rpartition(".")
        part, shape = module.rpartition(".")[2], tuple(info.shape)
        if part not in split or not _is_loaded(kind, part, found) or len(shape) != (1 if kind == "bias" else 2):
            continue
        size, *other = shape[::-1] if part in BY_INPUT else shape
        if other in ([], [width]) and size > split[part]:
            cut.append(name)
        elif other == [width] and size < split[part] and part in padding:
            padded.append(name)
    return PartialLoads(cut=tuple(sorted(cut)), padded=tuple(sorted(padded)))


def _is_loaded(kind: str, part: str, found: Mapping[str, Any]) -> bool:
    """Whether the engine splits a projection's tensor of this kind. The bias of o is whole, and the others may lack."""
    return kind == "weight" or (kind == "bias" and part in ("q_proj", "k_proj", "v_proj") and found["attention_bias"])


def changes_nothing(padded: Collection[str], subject: Subject) -> bool:
    """Whether the added zeros leave the product of every layer unchanged: gate, up and down are equally small."""
    tensors = subject.tensors or {}
    by_layer: dict[str, dict[str, int]] = {}
    for name in padded:
        layer, part = name.removesuffix(".weight").rpartition(".")[::2]
        by_layer.setdefault(layer, {})[part] = tensors[name].shape[part in BY_INPUT]
    return all(sizes.keys() == set(MLP) and len(set(sizes.values())) == 1 for sizes in by_layer.values())
