"""The trial of a target with its own cache: which forwards leave a cache that replaces the tokens before it.

Families differ in how they read several tokens after a cache: some ignore the state then. They also differ in whether
the rows of a batch may have different lengths. So a trial after loading rejects tokens at several positions, and
compares the hidden states with forwards without a cache. A way to run a target is used if it is as accurate as
one text alone, read token by token.

Rounding in a narrow dtype may change hidden states as much as a wrong cache does: routers with nearly equal scores
choose other experts. If it changes them by more than a little, the trial is repeated in float32, where differences are
either tiny or faults.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.hf_config import not_run
from dflash_runtime.models.hosting.cache_rows import find_layout
from dflash_runtime.models.hosting.cache_state import leaves, name_of
from dflash_runtime.models.hosting.host_reads import find_host_read
from dflash_runtime.models.hosting.hosted import check_features, check_head, trying_out
from dflash_runtime.models.hosting.hosted_experts import use_our_experts
from dflash_runtime.models.hosting.hosted_loading import first_line, load_model
from dflash_runtime.models.hosting.hosted_swaps import swap_modules
from dflash_runtime.models.hosting.own_cache import (
    LEAST_PADDING,
    PADDED_SHARE,
    Batching,
    Member,
    OwnCacheTarget,
    TextCache,
)
from dflash_runtime.models.hosting.small_chunks import find_chunks
from dflash_runtime.models.hosting.swapped_modules import Setting
from dflash_runtime.models.placement import Placement
from dflash_runtime.notices import Notice
from dflash_runtime.target_config import OwnCache, TargetConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL_START = 66
TRIAL_KEPT = (1, 3, 2, 4)
TRIAL_BLOCK = 4
"""The trial: prompts of 1 and of 66 tokens, then blocks of 4 tokens with 1, 3, 2 and 4 accepted."""

EVEN, UNEVEN = (40, 40, 40), (1, 66, 40)
"""Lengths of the prompts of three texts that share a cache in the trial."""

LEAST_TOLERANCE = 1e-3
"""Largest relative difference of hidden states with and without a cache; sqrt(eps) of the dtype if that is larger."""

NOISE_FACTOR = 4
"""How many times larger the difference may be when tokens are read at once, because sums have another order."""

CHUNK = "attention_chunk_size"
"""Config key for attention within chunks of the text."""

SWAP_ROWS = 9
"""Rows with which swaps are compared."""

NUM_COPIES = 2
"""Copies of a cache that are held at once: of committed tokens, and with a block."""

GRAPH_COPIES = 2
"""More copies with CUDA graphs: their buffers, and new keys, values and states. Both have a graph's padding too."""


def load_own_cache(source: TargetSource, config: TargetConfig, placement: Placement) -> OwnCacheTarget:
    """Load a target through transformers, from safetensors only, and find by trial how it must be run.

    Raises:
        UnsupportedError: quantised weights, or a model with a cache that does not replace the tokens before it.
        CheckpointError: tensors are missing or misshapen, or transformers does not load them.
    """
    model = load_model(source, config, placement, "eager")  # other implementations leave out features silently
    return own_cache_target(model, config, placement)


def own_cache_target(model: "PreTrainedModel", config: TargetConfig, placement: Placement) -> OwnCacheTarget:
    """Find by trial how a loaded model must be run. Raises the errors of `load_own_cache`."""
    target = OwnCacheTarget(config, model, placement)
    with trying_out(config), torch.inference_mode():
        token_ids = _try_out(target, model, placement.device)
    if placement.spread is None:
        with trying_out(config), torch.no_grad():  # new weights must not be tensors of inference mode
            _use_kernels(target, model, placement)
    with trying_out(config):
        target.uncaptured = _why_not_captured(target, placement)
        with torch.inference_mode():
            target.config = replace(config, own_cache=_measure(target, token_ids, placement.has_graphs))
    return target


