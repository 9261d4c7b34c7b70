"""The attention of hosted targets: a function that transformers' code calls, and that calls our `Attend`.

The function refuses every argument that our attention does not support.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim, E size of a head's values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_runtime.checkpoint.targets.hf_config import not_run
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.layers import Attend
from dflash_runtime.target_config import TargetConfig

PAGES = "draft_pages"
"""The name of our attention in transformers, without a mask function, so that transformers builds no mask.

transformers would fetch a kernel for any name with "flash" in it.
"""

TRIAL = "draft_trial"
"""The name of the same attention with a mask function, which reports the mask that each layer asks for."""

HARMLESS = frozenset(
    {
        "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions",
        "output_hidden_states", "logits_to_keep",
    }
)  # fmt: skip
"""Arguments of attention calls that do not change the result."""

COMPUTED = frozenset({"scaling", "sliding_window", "is_causal", "softcap", "s_aux"})
"""Arguments of attention calls that our attention applies or checks. `s_aux` are attention sinks."""

WORDS = {"position_bias": "a bias on attention"}
"""Argument that our attention does not support -> its meaning."""

REACH = 2**20
"""The longest text, in tokens, for which the trial compares masks with windows."""

_CALL: ContextVar["HostedAttention"] = ContextVar("dflash_hosted_attention")


@dataclass(frozen=True, slots=True)
class WantedMask:
    """The trial's stand-in for a mask: its window, or None if a row attends to all earlier rows."""

    window: int | None

    def __getitem__(self, rows: object) -> "WantedMask":
        """Return the same mask: models that share K and V between layers cut it to the rows they keep, here all."""
        return self


class Scores(NamedTuple):
    """How a layer turns scores into weights: a factor on its queries beside the usual scaling, and its softmax."""

    factor: float
    softmax: Softmax


