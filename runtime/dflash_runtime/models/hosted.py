"""Hosted targets: transformers' own modelling code over our pages, for targets without a native family.

The model gets one flat batch of rows with their positions, and neither cache nor mask. Its attention calls a function
that this module registers with transformers. The function passes a layer's queries, keys and values to our `Attend`,
and refuses every argument that our attention does not support. After loading, a trial checks three assumptions:

* Every layer asks for attention once, with the window in its config.
* A row depends on other rows only through attention.
* The head gives the model's own logits.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim, F feature width, V vocabulary.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dflash_kernels.block_attention import PLAIN, Softmax
from dflash_runtime.checkpoint.hf_config import not_run
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import TargetConfig
from dflash_runtime.errors import DFlashError, UnsupportedError
from dflash_runtime.models.hosted_loading import first_line, load_model, parameter_of, quietly
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.placement import Placement

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

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

LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config keys for a soft cap on the logits."""

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config keys for a factor on the logits."""

DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config keys for a divisor of the logits."""

NO_ID = -1e4
"""The logit of a padding row of the head: small enough that it is never chosen, and finite in every dtype."""

REACH = 2**20
"""The longest text, in tokens, for which the trial compares masks with windows."""

_CALL: ContextVar["HostedAttention"] = ContextVar("dflash_hosted_attention")


@dataclass(frozen=True, slots=True)
class ScaledHead(Linear):
    """A head that multiplies its logits, then caps them: `cap * tanh(logits / cap)`.

    Rows from `num_ids` on are padding.
    """

    multiplier: float = 1.0
    cap: float | None = None
    num_ids: int | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, V]."""
        logits = Linear.__call__(self, hidden)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.num_ids is not None:
            logits[:, self.num_ids :] = NO_ID
        return logits


@dataclass(frozen=True, slots=True)
class WantedMask:
    """The trial's stand-in for a mask: its window, or None if a row attends to all earlier rows."""

    window: int | None

    def __getitem__(self, rows: object) -> "WantedMask":
        """Return the same mask: models that share K and V between layers cut it to the rows they keep, here all."""
        return self


@dataclass(slots=True)
class HostedAttention:
    """The attention of one forward: it compares each call with the config and passes it to `attend`.

    reach    in the trial, the length of the text for which masks are compared with windows; otherwise None
    layers   the layers that asked for attention, in order
    """

    config: TargetConfig
    attend: Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]
    reach: int | None = None
    layers: list[int] = field(default_factory=list)

    def __call__(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: object, settings: dict[str, Any]
    ) -> Tensor:
        """Query [1, H, T, D], keys and values [1, KV, T, D] -> [1, T, H, D].

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
        scaling = settings.get("scaling")
        usual = self.config.kv_shapes[layer][1] ** -0.5
        if scaling is not None and scaling != usual:
            query = query * (scaling / usual)
        query, keys, values = (heads[0].transpose(0, 1).contiguous() for heads in (query, keys, values))
        return self.attend(layer, query, keys, values, self._read_softmax(layer, settings))[None]

    def _check_shapes(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        config = self.config
        num_kv_heads, size = config.kv_shapes[layer]
        wanted = (config.num_heads, num_kv_heads, num_kv_heads)
        for heads, count in zip((query, keys, values), wanted, strict=True):
            if (heads.shape[0], heads.shape[1], heads.shape[3]) != (1, count, size):
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

    def _read_softmax(self, layer: int, settings: dict[str, Any]) -> Softmax:
        cap, sinks = settings.get("softcap"), settings.get("s_aux")
        if sinks is not None and sinks.shape != (self.config.num_heads,):
            raise self._refused("sinks", f"attention sinks of shape {list(sinks.shape)} in layer {layer}")
        return Softmax(cap or None, sinks)

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


class TransformersTarget:
    """A decoder of transformers' code: its embedding, head and layers, and a forward with taps.

    `entry` is the device on which rows enter the model. `code_config` is the text model's config, which the code reads.
    """

    follows_from_shapes: ClassVar[bool] = False

    def __init__(
        self, config: TargetConfig, model: "PreTrainedModel", decoder: nn.Module, placement: Placement
    ) -> None:
        self.config = config
        text: PretrainedConfig = model.config.get_text_config(decoder=True)
        self.code_config: dict[str, Any] = json.loads(json.dumps(text.to_dict(), default=str), parse_constant=str)
        self._device = placement.device
        self.embedding: Tensor = parameter_of(model.get_input_embeddings(), "weight", placement.device)
        self.head: Linear = read_head(config, model, placement)
        self._decoder = decoder
        first = next(model.get_input_embeddings().parameters()).device
        self.entry = placement.device if first.type == "meta" else first
        self._layers = find_layers(config, decoder)

    @property
    def embedding_scale(self) -> float:
        """See `models.target.TargetEnds`."""
        return self.config.embedding_scale

    def _run_decoder(self, token_ids: Tensor, taps: Sequence[int], **given: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Token ids [T] -> hidden states [T, hidden], features [T, F] and the decoder's whole output."""
        outputs: dict[int, Tensor] = {}
        hooks = [self._layers[tap].register_forward_hook(partial(keep_output, outputs, tap)) for tap in set(taps)]
        try:
            output = self._decoder(input_ids=token_ids[None].to(self.entry), **given)
        finally:
            for hook in hooks:
                hook.remove()
        features = torch.cat([outputs[tap].to(self._device) for tap in taps], dim=-1) if taps else None
        return output.last_hidden_state[0].to(self._device), features, output