def _why_not_captured(target: OwnCacheTarget, placement: Placement) -> Notice | None:
    """Return the reason why forwards after a cache cannot be captured as CUDA graphs, or None.

    A graph has one size of the cache. So keys and values are padded on the left, and states have a fixed size.
    """
    if placement.spread is not None:
        return Notice("its layers are on several devices", id="target-is-spread", field="--device-map")
    layout, batching = target.layout, target.batching
    if layout.problem is not None or (layout.grown and not batching.any_length):
        return Notice(f"texts cannot be padded ({layout.problem or batching.problem})", id="target-not-padded")
    texts = torch.arange(2 * TRIAL_BLOCK, device=target.entry).view(2, -1) % target.config.vocab_size
    texts = texts if batching.same_length else texts[:1]
    with torch.inference_mode(mode=False), torch.no_grad():
        text = TextCache()
        target.fill(text, texts, ())
        room, lens = text.lens[0], torch.tensor(text.lens).to(target.entry)
        fixed = [path for path, value in leaves(text.cache) if isinstance(value, Tensor) and not value.dim()]
        counts = [*sorted(map(name_of, layout.counts)), *map(name_of, fixed)]
        if counts:
            return Notice(f"its cache counts tokens in {counts[0]}", id="target-cache-counts", field=counts[0])
        tokens = texts if target.reads_at_once else texts[:, :1]
        found = find_host_read(lambda: target.forward_in_room(tokens, lens, (0,), text.cache, room))
    if found is None:
        return None
    why = f"its code reads values on the host: {found.operation} in {found.place}"
    return Notice(why, id="target-reads-on-host", field=found.operation)


def _use_kernels(target: OwnCacheTarget, model: "PreTrainedModel", placement: Placement) -> None:
    """Give experts and other modules our kernels where they agree. Attention keeps transformers' code."""
    use_our_experts(model, placement.kernels)
    if placement.has_swaps:
        token_ids = torch.arange(SWAP_ROWS, device=placement.device)[None] % target.config.vocab_size
        setting = Setting(target.config, placement.kernels, {})
        target.swaps = swap_modules(
            target.decoder, setting, lambda: target._forward(token_ids, (0,), (), use_cache=False)[0][0]
        )


def _try_out(target: OwnCacheTarget, model: "PreTrainedModel", device: torch.device) -> Tensor:
    """Find how a loaded model must run so that its cache replaces the tokens before it -> the tokens of the trial.

    Raises:
        UnsupportedError: with a cache, the hidden states always differ.
    """
    config = target.config
    num_tokens = min(TRIAL_START + sum(TRIAL_KEPT), config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator).to(device)
    said = model(input_ids=token_ids[None].to(target.entry), use_cache=False).logits[0].to(device)
    hidden, features, _ = target._forward(token_ids[None], (0,), (0,), use_cache=False)
    check_features(config, None if features is None else features[0], hidden[0])
    check_head(config, target.head, hidden[0], said)
    _find_ways(target, model, token_ids)
    return token_ids


def _find_ways(target: OwnCacheTarget, model: "PreTrainedModel", token_ids: Tensor) -> None:
    """Find how the target must run, in float32 if rounding is as large as faults and memory allows."""
    # Constants that were rounded to a narrow dtype stay rounded in float32, so its tolerance holds there too.
    tolerance = max(LEAST_TOLERANCE, torch.finfo(target.embedding.dtype).eps ** 0.5)
    trial = _Trial.of(target, token_ids)
    if NOISE_FACTOR * trial.noise > tolerance and not any(item.is_meta for item in model.parameters()):
        with suppress(torch.OutOfMemoryError), _in_float32(target, model):
            return _Trial.of(target, token_ids).find_ways(tolerance)
    return trial.find_ways(tolerance)


@contextmanager
def _in_float32(target: OwnCacheTarget, model: "PreTrainedModel") -> Iterator[None]:
    """Run the model with float32 copies of its weights within the block."""
    narrow = [item for item in (*model.parameters(), *model.buffers()) if item.dtype in (torch.float16, torch.bfloat16)]
    kept, embedding = [item.data for item in narrow], target.embedding
    try:
        with torch.inference_mode(False):
            for item in narrow:
                item.data = item.data.float()
            target.embedding = embedding.float()
        yield
    finally:
        target.embedding = embedding
        for item, data in zip(narrow, kept, strict=True):
            item.data = data