@dataclass(slots=True)
class HostedAttention:
    """The attention of one forward: it compares each call with the config and passes it to `attend`.

    reach    in the trial, the length of the text for which masks are compared with windows; otherwise None
    layers   the layers that asked for attention, in order
    scores   how each layer turned its scores into weights
    """

    config: TargetConfig
    attend: Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]
    reach: int | None = None
    layers: list[int] = field(default_factory=list)
    scores: dict[int, Scores] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: object, settings: dict[str, Any]
    ) -> Tensor:
        """Query [1, H, T, D], keys [1, KV, T, D] and values [1, KV, T, E] -> [1, T, H, E]. E is at most D.

        Raises:
            UnsupportedError: the call asks for something that our attention does not support.
        """
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < self.config.num_layers:
            raise self._refused("layer-number", f"an attention layer numbered {layer}")
        self.layers.append(layer)
        self._check_shapes(layer, query, keys, values)
        self._check_settings(module, layer, settings)
        self._check_mask(layer, mask)
        factor, softmax = self.scores[layer] = self._read_scores(layer, settings)
        if factor != 1.0:
            query = query * factor
        size, width = keys.shape[-1], values.shape[-1]
        values = functional.pad(values, (0, size - width))  # pages hold keys and values of one size
        query, keys, values = (heads[0].transpose(0, 1).contiguous() for heads in (query, keys, values))
        return self.attend(layer, query, keys, values, softmax)[None, ..., :width]

    def _check_shapes(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        config = self.config
        num_kv_heads, size = config.kv_shapes[layer]
        wanted = (config.num_heads, num_kv_heads, num_kv_heads)
        for heads, count in zip((query, keys, values), wanted, strict=True):
            is_sized = heads.shape[3] == size or (heads is values and heads.shape[3] < size)
            if heads.shape[:2] != (1, count) or not is_sized:
                found = f"{heads.shape[1]} heads of {heads.shape[3]}, expected {count} of {size}"
                raise self._refused("heads", f"layer {layer} has {found} as in its config")

    def _check_settings(self, module: nn.Module, layer: int, settings: dict[str, Any]) -> None:
        if settings.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise self._refused("later-tokens", f"attention to later tokens in layer {layer}")
        window, expected = settings.get("sliding_window"), self.config.windows[layer]
        if "sliding_window" in settings and window != expected:
            raise self._refused(
                "window", f"a window of {window} in layer {layer}, expected {expected} as in its config"
            )
        for name, value in settings.items():
            is_known = name in HARMLESS or name in COMPUTED
            if not is_known and value is not None and value is not False and not (name == "dropout" and value == 0):
                raise self._refused("setting", f"{WORDS.get(name, 'an attention setting')} ({name}) in layer {layer}")

    def _read_scores(self, layer: int, settings: dict[str, Any]) -> Scores:
        scaling, usual = settings.get("scaling"), self.config.kv_shapes[layer][1] ** -0.5
        cap, sinks = settings.get("softcap"), settings.get("s_aux")
        if sinks is not None and sinks.shape != (self.config.num_heads,):
            raise self._refused("sinks", f"attention sinks of shape {list(sinks.shape)} in layer {layer}")
        return Scores(1.0 if scaling is None else scaling / usual, Softmax(cap or None, sinks))

    def _check_mask(self, layer: int, mask: object) -> None:
        if self.reach is None:
            if mask is not None:
                raise self._refused("own-mask", f"its code makes its own mask in layer {layer}")
            return
        if not isinstance(mask, WantedMask):
            raise self._refused("own-mask", f"its code makes its own mask, or leaves it out, in layer {layer}")
        window = self.config.windows[layer]
        if mask.window != (window if window is not None and window < self.reach else None):
            raise self._refused("mask", f"a mask over {mask.window} tokens in layer {layer}, expected {window}")

    def _refused(self, part: str, why: str) -> UnsupportedError:
        return not_run(self.config.model_type, why, id=f"target-attention-{part}")


@contextmanager
def calling(attention: HostedAttention) -> Iterator[None]:
    """Compute the attention of this thread's forwards with `attention` inside the block."""
    token = _CALL.set(attention)
    try:
        yield
    finally:
        _CALL.reset(token)


def current_attend() -> Attend:
    """Return the attention of this thread's forward."""
    return cast(Attend, _CALL.get().attend)


@cache
def register_attention() -> None:
    """Register our attention with transformers under both names."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (PAGES, TRIAL):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(TRIAL, _find_mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **settings: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls."""
    return _CALL.get()(module, query, key, value, attention_mask, settings), None


def _find_mask(*, mask_function: Callable[..., Tensor], **_: Any) -> WantedMask:
    """Read the window of a mask from transformers' mask function, at the last two rows of a text of REACH tokens."""
    attention = _CALL.get()
    assert attention.reach is not None, "masks are read only in the trial"
    windows = {_seen(mask_function, row) for row in (attention.reach - 2, attention.reach - 1)}
    if len(windows) != 1 or min(window or 0 for window in windows) < 0:
        why = "its mask is not a window of earlier tokens"
        raise not_run(attention.config.model_type, why, id="target-attention-mask")
    return WantedMask(windows.pop())


def _seen(mask_function: Callable[..., Tensor], row: int) -> int | None:
    """Return how many tokens a row attends to, itself included.

    None means all earlier tokens. A negative number means that the tokens are not the most recent ones.
    """
    zero, rows = torch.tensor(0), torch.arange(row + 2)
    sees = torch.as_tensor(mask_function(zero, zero, torch.tensor(row), rows)).expand(len(rows))
    count = int(sees.sum())
    if not torch.equal(sees, (rows <= row) & (rows > row - count)):
        return -count
    return None if count == row + 1 else count


def reach_of(config: TargetConfig) -> int:
    return max(2, min(config.max_position_embeddings, REACH))


class OwnValues(Attend):
    """An `Attend` in which each row attends only to itself, with a trace of its position."""

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """[T, H, D], [T, KV, D] twice -> [T, H, D]."""
        num_groups = query.shape[1] // keys.shape[1]
        return values.repeat_interleave(num_groups, dim=1) + 0.1 * (query + keys.repeat_interleave(num_groups, dim=1))

    read = __call__

    def place(self, layer: int) -> None:
        """Store no keys and values."""
        return

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """Never called: hosted targets over pages lack recurrent layers."""
        raise NotImplementedError