class HostedTarget(TransformersTarget):
    """A decoder of transformers as a target; see `models.target.Target`. Attention, KV and sampling are ours."""

    def __init__(self, config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> None:
        super().__init__(config, model, model.get_decoder(), placement)
        self._is_spread = placement.spread is not None

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.target.Target`. A tap on the last layer gives the residual before the final norm."""
        attended = _attend_on(self._device, attend) if self._is_spread else attend
        hidden, features = self.run(token_ids, positions, HostedAttention(self.config, attended), taps)
        return hidden if wanted is None else hidden[wanted], features

    def run(
        self, token_ids: Tensor, positions: Tensor, attention: HostedAttention, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward with this attention -> hidden states [T, hidden] and features [T, F]."""
        with calling(attention):
            hidden, features, _ = self._run_decoder(
                token_ids, taps, position_ids=positions[None].to(self.entry), use_cache=False
            )
        return hidden, features


def _attend_on(device: torch.device, attend: Attend) -> Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]:
    """Return attention on the device that has the pages, for layers on any device."""

    def attended(layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        sinks = None if softmax.sinks is None else softmax.sinks.to(device)
        rows = attend(layer, query.to(device), keys.to(device), values.to(device), replace(softmax, sinks=sinks))
        return rows.to(query.device)

    return attended


def load_hosted(source: TargetSource, config: TargetConfig, placement: Placement) -> HostedTarget:
    """Load a target through transformers, from safetensors only, and try it out.

    Raises:
        UnsupportedError: quantised weights, or a model that asks for something our attention does not support.
        CheckpointError: tensors are missing or misshapen, or transformers does not load them.
    """
    register_attention()
    model = load_model(source, config, placement, TRIAL)
    target = HostedTarget(config, model, placement)
    with trying_out(config):
        _try_out(target, model, placement.device)
    return target


@contextmanager
def trying_out(config: TargetConfig) -> Iterator[None]:
    """Run a loaded model for the first time inside the block, and refuse the target if the model's own code fails.

    Raises:
        UnsupportedError: the model's code raised an error.
    """
    try:
        with torch.inference_mode():
            yield
    except (DFlashError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of a model may raise any type
        why = f"its own code fails in the trial after loading: {first_line(error)}"
        raise not_run(config.model_type, why, id="target-code-fails") from error


@contextmanager
def calling(attention: HostedAttention) -> Iterator[None]:
    """Compute the attention of this thread's forwards with `attention` inside the block."""
    token = _CALL.set(attention)
    try:
        yield
    finally:
        _CALL.reset(token)


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


def _reach(config: TargetConfig) -> int:
    return max(2, min(config.max_position_embeddings, REACH))


def read_head(config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> ScaledHead:
    """Return the output embedding with the scale and cap of its logits. `check_head` checks that nothing is missing."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise not_run(config.model_type, "its head is not a product with one matrix", id="target-head")
    text = model.config.get_text_config(decoder=True)
    factors = [float(getattr(text, name, None) or 1.0) for name in FACTORS]
    divisors = [float(getattr(text, name, None) or 1.0) for name in DIVISORS]
    multiplier = prod(factors) / prod(divisors)
    caps = (getattr(text, name, None) for name in LOGIT_CAPS)
    cap = next((value for value in caps if value), None)
    weight = parameter_of(head, "weight", placement.device)
    bias = None if head.bias is None else parameter_of(head, "bias", placement.device)
    num_ids = getattr(text, "unpadded_vocab_size", None)
    return ScaledHead(weight, bias, placement.kernels, multiplier, cap, num_ids)


def check_head(config: TargetConfig, head: Linear, hidden: Tensor, said: Tensor) -> None:
    """Compare the head's logits of `hidden` with `said`, the model's own logits.

    Raises:
        UnsupportedError: the logits differ.
    """
    logits, padding = head(hidden).tensor_split([said.shape[1]], dim=1)
    is_same = logits.shape == said.shape and is_close(logits, said.to(logits.device))
    if not is_same or not bool((padding == NO_ID).all()):
        why = "its head does more to its logits than scale and cap them"
        raise not_run(config.model_type, why, id="target-head")


def find_layers(config: TargetConfig, decoder: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers, for taps."""
    found = [item for item in decoder.children() if isinstance(item, nn.ModuleList) and len(item) == config.num_layers]
    if len(found) != 1:
        why = f"its code has {len(found)} lists of {config.num_layers} decoder layers, expected 1"
        raise not_run(config.model_type, why, id="target-layers-not-found")
    return found[0]


def keep_output(outputs: dict[int, Tensor], layer: int, module: nn.Module, inputs: object, output: Any) -> None:
    """Store the residual stream after a layer; a forward hook."""
    rows = output if isinstance(output, Tensor) else output[0]
    outputs[layer] = rows[0]


def _try_out(target: HostedTarget, model: "PreTrainedModel", device: torch.device) -> None:
    """Check the assumptions of `HostedTarget` on a loaded model, with attention that does not mix rows.

    Raises:
        UnsupportedError: the model breaks one.
    """
    config = target.config
    token_ids, in_place = torch.arange(4, device=device) % config.vocab_size, torch.arange(4, device=device)
    attention = HostedAttention(config, _own_values, reach=_reach(config))
    target.run(token_ids, in_place, attention)
    with calling(HostedAttention(config, _own_values, reach=3)):  # the whole model may make masks for these four rows
        said = model(
            input_ids=token_ids[None].to(target.entry), position_ids=in_place[None].to(target.entry), use_cache=False
        )
    if sorted(attention.layers) != list(range(config.num_layers)):
        silent = sorted(set(range(config.num_layers)) - set(attention.layers))
        why = (
            f"layers {silent} do not ask for attention once through transformers' AttentionInterface, so they have "
            "a state or their own attention"
        )
        raise not_run(config.model_type, why, id="target-attention-not-asked")
    with quietly():
        model.set_attn_implementation(PAGES)
    in_order = HostedAttention(config, _own_values)
    hidden, features = target.run(token_ids, in_place, in_order, (0,))
    check_features(config, features, hidden)
    check_head(config, target.head, hidden, said.logits[0])
    positions = torch.tensor([config.max_position_embeddings - 1, 0, 7, 3], device=device)
    rows, _ = target.run(token_ids, positions, in_order)
    swapped, _ = target.run(token_ids.flip(0), positions.flip(0), in_order)
    if not is_close(swapped.flip(0), rows):
        why = "its rows depend on other rows outside attention, as with a state or a cache"
        raise not_run(config.model_type, why, id="target-rows-depend")


def check_features(config: TargetConfig, features: Tensor | None, hidden: Tensor) -> None:
    """Check that the output of one tapped layer has the shape of the residual stream.

    Raises:
        UnsupportedError: it has another shape.
    """
    if features is None or features.shape != hidden.shape:
        raise not_run(
            config.model_type, "the output of its layers is not the residual stream", id="target-layer-output"
        )


def _own_values(layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    """[T, H, D]: attention in which each row attends only to itself, with a trace of its position."""
    num_groups = query.shape[1] // keys.shape[1]
    return values.repeat_interleave(num_groups, dim=1) + 0.1 * (query + keys.repeat_interleave(num_groups, dim=1))


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether rows are equal up to rounding. A missing factor or term makes a larger difference."""
    tolerance = max(8 * torch.finfo(one.dtype).eps, 1e-4)
    return bool((one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-6))