@dataclass(frozen=True)
class _Trial:
    """A trial of a target with one text, in the dtype that its weights have now.

    hidden   [T, hidden] without a cache
    whole    the cache of all tokens
    noise    relative difference of hidden states with a cache that reads token by token
    """

    target: OwnCacheTarget
    token_ids: Tensor
    hidden: Tensor
    whole: Any
    noise: float

    @classmethod
    def of(cls, target: OwnCacheTarget, token_ids: Tensor) -> "_Trial":
        """Find how tokens lie in the cache, and read a text token by token."""
        num_tokens = len(token_ids)
        target.reads_at_once = target.can_crop = target.makes_masks = False
        hidden = target._forward(token_ids[None], (0,), (), use_cache=False)[0][0]
        few, many = (_fill(target, token_ids[:count]).cache for count in (1, num_tokens))
        target.layout = find_layout(few, many, (1, num_tokens))
        trial = cls(target, token_ids, hidden, many, 0.0)
        return replace(trial, noise=max(_distance(target, *trial._text(start)) for start in trial._starts))

    @property
    def _starts(self) -> tuple[int, int]:
        return 1, len(self.token_ids) - sum(TRIAL_KEPT)

    def _text(self, start: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
        return [self.token_ids], [self.hidden], [start]

    def find_ways(self, tolerance: float) -> None:
        """Set how the target reads blocks and which texts share a cache. A text may differ by `tolerance` of its norm.

        Raises:
            UnsupportedError: a text that is read token by token differs.
        """
        target = self.target
        if not self.noise <= tolerance:
            why = f"its hidden states with a cache differ from those without by {self.noise:.2g}"
            raise not_run(target.config.model_type, why, id="target-cache-differs")
        allowed = max(NOISE_FACTOR * self.noise, torch.finfo(self.hidden.dtype).eps)
        texts = [self._text(start) for start in self._starts]
        for can_crop, makes_masks in _ways(target, self.whole):
            target.reads_at_once, target.can_crop, target.makes_masks = True, can_crop, makes_masks
            if all(_problem(target, *text, allowed) is None for text in texts):
                break
        else:
            target.reads_at_once = target.can_crop = target.makes_masks = False
        if target.reads_at_once:
            target.chunks = find_chunks(target.decoder)
            if any(_problem(target, *text, allowed) for text in texts):
                target.chunks = ()
        target.batching = _find_batching(target, self.token_ids, allowed)
        target.masks_padding = target.makes_masks
        if target.batching.any_length and target.layout.grown and not target.makes_masks and not _has_windows(target):
            target.makes_masks = True
            target.masks_padding = _why_not_batched(target, self.token_ids, UNEVEN, allowed) is None
            target.makes_masks = False


def _ways(target: OwnCacheTarget, cache: Any) -> Iterator[tuple[bool, bool]]:
    """Yield the ways to read several tokens at once, the fastest first: whether to crop, and to make masks.

    A cache can be cropped if it consists of only the keys and values of all tokens. Masks are made for layers that
    attend to all tokens.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers):
        yield True, False
    yield False, False
    if not _has_windows(target):
        yield False, True


def _has_windows(target: OwnCacheTarget) -> bool:
    """Whether a layer may attend to a part of the text only."""
    return any(value for key, value in target.code_config.items() if "window" in key or key == CHUNK)


def _find_batching(target: OwnCacheTarget, token_ids: Tensor, allowed: float) -> Batching:
    """Find by trial which texts may share a cache."""
    if target.layout.problem is not None:
        return Batching(problem=f"{target.layout.problem} in its cache is not of one text")
    problems = [_why_not_batched(target, token_ids, lens, allowed) for lens in (EVEN, UNEVEN)]
    return Batching(problems[0] is None, problems[0] is None and problems[1] is None, problems[0] or problems[1])


def _why_not_batched(target: OwnCacheTarget, token_ids: Tensor, lens: tuple[int, ...], allowed: float) -> str | None:
    """Return why texts with prompts of these lengths cannot share a cache, or None."""
    texts = [token_ids.roll(count) for count in range(len(lens))]
    wanted = [target._forward(text[None], (0,), (), use_cache=False)[0][0] for text in texts]
    room = len(token_ids) - sum(TRIAL_KEPT)
    return _problem(target, texts, wanted, [min(length, room) for length in lens], allowed)


def _problem(
    target: OwnCacheTarget, texts: Sequence[Tensor], wanted: Sequence[Tensor], starts: Sequence[int], allowed: float
) -> str | None:
    """Return why texts read in one cache differ from the wanted hidden states, or None if they do not.

    Code that does not support it may also fail.
    """
    try:
        found = _distance(target, texts, wanted, starts)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        return first_line(error)
    return None if found <= allowed else f"hidden states differ by {found:.2g}"


def _distance(
    target: OwnCacheTarget, texts: Sequence[Tensor], wanted: Sequence[Tensor], starts: Sequence[int]
) -> float:
    """Return the relative difference of hidden states between blocks with rejected tokens and one forward.

    Each text has a prompt of its length in `starts`. Then all share a cache.
    """
    parts, counted, members = [], [], []
    for text, expected, start in zip(texts, wanted, starts, strict=True):
        cache = TextCache()
        parts.append(target.fill(cache, text[None, :start], ())[0][0])
        counted.append(expected[:start])
        members.append(Member(cache, 0, start))
    for step in range(len(TRIAL_KEPT)):
        joined = target.join(members)
        kept = [TRIAL_KEPT[(step + row) % len(TRIAL_KEPT)] for row in range(len(texts))]
        begins = [member.length for member in members]
        blocks = [
            torch.cat((text[begin : begin + count], text[: TRIAL_BLOCK - count]))
            for text, begin, count in zip(texts, begins, kept, strict=True)
        ]
        hidden, _ = target.verify(joined, torch.stack(blocks), ())
        for row, (begin, count) in enumerate(zip(begins, kept, strict=True)):
            parts.append(hidden[row, :count])
            counted.append(wanted[row][begin : begin + count])
        members = [
            Member(joined, row, begin + count) for row, (begin, count) in enumerate(zip(begins, kept, strict=True))
        ]
    found, expected = torch.cat(parts).double(), torch.cat(counted).double()
    return float((found - expected).norm() / expected.norm())


def _fill(target: OwnCacheTarget, token_ids: Tensor) -> TextCache:
    text = TextCache()
    target.fill(text, token_ids[None], ())
    return text


def _measure(target: OwnCacheTarget, token_ids: Tensor, has_graphs: bool) -> OwnCache:
    """Return the bytes of a text in a cache, with its padding, measured on two texts. Blocks run on copies."""
    num_few = len(token_ids) // 2
    few, many = (_num_bytes(_fill(target, token_ids[:count]).cache) for count in (num_few, len(token_ids)))
    token_bytes = -(-(many - few) // (len(token_ids) - num_few))
    own_bytes = max(0, many - token_bytes * len(token_ids))
    num_graph_copies = GRAPH_COPIES if has_graphs and target.uncaptured is None else 0
    if not target.batching.any_length:
        num_copies = NUM_COPIES + num_graph_copies
        return OwnCache(num_copies * token_bytes, num_copies * own_bytes)
    padded = token_bytes + int(PADDED_SHARE * token_bytes)
    padded_twice = padded + int(PADDED_SHARE * padded)
    return OwnCache(
        NUM_COPIES * padded + num_graph_copies * padded_twice,
        NUM_COPIES * (own_bytes + LEAST_PADDING * token_bytes)
        + num_graph_copies * (own_bytes + 2 * LEAST_PADDING * token_bytes),
    )


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
