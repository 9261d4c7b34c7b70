"""Targets that our pages do not hold: transformers' own modelling code with transformers' own cache, text by text.

A cache holds committed tokens only. A block of which some tokens may be rejected is run on a copy of it, and what is
kept of the block goes into the cache afterwards, so that a rejected token never reaches a state. Where a cache is
nothing but keys and values, the rejected ones are cut off instead.

How a model reads several tokens after a cache differs from family to family: some ignore the state then. So a trial
after loading rejects tokens at several places and compares with one forward that uses no cache; tokens are read at once
where that is as near to it as reading them one by one, and one by one where it is not.

Axis letters: T flat rows, F feature width.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import OwnCache, TargetConfig
from dflash_runtime.errors import DFlashError
from dflash_runtime.models.hosted import check_head, find_layers, keep_output, read_head
from dflash_runtime.models.hosted_loading import first_line, load_model, parameter_of, unsupported
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.placement import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""What decoders call their cache, as an argument and in what they return."""

SCORE_BYTES = 256 * 2**20
"""What the scores of one layer may take, which transformers' attention writes: heads times rows times text, twice."""

LEAST_ROWS = 64
"""Rows of one forward whatever the scores take, so that a block is never parted."""

MOST_PENDING = 32
"""Kept tokens that are read again before each block until there are so many; then they go into the cache."""

TRIAL_START = 66
TRIAL_KEPT = (1, 3, 2, 4)
TRIAL_BLOCK = 4
"""The trial: after a prompt of one token and one of many, blocks of four of which so many are kept."""

LEAST_TOLERANCE = 1e-3
"""How far a cache may be from no cache by rounding, relative to the hidden states; sqrt(eps) of the dtype if more."""

NOISE_FACTOR = 4
"""How many times as far off as token by token reading at once may be, which sums in another order."""


@dataclass(slots=True)
class TextCache:
    """What a target has of one text: `cache` holds its first `cached_len` tokens.

    Of `tokens`, which were run after the cache, those before the next block's start have come to stay; `ahead` is a
    cache that holds them as well.
    """

    cache: Any = None
    cached_len: int = 0
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    ahead: Any = None

    def hold(self, cache: Any, length: int) -> None:
        """Nothing is ahead of this cache."""
        self.cache, self.cached_len, self.tokens, self.ahead = cache, length, self.tokens[:0], None


