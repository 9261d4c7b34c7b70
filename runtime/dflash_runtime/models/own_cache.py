"""Targets with their own cache: transformers' modelling code and cache, one text at a time.

A cache holds only committed tokens. A block, in which the target may reject tokens, runs on a copy of the cache. Its
accepted tokens go into the cache afterwards, so a rejected token never reaches a state. A cache of only keys and values
drops rejected tokens instead.

Families differ in how they read several tokens after a cache: some ignore the state then. So a trial after loading
rejects tokens at several positions and compares the hidden states with one forward without a cache. The target reads
tokens at once if that is as close to the forward as reading them one by one.

Axis letters: T flat rows, F feature width.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_runtime.checkpoint.hf_config import not_run
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import OwnCache, TargetConfig
from dflash_runtime.models.hosted import TransformersTarget, check_features, check_head, trying_out
from dflash_runtime.models.hosted_loading import load_model
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.placement import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""Names of the cache in decoders' arguments and outputs."""

SCORE_BYTES = 256 * 2**20
"""Most bytes of one layer's attention scores, which transformers writes twice: heads times rows times text."""

LEAST_ROWS = 64
"""Rows of one forward whatever the scores take, so that a block is never split."""

MOST_PENDING = 32
"""Accepted tokens that are read again before each block. More tokens than this go into the cache."""

TRIAL_START = 66
TRIAL_KEPT = (1, 3, 2, 4)
TRIAL_BLOCK = 4
"""The trial: prompts of 1 and of 66 tokens, then blocks of 4 tokens with 1, 3, 2 and 4 accepted."""

LEAST_TOLERANCE = 1e-3
"""Largest relative difference of hidden states with and without a cache; sqrt(eps) of the dtype if that is larger."""

NOISE_FACTOR = 4
"""How many times larger the difference may be when tokens are read at once, because sums have another order."""


@dataclass(slots=True)
class TextCache:
    """A target's cache of one text.

    cache    holds the first `cached_len` tokens
    tokens   tokens that ran after the cache; tokens before the next block's start are accepted
    ahead    a cache that holds `tokens` as well, or None
    """

    cache: Any = None
    cached_len: int = 0
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    ahead: Any = None

    def hold(self, cache: Any, length: int) -> None:
        """Replace the cache and forget the tokens that ran after it."""
        self.cache, self.cached_len, self.tokens, self.ahead = cache, length, self.tokens[:0], None


