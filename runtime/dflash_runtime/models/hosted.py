"""Targets that no family of this package serves: transformers' own modelling code over our pages.

The model gets one flat batch of rows with their positions, no cache and no mask. Its attention calls a function that is
registered with transformers, which hands queries, keys and values of the layer to our `Attend`. Nothing that such a
call passes is ignored: what our attention does not do is refused by name. A trial after loading holds the model to what
makes this right: every layer asks for attention once, with the window its config says; a row depends on no other but by
attention; and the head gives the model's own logits.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim, F feature width, V vocabulary.
"""

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
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import TargetConfig
from dflash_runtime.errors import DFlashError
from dflash_runtime.models.hosted_loading import first_line, load_model, parameter_of, quietly, unsupported
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.placement import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGES = "draft_pages"
"""The name of our attention in transformers, which takes any with "flash" in it for a kernel to be fetched.

It has no mask function, so that no mask is built.
"""

TRIAL = "draft_trial"
"""The same attention with a mask function, which says what mask each layer would have had."""

HARMLESS = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
)
"""Arguments of attention calls that say nothing of what is to be computed."""

COMPUTED = frozenset({"scaling", "sliding_window", "is_causal", "softcap", "s_aux"})
"""Arguments of attention calls that say what is computed. `s_aux` are attention sinks."""

WORDS = {"position_bias": "a bias on attention"}
"""What transformers calls things that our attention does not do."""

LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What configs call the bound of the logits."""

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""What configs call a factor of the logits."""

DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""What they call a number that logits are divided by."""

NO_ID = -1e4
"""The logit of a row that is no id: of no weight beside any other, and finite in every dtype."""

REACH = 2**20
"""Tokens back to which the mask of the trial is compared with a window."""

_CALL: ContextVar["HostedAttention"] = ContextVar("dflash_hosted_attention")


@dataclass(frozen=True, slots=True)
class ScaledHead(Linear):
    """A head whose logits are multiplied, then capped: `cap * tanh(logits / cap)`. From `num_ids` on none is an id."""

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
    """What the trial's mask function gives in place of a mask: the window of it, None where all earlier are seen."""

    window: int | None

    def __getitem__(self, rows: object) -> "WantedMask":
        """Models that share keys and values between layers cut a mask to the rows they go on with, here all of them."""
        return self


@dataclass(slots=True)
class HostedAttention:
    """What the registered function does in one forward: compare the call with the config, and hand on to `attend`."""

    config: TargetConfig
    attend: Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]
    reach: int | None = None  # in the trial: rows of a text of which masks are compared with windows
    layers: list[int] = field(default_factory=list)  # in the order in which they asked for attention

    def __call__(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: object, settings: dict[str, Any]
    ) -> Tensor:
        """Query [1, H, T, D], keys and values [1, KV, T, D] -> [1, T, H, D].

        Raises:
            UnsupportedError: the call asks for what our attention does not do.
        """
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < self.config.num_layers:
            raise unsupported(self.config, f"an attention layer numbered {layer}")
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
                raise unsupported(config, f"layer {layer} has {found}, as the config says of it")

    def _check_settings(self, module: nn.Module, layer: int, settings: dict[str, Any]) -> None:
        if settings.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise unsupported(self.config, f"attention to later tokens in layer {layer}")
        window = settings.get("sliding_window")
        if "sliding_window" in settings and window != self.config.windows[layer]:
            raise unsupported(self.config, f"a window of {window} in layer {layer}, unlike its config")
        for name, value in settings.items():
            is_known = name in HARMLESS or name in COMPUTED
            if not is_known and value is not None and value is not False and not (name == "dropout" and value == 0):
                raise unsupported(self.config, f"{WORDS.get(name, 'an attention setting')} ({name}) in layer {layer}")

    def _read_softmax(self, layer: int, settings: dict[str, Any]) -> Softmax:
        cap, sinks = settings.get("softcap"), settings.get("s_aux")
        if sinks is not None and sinks.shape != (self.config.num_heads,):
            raise unsupported(self.config, f"attention sinks of shape {list(sinks.shape)} in layer {layer}")
        return Softmax(cap or None, sinks)

    def _check_mask(self, layer: int, mask: object) -> None:
        if self.reach is None:
            if mask is not None:
                raise unsupported(self.config, f"a mask of its own making in layer {layer}")
            return
        if not isinstance(mask, WantedMask):
            raise unsupported(self.config, f"a mask of its own making, or none, in layer {layer}")
        window = self.config.windows[layer]
        if mask.window != (window if window is not None and window < self.reach else None):
            raise unsupported(self.config, f"a mask over {mask.window} tokens in layer {layer}, expected {window}")


