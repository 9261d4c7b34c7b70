"""Hosted targets: transformers' own modelling code over our pages, for targets without a native family.

The model gets one flat batch of rows with their positions, and neither cache nor mask. Its attention calls our function
(`hosted_attention.py`), which passes a layer's queries, keys and values to our `Attend`. After loading, a trial checks
three assumptions:

* Every layer asks for attention once, with the window in its config.
* A row depends on other rows only through attention.
* The head gives the model's own logits.

Then experts and other modules are given our kernels where these agree (`hosted_experts.py`, `hosted_swaps.py`). At last
the trial finds out whether the forward can be captured as a CUDA graph (`hosted_capture.py`).

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim, F feature width, V vocabulary.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.decoder_values import num_streams
from dflash_runtime.checkpoint.targets.hf_config import not_run
from dflash_runtime.errors import NON_FINITE, CheckpointError, DFlashError
from dflash_runtime.models.head import NO_ID, ScaledHead
from dflash_runtime.models.hosting.hosted_attention import (
    PAGES,
    TRIAL,
    HostedAttention,
    OwnValues,
    Scores,
    calling,
    reach_of,
    register_attention,
)
from dflash_runtime.models.hosting.hosted_capture import why_not_captured
from dflash_runtime.models.hosting.hosted_experts import use_our_experts
from dflash_runtime.models.hosting.hosted_loading import first_line, load_model, parameter_of, quietly
from dflash_runtime.models.hosting.hosted_swaps import Swaps, swap_modules
from dflash_runtime.models.hosting.swapped_modules import Setting
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.placement import Placement
from dflash_runtime.notices import Notice
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config keys for a soft cap on the logits."""

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config keys for a factor on the logits."""

DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config keys for a divisor of the logits."""

NOT_TRIED = Notice("its forward has not been tried out", id="target-not-tried")