class OwnCacheTarget(TransformersTarget):
    """A decoder of transformers as a target that keeps a `TextCache` for each text.

    reads_at_once   whether several tokens after a cache may run in one forward
    can_crop        whether the cache can drop its last tokens
    """

    def __init__(self, config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> None:
        super().__init__(config, model, _find_decoder(model), placement)
        self.reads_at_once = False
        self.can_crop = False
        known = inspect.signature(self.decoder.forward).parameters
        self._has_positions = "position_ids" in known
        self._cache_name = next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[0])

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.target.Target`. The rows are a text from its beginning, and no cache of it is kept."""
        hidden, features, _ = self._forward(token_ids, 0, taps, use_cache=False)
        return hidden if wanted is None else hidden[wanted], features

    def read(
        self, text: TextCache, token_ids: Tensor, start: int, taps: Sequence[int], *, is_final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run tokens [T] of a text from position `start` on, and reject earlier tokens from that position on.

        Final tokens stay in the text. Otherwise the next call's `start` says how many of the tokens were accepted.
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
        """Reject the tokens that ran from `start` on."""
        num_kept = start - text.cached_len
        num_rejected = len(text.tokens) - num_kept
        assert num_kept >= 0, "start is before the end of the cache"
        assert num_rejected >= 0, "start is after the last token"
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
        """Run tokens after a cache in as few forwards as possible -> hidden states, features and the new cache."""
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
        """Run one forward of the decoder -> hidden states, features and the new cache."""
        given: dict[str, Any] = {self._cache_name: cache} if cache is not None else {}
        if self._has_positions:
            given["position_ids"] = torch.arange(start, start + len(token_ids), device=self.entry)[None]
        hidden, features, output = self._run_decoder(token_ids, taps, use_cache=use_cache, **given)
        return hidden, features, getattr(output, self._cache_name, None)


def load_own_cache(source: TargetSource, config: TargetConfig, placement: Placement) -> OwnCacheTarget:
    """Load a target through transformers, from safetensors only, and find by trial how it must be run.

    Raises:
        UnsupportedError: quantised weights, or a model with a cache that does not replace the tokens before it.
        CheckpointError: tensors are missing or misshapen, or transformers does not load them.
    """
    model = load_model(source, config, placement, "eager")  # other implementations leave out features silently
    target = OwnCacheTarget(config, model, placement)
    with trying_out(config), torch.inference_mode():
        _try_out(target, model, placement.device)
    return target


def score_bytes(config: TargetConfig, num_rows: int) -> int:
    """Return the most bytes of one layer's attention scores with prompt chunks of `num_rows` rows."""
    return max(SCORE_BYTES, _score_bytes(config, num_rows) * num_rows)


def _score_bytes(config: TargetConfig, num_tokens: int) -> int:
    """Return the bytes of one row's attention scores in a text of `num_tokens`, in float32 and in a second copy."""
    return 2 * torch.float32.itemsize * config.num_heads * num_tokens


def _num_rows(config: TargetConfig, num_tokens: int) -> int:
    """Return the rows of one forward in a text of `num_tokens`."""
    return max(LEAST_ROWS, SCORE_BYTES // _score_bytes(config, num_tokens))


def copy_cache(cache: Any) -> Any:
    """Return a copy of a cache, so that running on the copy does not change the original."""
    shared = {id(item): item for layer in _grown_layers(cache) for item in (layer.keys, layer.values)}
    return copy.deepcopy(cache, shared)


def _grown_layers(cache: Any) -> list[Any]:
    """Return the layers that make new K and V tensors for every token. Copies may share these tensors."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return [item for item in getattr(cache, "layers", ()) if type(item) in (DynamicLayer, DynamicSlidingWindowLayer)]


def _is_croppable(cache: Any) -> bool:
    """Whether a cache consists of only the keys and values of all tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def _find_decoder(model: "PreTrainedModel") -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    return decoder if decoder is not model else model.model


def _try_out(target: OwnCacheTarget, model: "PreTrainedModel", device: torch.device) -> None:
    """Find how a loaded model must run so that its cache replaces the tokens before it, and measure the cache.

    Raises:
        UnsupportedError: with a cache, the hidden states always differ.
    """
    config = target.config
    num_tokens = min(TRIAL_START + sum(TRIAL_KEPT), config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator).to(device)
    said = model(input_ids=token_ids[None].to(target.entry), use_cache=False).logits[0].to(device)
    hidden, features, _ = target._forward(token_ids, 0, (0,), use_cache=False)
    check_features(config, features, hidden)
    check_head(config, target.head, hidden, said)
    noise = _distance(target, token_ids, hidden)
    if not noise <= max(LEAST_TOLERANCE, torch.finfo(hidden.dtype).eps ** 0.5):
        why = f"its hidden states with a cache differ from those without by {noise:.2g}"
        raise not_run(config.model_type, why, id="target-cache-differs")
    allowed = max(NOISE_FACTOR * noise, torch.finfo(hidden.dtype).eps)
    for can_crop in (True, False) if _is_croppable(_fill(target, token_ids).cache) else (False,):
        target.reads_at_once, target.can_crop = True, can_crop
        if _is_within(target, token_ids, hidden, allowed):
            break
    else:
        target.reads_at_once = target.can_crop = False
    target.config = replace(config, own_cache=_measure(target, token_ids))


def _is_within(target: OwnCacheTarget, token_ids: Tensor, wanted: Tensor, allowed: float) -> bool:
    """Whether reading blocks at once gives the wanted hidden states. Code that does not support it may also fail."""
    try:
        return _distance(target, token_ids, wanted) <= allowed
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False


def _distance(target: OwnCacheTarget, token_ids: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of hidden states between blocks with rejected tokens and one forward."""
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
    """Return the bytes of a text's cache, measured on two texts, and doubled if blocks run on copies."""
    num_few = len(token_ids) // 2
    few, many = (_num_bytes(_fill(target, token_ids[:count]).cache) for count in (num_few, len(token_ids)))
    token_bytes = -(-(many - few) // (len(token_ids) - num_few))
    num_copies = 1 if target.can_crop else 2
    return OwnCache(num_copies * token_bytes, num_copies * max(0, many - token_bytes * len(token_ids)))


def _num_bytes(cache: Any) -> int:
    return sum({item.data_ptr(): item.nbytes for item in _tensors(cache)}.values())


def _tensors(item: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nested object."""
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