class HostedTarget:
    """A decoder of transformers as a target; see `models.target.Target`. Attention, KV and sampling are ours."""

    follows_from_shapes: ClassVar[bool] = False

    def __init__(self, config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> None:
        self.config = config
        self._device = placement.device
        self.embedding: Tensor = parameter_of(model.get_input_embeddings(), "weight", placement.device)
        self.head: Linear = read_head(config, model, placement)
        self._decoder = model.get_decoder()
        self._is_spread = placement.spread is not None
        first = next(model.get_input_embeddings().parameters()).device
        self.entry = placement.device if first.type == "meta" else first  # where rows enter the model
        self._layers = find_layers(config, self._decoder)

    @property
    def embedding_scale(self) -> float:
        """See `models.target.TargetEnds`."""
        return self.config.embedding_scale

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
        """One forward with whatever attention."""
        outputs: dict[int, Tensor] = {}
        hooks = [self._layers[tap].register_forward_hook(partial(keep_output, outputs, tap)) for tap in set(taps)]
        try:
            with calling(attention):
                rows = self._decoder(
                    input_ids=token_ids[None].to(self.entry),
                    position_ids=positions[None].to(self.entry),
                    use_cache=False,
                )
        finally:
            for hook in hooks:
                hook.remove()
        features = torch.cat([outputs[tap].to(self._device) for tap in taps], dim=-1) if taps else None
        return rows.last_hidden_state[0].to(self._device), features


def _attend_on(device: torch.device, attend: Attend) -> Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]:
    """Attention on the device that has the pages, for layers that may lie on any."""

    def attended(layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        sinks = None if softmax.sinks is None else softmax.sinks.to(device)
        rows = attend(layer, query.to(device), keys.to(device), values.to(device), replace(softmax, sinks=sinks))
        return rows.to(query.device)

    return attended


def load_hosted(source: TargetSource, config: TargetConfig, placement: Placement) -> HostedTarget:
    """Load a target through transformers, from safetensors only, and hold it to the trial.

    Raises:
        UnsupportedError: packed weights, or a model that asks for what our attention does not do.
        CheckpointError: tensors are missing or misshapen, or transformers does not load them.
    """
    register_attention()
    model = load_model(source, config, placement, TRIAL)
    target = HostedTarget(config, model, placement)
    try:
        with torch.inference_mode():
            _try_out(target, model, placement.device)
    except (DFlashError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may fail in any way, and not for a fault of this program
        raise unsupported(config, f"its own code fails on four tokens: {first_line(error)}") from error
    return target


@contextmanager
def calling(attention: HostedAttention) -> Iterator[None]:
    """Forwards of this thread have their attention computed so."""
    token = _CALL.set(attention)
    try:
        yield
    finally:
        _CALL.reset(token)


@cache
def register_attention() -> None:
    """Make our attention known to transformers, under both names."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (PAGES, TRIAL):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(TRIAL, _find_mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **settings: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls."""
    return _CALL.get()(module, query, key, value, attention_mask, settings), None


def _find_mask(*, mask_function: Callable[..., Tensor], **_: Any) -> WantedMask:
    """Read a mask off the function that says who sees whom, at the last two rows in reach and for all before them."""
    attention = _CALL.get()
    assert attention.reach is not None, "masks are read in the trial alone"
    windows = {_seen(mask_function, row) for row in (attention.reach - 2, attention.reach - 1)}
    if len(windows) != 1 or min(window or 0 for window in windows) < 0:
        raise unsupported(attention.config, "a mask that is no window of earlier tokens")
    return WantedMask(windows.pop())


def _seen(mask_function: Callable[..., Tensor], row: int) -> int | None:
    """How many tokens a row sees, itself included; None where it sees all; negative where those are not the last."""
    zero, rows = torch.tensor(0), torch.arange(row + 2)
    sees = torch.as_tensor(mask_function(zero, zero, torch.tensor(row), rows)).expand(len(rows))
    count = int(sees.sum())
    if not torch.equal(sees, (rows <= row) & (rows > row - count)):
        return -count
    return None if count == row + 1 else count


def _reach(config: TargetConfig) -> int:
    return max(2, min(config.max_position_embeddings, REACH))


def read_head(config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> ScaledHead:
    """The output embedding with what the families do to its logits; the trial shows whether that is all."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise unsupported(config, "a head that is no product with one matrix")
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
    """Hold the logits of hidden states to those that the model itself gives.

    Raises:
        UnsupportedError: they are others.
    """
    logits, others = head(hidden).tensor_split([said.shape[1]], dim=1)
    is_same = logits.shape == said.shape and is_close(logits, said.to(logits.device))
    if not is_same or not bool((others == NO_ID).all()):
        raise unsupported(config, "a head that does more to its logits than scale and cap them")


def find_layers(config: TargetConfig, decoder: nn.Module) -> nn.ModuleList:
    """The decoder layers, whose outputs are tapped."""
    found = [item for item in decoder.children() if isinstance(item, nn.ModuleList) and len(item) == config.num_layers]
    if len(found) != 1:
        raise unsupported(config, f"no one list of {config.num_layers} decoder layers is found in its code")
    return found[0]


def keep_output(outputs: dict[int, Tensor], layer: int, module: nn.Module, inputs: object, output: Any) -> None:
    """A forward hook that keeps the residual stream after a layer."""
    rows = output if isinstance(output, Tensor) else output[0]
    outputs[layer] = rows[0]


def _try_out(target: HostedTarget, model: "PreTrainedModel", device: torch.device) -> None:
    """Hold a loaded model to what `HostedTarget` takes for granted. Its attention mixes no rows meanwhile.

    Raises:
        UnsupportedError: what it does otherwise.
    """
    config = target.config
    token_ids, in_place = torch.arange(4, device=device) % config.vocab_size, torch.arange(4, device=device)
    attention = HostedAttention(config, _own_values, reach=_reach(config))
    target.run(token_ids, in_place, attention)
    with calling(HostedAttention(config, _own_values, reach=3)):  # a whole may make masks of these four alone
        said = model(
            input_ids=token_ids[None].to(target.entry), position_ids=in_place[None].to(target.entry), use_cache=False
        )
    if sorted(attention.layers) != list(range(config.num_layers)):
        silent = sorted(set(range(config.num_layers)) - set(attention.layers))
        raise unsupported(
            config, f"layers {silent} do not ask for attention once through transformers' AttentionInterface, so that "
            "they have a state or an attention of their own",
        )  # fmt: skip
    with quietly():
        model.set_attn_implementation(PAGES)
    in_order = HostedAttention(config, _own_values)
    hidden, features = target.run(token_ids, in_place, in_order, (0,))
    if features is None or features.shape != hidden.shape:
        raise unsupported(config, "layers whose output is not the residual stream")
    check_head(config, target.head, hidden, said.logits[0])
    positions = torch.tensor([config.max_position_embeddings - 1, 0, 7, 3], device=device)
    rows, _ = target.run(token_ids, positions, in_order)
    swapped, _ = target.run(token_ids.flip(0), positions.flip(0), in_order)
    if not is_close(swapped.flip(0), rows):
        raise unsupported(config, "rows that depend on others than by attention, as a state or a cache would make them")


def _own_values(layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    """[T, H, D]: attention of rows that see nothing but themselves, with a trace of their positions."""
    num_groups = query.shape[1] // keys.shape[1]
    return values.repeat_interleave(num_groups, dim=1) + 0.1 * (query + keys.repeat_interleave(num_groups, dim=1))


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether rows are the same but for rounding, which a factor or a term that is left out is not."""
    tolerance = max(8 * torch.finfo(one.dtype).eps, 1e-4)
    return bool((one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-6))