class OwnCacheTarget:
    """A decoder of transformers as a target that keeps its own cache of each text, a `TextCache`."""

    follows_from_shapes: ClassVar[bool] = False

    def __init__(self, config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> None:
        self.config = config
        self._device = placement.device
        self.embedding: Tensor = parameter_of(model.get_input_embeddings(), "weight", placement.device)
        self.head: Linear = read_head(config, model, placement)
        self.reads_at_once = False
        self.can_crop = False
        self._decoder = _find_decoder(model)
        first = next(model.get_input_embeddings().parameters()).device
        self.entry = placement.device if first.type == "meta" else first  # where rows enter the model
        self._layers = find_layers(config, self._decoder)
        known = inspect.signature(self._decoder.forward).parameters
        self._has_positions = "position_ids" in known
        self._cache_name = next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[0])

    @property
    def embedding_scale(self) -> float:
        """See `models.target.TargetEnds`."""
        return self.config.embedding_scale

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.target.Target`; the rows are a text from its beginning, and nothing is kept of it."""
        hidden, features, _ = self._forward(token_ids, 0, taps, use_cache=False)
        return hidden if wanted is None else hidden[wanted], features

    def read(
        self, text: TextCache, token_ids: Tensor, start: int, taps: Sequence[int], *, is_final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run tokens [T] of a text from position `start` on; of those run before, the ones from there on are rejected.

        Final ones come to stay; of others, the next call says how many have.
        """
        self._settle(text, start)
        first, token_ids = text.cached_len, torch.cat((text.tokens.to(token_ids.device), token_ids))
        cache = text.cache if is_final or self.can_crop else copy_cache(text.cache)
        hidden, features, cache = self._run(cache, token_ids, first, taps)
        if is_final:
            text.hold(cache, first + len(token_ids))
        else:
            text.tokens, text.ahead = token_ids, cache
        asked = slice(start - first, None)
        return hidden[asked], None if features is None else features[asked]

    def _settle(self, text: TextCache, start: int) -> None:
        """Reject what was run from `start` on."""
        num_kept = start - text.cached_len
        num_rejected = len(text.tokens) - num_kept
        assert num_kept >= 0, "a text goes on where it was, or is begun anew"
        assert num_rejected >= 0, "a text goes on where it was, or is begun anew"
        if text.ahead is not None and not num_rejected:
            text.hold(text.ahead, start)
        elif text.ahead is not None and self.can_crop:
            text.ahead.crop(-num_rejected)
            text.hold(text.ahead, start)
        else:
            text.tokens, text.ahead = text.tokens[:num_kept], None
            if num_kept and (not self.reads_at_once or num_kept > MOST_PENDING):
                text.hold(self._run(text.cache, text.tokens, text.cached_len, ())[2], start)

    def _run(self, cache: Any, token_ids: Tensor, start: int, taps: Sequence[int]) -> tuple[Tensor, Tensor | None, Any]:
        """Tokens after a cache, in as few forwards as are right -> hidden states, features, and the cache with them."""
        if self.reads_at_once:
            size = _num_rows(self.config, start + len(token_ids))
        else:
            size = len(token_ids) if cache is None else 1
        rows, tapped = [], []
        for piece in token_ids.split(size):
            hidden, features, cache = self._forward(piece, start, taps, cache=cache)
            start += len(piece)
            rows.append(hidden)
            tapped.append(features)
        return torch.cat(rows), torch.cat([item for item in tapped if item is not None]) if taps else None, cache

    def _forward(
        self, token_ids: Tensor, start: int, taps: Sequence[int], *, cache: Any = None, use_cache: bool = True
    ) -> tuple[Tensor, Tensor | None, Any]:
        """One forward of the decoder."""
        given: dict[str, Any] = {self._cache_name: cache} if cache is not None else {}
        if self._has_positions:
            given["position_ids"] = torch.arange(start, start + len(token_ids), device=self.entry)[None]
        outputs: dict[int, Tensor] = {}
        hooks = [self._layers[tap].register_forward_hook(partial(keep_output, outputs, tap)) for tap in set(taps)]
        try:
            rows = self._decoder(input_ids=token_ids[None].to(self.entry), use_cache=use_cache, **given)
        finally:
            for hook in hooks:
                hook.remove()
        features = torch.cat([outputs[tap].to(self._device) for tap in taps], dim=-1) if taps else None
        return rows.last_hidden_state[0].to(self._device), features, getattr(rows, self._cache_name, None)


def load_own_cache(source: TargetSource, config: TargetConfig, placement: Placement) -> OwnCacheTarget:
    """Load a target through transformers, from safetensors only, and find by trial how it has to be run.

    Raises:
        UnsupportedError: packed weights, or a model whose cache does not stand for the tokens before it.
        CheckpointError: tensors are missing or misshapen, or transformers does not load them.
    """
    model = load_model(source, config, placement, "eager")  # the others leave out what they do not do
    target = OwnCacheTarget(config, model, placement)
    try:
        with torch.inference_mode():
            _try_out(target, model, placement.device)
    except (DFlashError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may fail in any way, and not for a fault of this program
        raise unsupported(config, f"its own code fails on a few tokens: {first_line(error)}") from error
    return target


def score_bytes(config: TargetConfig, num_rows: int) -> int:
    """Bytes of the scores of one layer at most, if prompts are read in chunks of so many rows."""
    return max(SCORE_BYTES, _score_bytes(config, num_rows) * num_rows)


def _score_bytes(config: TargetConfig, num_tokens: int) -> int:
    """Bytes of the scores of a row in a text of so many tokens, in float32 and as they were."""
    return 2 * torch.float32.itemsize * config.num_heads * num_tokens


def _num_rows(config: TargetConfig, num_tokens: int) -> int:
    """Rows of a text of so many tokens in one forward."""
    return max(LEAST_ROWS, SCORE_BYTES // _score_bytes(config, num_tokens))


def copy_cache(cache: Any) -> Any:
    """A cache that can be run on without changing this one."""
    shared = {id(item): item for layer in _grown_layers(cache) for item in (layer.keys, layer.values)}
    return copy.deepcopy(cache, shared)


def _grown_layers(cache: Any) -> list[Any]:
    """Layers whose keys and values are put together anew with every token, and so never written to."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return [item for item in getattr(cache, "layers", ()) if type(item) in (DynamicLayer, DynamicSlidingWindowLayer)]


def _is_croppable(cache: Any) -> bool:
    """Whether a cache is nothing but keys and values of all tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def _find_decoder(model: "PreTrainedModel") -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    return decoder if decoder is not model else model.model


def _try_out(target: OwnCacheTarget, model: "PreTrainedModel", device: torch.device) -> None:
    """Find how a loaded model has to be run for its cache to stand for the tokens before it, and how large that is.

    Raises:
        UnsupportedError: no way is right.
    """
    config = target.config
    num_tokens = min(TRIAL_START + sum(TRIAL_KEPT), config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator).to(device)
    said = model(input_ids=token_ids[None].to(target.entry), use_cache=False).logits[0].to(device)
    hidden, features, _ = target._forward(token_ids, 0, (0,), use_cache=False)
    if features is None or features.shape != hidden.shape:
        raise unsupported(config, "layers whose output is not the residual stream")
    check_head(config, target.head, hidden, said)
    noise = _distance(target, token_ids, hidden)
    if not noise <= max(LEAST_TOLERANCE, torch.finfo(hidden.dtype).eps ** 0.5):
        raise unsupported(config, f"a cache that gives other hidden states than no cache, {noise:.2g} off")
    allowed = max(NOISE_FACTOR * noise, torch.finfo(hidden.dtype).eps)
    for can_crop in (True, False) if _is_croppable(_fill(target, token_ids).cache) else (False,):
        target.reads_at_once, target.can_crop = True, can_crop
        if _is_within(target, token_ids, hidden, allowed):
            break
    else:
        target.reads_at_once = target.can_crop = False
    target.config = replace(config, own_cache=_measure(target, token_ids))


def _is_within(target: OwnCacheTarget, token_ids: Tensor, wanted: Tensor, allowed: float) -> bool:
    """Whether reading blocks at once is right; code that was never meant for it may also fail."""
    try:
        return _distance(target, token_ids, wanted) <= allowed
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False


def _distance(target: OwnCacheTarget, token_ids: Tensor, wanted: Tensor) -> float:
    """How far the hidden states of a text, of whose blocks parts are rejected, are from those of one forward."""
    parts, counted = [], []
    for start in (1, len(token_ids) - sum(TRIAL_KEPT)):
        text = TextCache()
        parts.append(target.read(text, token_ids[:start], 0, (), is_final=True)[0])
        counted.append(wanted[:start])
        for num_kept in TRIAL_KEPT:
            block = (token_ids[start : start + num_kept], token_ids[: TRIAL_BLOCK - num_kept])
            parts.append(target.read(text, torch.cat(block), start, (), is_final=False)[0][:num_kept])
            counted.append(wanted[start : start + num_kept])
            start += num_kept
    found, expected = torch.cat(parts).double(), torch.cat(counted).double()
    return float((found - expected).norm() / expected.norm())


def _fill(target: OwnCacheTarget, token_ids: Tensor) -> TextCache:
    text = TextCache()
    target.read(text, token_ids, 0, (), is_final=True)
    return text


def _measure(target: OwnCacheTarget, token_ids: Tensor) -> OwnCache:
    """What a text takes, by the caches of two; twice where blocks are run on copies."""
    num_few = len(token_ids) // 2
    few, many = (_num_bytes(_fill(target, token_ids[:count]).cache) for count in (num_few, len(token_ids)))
    token_bytes = -(-(many - few) // (len(token_ids) - num_few))
    num_copies = 1 if target.can_crop else 2
    return OwnCache(num_copies * token_bytes, num_copies * max(0, many - token_bytes * len(token_ids)))


def _num_bytes(cache: Any) -> int:
    return sum({item.data_ptr(): item.nbytes for item in _tensors(cache)}.values())


def _tensors(item: Any) -> Iterator[Tensor]:
    """Every tensor in an object, however it is nested."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _tensors(value)
    elif hasattr(item, "__dict__") and not isinstance(item, type):
        yield from _tensors(vars(item))