class TransformersTarget:
    """A decoder of transformers' code: its embedding, head and layers, and a forward with taps.

    `entry` is the device on which rows enter the model. `code_config` is the text model's config, which the code reads.
    """

    def __init__(
        self, config: TargetConfig, model: "PreTrainedModel", decoder: nn.Module, placement: Placement
    ) -> None:
        self.config = config
        text: PretrainedConfig = model.config.get_text_config(decoder=True)
        self.code_config: dict[str, Any] = json.loads(json.dumps(text.to_dict(), default=str), parse_constant=str)
        self._device = placement.device
        self._num_streams = num_streams(text)
        self.embedding: Tensor = parameter_of(model.get_input_embeddings(), "weight", placement.device)
        self.head: Linear = read_head(config, model, placement)
        self.decoder = decoder
        first = next(model.get_input_embeddings().parameters()).device
        self.entry = placement.device if first.type == "meta" else first
        self._layers = find_layers(config, decoder)

    @property
    def embedding_scale(self) -> float:
        """See `models.target.TargetEnds`."""
        return self.config.embedding_scale

    def _run_decoder(self, token_ids: Tensor, taps: Sequence[int], **given: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Token ids [B, T] -> hidden states [B, T, hidden], features [B, T, F] and the decoder's whole output.

        Both have the dtype of the embedding, also where a family adds its residuals in float32.
        """
        outputs: dict[int, Tensor] = {}
        keep = partial(keep_output, outputs, self._num_streams)
        hooks = [self._layers[tap].register_forward_hook(partial(keep, tap)) for tap in set(taps)]
        try:
            output = self.decoder(input_ids=token_ids.to(self.entry), **given)
        finally:
            for hook in hooks:
                hook.remove()
        dtype = self.embedding.dtype
        features = torch.cat([outputs[tap].to(self._device, dtype) for tap in taps], dim=-1) if taps else None
        return output.last_hidden_state.to(self._device, dtype).contiguous(), features, output


class HostedTarget(TransformersTarget):
    """A decoder of transformers as a target; see `models.target.Target`. Attention, KV and sampling are ours.

    uncaptured   the reason why its forward cannot be captured as a CUDA graph, or None
    swaps        the modules that our kernels compute
    """

    def __init__(self, config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> None:
        super().__init__(config, model, model.get_decoder(), placement)
        self._is_spread = placement.spread is not None
        self.uncaptured: Notice | None = NOT_TRIED
        self.swaps = Swaps()

    @property
    def follows_from_shapes(self) -> bool:
        """See `models.target.Target`."""
        return self.uncaptured is None

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
                token_ids[None], taps, position_ids=positions[None].to(self.entry), use_cache=False
            )
        return hidden[0], None if features is None else features[0]


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
    return host_model(load_model(source, config, placement, TRIAL), config, placement)


def host_model(model: "PreTrainedModel", config: TargetConfig, placement: Placement) -> HostedTarget:
    """Try out a loaded model, and give its modules our kernels. The model's attention has the name TRIAL.

    Raises:
        UnsupportedError: the model asks for something our attention does not support.
    """
    target = HostedTarget(config, model, placement)
    with trying_out(config), torch.inference_mode():
        scores = _try_out(target, model, placement.device)
    _use_kernels(target, model, placement, scores)
    return target


def _use_kernels(
    target: HostedTarget, model: "PreTrainedModel", placement: Placement, scores: dict[int, Scores]
) -> None:
    """Give experts and other modules our kernels, and find out whether the forward can be captured."""
    config, device = target.config, placement.device
    if placement.spread is not None:
        target.uncaptured = Notice("its layers are on several devices", id="target-is-spread", field="--device-map")
        return

    def run(token_ids: Tensor, positions: Tensor) -> Tensor:
        return target.run(token_ids, positions, HostedAttention(config, OwnValues()))[0]

    with trying_out(config), torch.no_grad():  # new weights must not be tensors of inference mode
        num_ours, num_experts = use_our_experts(model, placement.kernels)
        if placement.has_swaps:
            setting, ids = Setting(config, placement.kernels, scores), _first_ids(config, device)
            positions = torch.tensor(POSITIONS, device=device) % config.max_position_embeddings
            target.swaps = swap_modules(target.decoder, setting, partial(run, ids, positions))
    with trying_out(config), torch.inference_mode():
        target.uncaptured = why_not_captured(run, config.vocab_size, config.max_position_embeddings, device)
    swapped = ", ".join(f"{count} of kind {kind}" for kind, count in target.swaps.counts.items()) or "none"
    logger.info("swapped modules: %s; experts: %d of %d with our kernels", swapped, num_ours, num_experts)
    logger.info("forwards can be captured: %s", target.uncaptured or "yes")


POSITIONS = (40, 0, 7, 3)
"""Positions of the rows with which swaps are compared."""


def _first_ids(config: TargetConfig, device: torch.device) -> Tensor:
    return torch.arange(len(POSITIONS), device=device) % config.vocab_size


@contextmanager
def trying_out(config: TargetConfig) -> Iterator[None]:
    """Run a loaded model for the first time inside the block, and refuse the target if the model's own code fails.

    Raises:
        UnsupportedError: the model's code raised an error.
    """
    try:
        yield
    except (DFlashError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of a model may raise any type
        why = f"its own code fails in the trial after loading: {first_line(error)}"
        raise not_run(config.model_type, why, id="target-code-fails") from error


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
        CheckpointError: the model's logits are NaN.
    """
    if bool(said.isnan().any()):
        text = "its logits are NaN in the trial after loading"
        raise CheckpointError(text, id=NON_FINITE, found="NaN", hint="export the weights again")
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


def keep_output(
    outputs: dict[int, Tensor], num_streams: int, layer: int, module: nn.Module, inputs: object, output: Any
) -> None:
    """Store the residual stream after a layer, or the mean of its streams [B, T, N, hidden]; a forward hook."""
    rows = output if isinstance(output, Tensor) else output[0]
    outputs[layer] = rows if num_streams == 1 else rows.mean(dim=2)


def _try_out(target: HostedTarget, model: "PreTrainedModel", device: torch.device) -> dict[int, Scores]:
    """Check the assumptions of `HostedTarget` on a loaded model, with attention that does not mix rows.

    Returns how each layer turns scores into weights.

    Raises:
        UnsupportedError: the model breaks one.
    """
    config, own_values = target.config, OwnValues()
    token_ids, in_place = _first_ids(config, device), torch.arange(len(POSITIONS), device=device)
    attention = HostedAttention(config, own_values, reach=reach_of(config))
    target.run(token_ids, in_place, attention)
    with calling(HostedAttention(config, own_values, reach=3)):  # the whole model may make masks for these four rows
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
    in_order = HostedAttention(config, own_values)
    hidden, features = target.run(token_ids, in_place, in_order, (0,))
    check_features(config, features, hidden)
    check_head(config, target.head, hidden, said.logits[0])
    positions = torch.tensor([config.max_position_embeddings - 1, 0, 7, 3], device=device)
    rows, _ = target.run(token_ids, positions, in_order)
    swapped, _ = target.run(token_ids.flip(0), positions.flip(0), in_order)
    if not is_close(swapped.flip(0), rows):
        why = "its rows depend on other rows outside attention, as with a state or a cache"
        raise not_run(config.model_type, why, id="target-rows-depend")
    return in_order.scores


def check_features(config: TargetConfig, features: Tensor | None, hidden: Tensor) -> None:
    """Check that the output of one tapped layer has the shape of the residual stream.

    Raises:
        UnsupportedError: it has another shape.
    """
    if features is None or features.shape != hidden.shape:
        raise not_run(
            config.model_type, "the output of its layers is not the residual stream", id="target-layer-output"
        )


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether rows are equal up to rounding. A missing factor or term makes a larger difference."""
    tolerance = max(8 * torch.finfo(one.dtype).eps, 1e-4)
    return bool((one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-6))
