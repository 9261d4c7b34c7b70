"""The settings of DFlash 2 and DSpark drafts as engines read them, and what their tensors must fit."""

from collections.abc import Mapping
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import real, whole
from dflash_cli.formats.fields import SELECTOR_FIELDS as FIELDS
from dflash_runtime.draft_config import ConvolutionConfig, MarkovConfig, SelectorConfig
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import is_int


def read_selector(stated: Mapping[str, Any], place: str = "") -> dict[str, int]:
    """The four settings of DFlash 2, each as `int` of its key.

    place  the beginning of the key's name in messages

    Raises:
        EngineStops: a key is missing or no number, or the settings make no convolution or no choice of tokens.
    """
    found = {key: whole(f"{place}{key}", stated.get(key)) for key in FIELDS}
    wrong = next((key for key, value in found.items() if value < 1), None)
    if wrong is not None:
        raise EngineStops(f"{place}{wrong}", f"found {found[wrong]}, expected a positive integer")
    return found


def selector_parts(own: Mapping[str, int], found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `DraftConfig` that the tensors of DFlash 2 depend on, for `check_shapes`.

    own    the four settings as the engine reads them; a kernel of 0 rows switches the convolution off
    found  the keys as the config class fills them in

    Raises:
        EngineStops: the kernels do not divide the hidden size.
    """
    kernel, group, rank, top_k = (own[key] for key in FIELDS)
    if group and found["hidden_size"] % group:
        raise EngineStops(FIELDS[1], f"{group} does not divide the hidden size {found['hidden_size']}")
    return {
        "vocab_size": found["vocab_size"],
        "draft_vocab_size": found["vocab_size"],
        "convolution": ConvolutionConfig(kernel_size=kernel, group_size=group) if kernel else None,
        "selector": SelectorConfig(rank=rank, top_k=top_k),
    }


def markov_parts(rank: int, head_type: str, found: Mapping[str, Any], draft_vocab_size: int) -> dict[str, Any]:
    """The fields of a `DraftConfig` that the tensors of a Markov head depend on, for `check_shapes`.

    Raises:
        EngineStops: no head has this rank or type.
    """
    try:
        markov = MarkovConfig(rank=rank, head_type=head_type) if rank else None
    except InvalidConfig as error:
        raise EngineStops(error.field or "markov_rank", f"found {error.found!r}") from error
    return {"vocab_size": found["vocab_size"], "draft_vocab_size": draft_vocab_size, "markov": markov}


def read_logits(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The scale and the soft cap of the logits, as fields of `EngineReading`. A cap of 0 or less is off.

    Raises:
        EngineStops: the scale or the cap is not a number.
    """
    cap = real("final_logit_softcapping", stated.get("final_logit_softcapping") or 0.0)
    return {
        "output_multiplier": real("output_multiplier", stated.get("output_multiplier", 1.0)),
        "final_logit_softcapping": cap if cap > 0 else None,
    }


def check_top_k(top_k: Any, num_tokens: int) -> None:
    """Require as many candidates as there are tokens, or fewer.

    Raises:
        EngineStops: `top_k` is not an integer from 1 to `num_tokens`, so the first step stops.
    """
    if top_k is not None and not (is_int(top_k) and 1 <= top_k <= num_tokens):
        raise EngineStops("dspark_draft_topk", f"found {top_k!r}, expected an integer from 1 to {num_tokens}")
