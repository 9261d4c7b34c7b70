"""The states of recurrent layers: one state per text, and records of its latest rows.

A text is a row of the device state, so a request has its states from admission to its end. Accepting a block changes
nothing here: the next block of the text replays as many records as rows were accepted (`delta_rule.py`), and the
convolution reads its rows by their positions (`recent_conv.py`). Of a verified tree, the records of the accepted path
move to the path's positions.

Axis letters: B texts, T flat rows, C channels, S taps, H value heads, V size of a value, R requests, M rows of a ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import Segment
from dflash_kernels.drafts.draft_tree import TreeRows
from dflash_kernels.drafts.tree_path import PathRecords
from dflash_kernels.recurrent.delta_prompts import PromptChunks, chunk_ints
from dflash_kernels.recurrent.delta_rule import STATE_TILE, BlockTexts, Gates, empty_states, room_for
from dflash_kernels.recurrent.recent_conv import RowRuns
from dflash_kernels.recurrent.state_snapshots import LayerMemories
from dflash_runtime.device.storage.snapshot_pool import PromptKeeps, SnapshotPool
from dflash_runtime.device.storage.state import row_of
from dflash_runtime.engine_config import EXACT_REQUESTS
from dflash_runtime.errors import HandoffMismatch
from dflash_runtime.kv_transfer.handoff import STATE
from dflash_runtime.models.hosting.cache_state import TextState
from dflash_runtime.models.placement import Placement
from dflash_runtime.scheduling.request import Request
from dflash_runtime.target_config import RecurrenceConfig

STATES, LATEST = f"{STATE}recurrent", f"{STATE}latest_rows"
"""Names of a text's memory in a hand-off: the states of all layers [L, H, P, K, S], and the rows before the next one
[L, S - 1, C]."""


MOST_REPLAYED = 4
"""A state that lacks more rows is stored. Reading a few more records takes less time than writing the state."""


class RecurrentStates:
    """The memory of every text, by recurrent layer. `state_lens` [B] counts the rows that a text's states include.

    In steps of at most `most_exact` requests, a block gives bitwise the results of its rows one at a time. Otherwise
    its rows run at once, which is faster for many requests.
    """

    def __init__(
        self,
        config: RecurrenceConfig,
        num_texts: int,
        block_rows: int,
        placement: Placement,
        num_snapshots: int = 0,
        page_size: int = 1,
        most_exact: float = EXACT_REQUESTS,
    ) -> None:
        self.config, self.kernels, self.num_texts = config, placement.kernels, num_texts
        self.wide = torch.promote_types(placement.dtype, torch.float32)
        self.most_exact = most_exact
        size = MOST_REPLAYED + 2 * block_rows
        heads, values = config.num_value_heads, config.value_size
        keys = (config.num_key_heads, config.key_size)

        def zeros(*shape: int, dtype: torch.dtype = self.wide) -> Tensor:
            return torch.zeros((len(config.layers), num_texts, *shape), dtype=dtype, device=placement.device)

        states = empty_states(
            len(config.layers) * num_texts, heads, config.key_size, values, self.wide, placement.device
        )  # fmt: skip
        self.all_layers = LayerMemories(
            states.unflatten(0, (len(config.layers), num_texts)),
            zeros(size, *keys),
            zeros(size, heads, values),
            zeros(size, heads),
            zeros(max(block_rows, 1) + config.num_taps - 1, config.num_channels, dtype=placement.dtype),
        )
        by_layer = {layer: self.all_layers.of_layer(index) for index, layer in enumerate(config.layers)}
        self.memories = {layer: memory for layer, (memory, _) in by_layer.items()}
        self.rings = {layer: ring for layer, (_, ring) in by_layer.items()}
        self.pool = SnapshotPool(config, self.all_layers, num_snapshots, page_size, placement)
        self.holders: dict[int, Request] = {}  # the last request of each row
        self.state_lens = torch.zeros(num_texts, dtype=torch.int64, device=placement.device)

    def hold(self, requests: Sequence[Request]) -> None:
        """Note the rows that requests were given. A request that was preempted leaves its old row."""
        if requests:
            kept = {row: holder for row, holder in self.holders.items() if holder not in requests}
            self.holders = kept | {row_of(request): request for request in requests}

    def take(self, request: Request) -> TextState:
        """A copy of a request's memory right after its prompt. The request may have left its row in the same step."""
        text = next(row for row, holder in self.holders.items() if holder is request)
        slots = self._latest(request.prompt_len)
        return TextState({
            STATES: torch.stack([memory.states[text] for memory in self.memories.values()]),
            LATEST: torch.stack([ring[text, slots] for ring in self.rings.values()]),
        })  # fmt: skip

    def put(self, text: int, state: TextState, num_rows: int) -> None:
        """Give a text the memory that another engine took after `num_rows` rows.

        Raises:
            HandoffMismatch: the memory is of another target.
        """
        slots = self._latest(num_rows)
        for name, stores in (
            (STATES, [memory.states[text] for memory in self.memories.values()]),
            (LATEST, [ring[text] for ring in self.rings.values()]),
        ):
            given = state.tensors.get(name)
            wanted = (len(stores), *(stores[0].shape if name == STATES else (len(slots), stores[0].shape[1])))
            if given is None or tuple(given.shape) != wanted or given.dtype != stores[0].dtype:
                found = "missing" if given is None else f"{given.dtype} {list(given.shape)}"
                raise HandoffMismatch(
                    f"the states of recurrent layers: {name} is {found}, expected {stores[0].dtype} {list(wanted)}",
                    id="state-of-another-target",
                )
            for store, part in zip(stores, given.to(stores[0].device), strict=True):
                if name == STATES:
                    store.copy_(part)
                else:
                    store[slots] = part
        self.state_lens[text : text + 1].fill_(num_rows)

    def _latest(self, num_rows: int) -> Tensor:
        """The slots of the rows that the next row is convolved with, oldest first."""
        positions = torch.arange(num_rows - self.config.num_taps + 1, num_rows, device=self.state_lens.device)
        size = next(iter(self.rings.values())).shape[1]
        return positions % size

    def move_path(self, path: PathRecords) -> None:
        """Move the records of the rows of accepted paths to the slots of their positions, in all layers."""
        for records in self.all_layers[1:]:
            self.kernels.move_records(records, path)

    def is_last(self, layer: int) -> bool:
        """Whether no recurrent layer follows."""
        return layer == self.config.layers[-1]


@dataclass(frozen=True, slots=True)
class BlockRecall:
    """A `Recall` for blocks of drafted rows, or for trees."""

    states: RecurrentStates
    texts: BlockTexts
    runs: RowRuns
    tree: TreeRows | None = None

    @classmethod
    def of(cls, states: RecurrentStates, rows: Tensor, lens: Tensor, tree: TreeRows | None = None) -> "BlockRecall":
        """Blocks or trees of texts [R] with `lens` [R] rows before them."""
        return cls(states, BlockTexts(rows, states.state_lens[rows], lens), RowRuns(rows, lens), tree)

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `models.layers.Recall`; writes into `out` [T, H, V] if it is given."""
        states, kernels, ring = self.states, self.states.kernels, self.states.rings[layer]
        memory = states.memories[layer]
        if self.tree is not None:
            mixed = kernels.tree_conv(rows, taps, ring, self.runs, self.tree)
            found = kernels.delta_blocks(mixed, gates, memory, self.texts, MOST_REPLAYED, out, self.tree)
        else:
            mixed = kernels.recent_conv(rows, taps, ring, self.runs)
            count = len(self.texts.texts)
            is_serial = count <= states.most_exact or len(rows) == count
            rule = kernels.delta_rule if is_serial else kernels.delta_blocks
            found = rule(mixed, gates, memory, self.texts, MOST_REPLAYED, out)
        if states.is_last(layer):
            texts, state_lens, lens = self.texts
            is_stored = lens - state_lens > MOST_REPLAYED
            states.state_lens[texts] = torch.where(is_stored, lens, state_lens)
        return found


@dataclass(frozen=True, slots=True)
class PromptRecall:
    """A `Recall` for chunks of prompts. Everything about the chunks is on the device, so captured steps replay it."""

    states: RecurrentStates
    prompts: PromptChunks
    runs: RowRuns
    keeps: PromptKeeps | None = None

    @classmethod
    def of(
        cls, states: RecurrentStates, prompts: PromptChunks, num_rows: int, keeps: PromptKeeps | None = None
    ) -> "PromptRecall":
        """Return the recall of chunks with consecutive flat rows. Rows after the last chunk are padding."""
        firsts, counts, starts, texts, _ = prompts.chunks
        flat = torch.arange(num_rows, device=firsts.device)
        of_rows = torch.searchsorted(firsts + counts, flat, right=True).clamp(max=len(firsts) - 1)
        return cls(states, prompts, RowRuns(texts, starts, firsts, counts, of_rows), keeps)

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `models.layers.Recall`; writes into `out` [T, H, V] if it is given."""
        states, runs, keeps = self.states, self.runs, self.keeps
        index = states.config.layers.index(layer)
        if keeps is not None:
            keeps.keep_rows(index, rows, states.rings[layer])
        mixed = states.kernels.recent_conv(rows, taps, states.rings[layer], runs)
        memory, heads = states.memories[layer].states, states.config.num_key_heads
        if keeps is None:
            found = states.kernels.delta_prompts(mixed, gates, memory, heads, self.prompts, out)
        else:
            found = room_for(mixed, states.config.num_value_heads, states.config.value_size) if out is None else out
            for item in keeps.rounds:
                states.kernels.delta_prompts(mixed, gates, memory, heads, item.prompts, found)
                keeps.keep_states(index, memory, item)
        if states.is_last(layer):
            assert runs.counts is not None
            states.state_lens[runs.texts] = runs.starts + runs.counts
        return found


def recall_alone(config: RecurrenceConfig | None, num_rows: int, placement: Placement) -> PromptRecall | None:
    """Return a `Recall` for one text from its beginning, without kept states. None without recurrent layers."""
    if config is None:
        return None
    ints = torch.tensor(chunk_ints([Segment(0, num_rows, 0, 0)]), dtype=torch.int64, device=placement.device)
    return PromptRecall.of(RecurrentStates(config, 1, 1, placement), PromptChunks.cut(ints, 1), num_rows)


def snapshot_bytes(config: RecurrenceConfig, dtype: torch.dtype) -> int:
    """Bytes of one snapshot."""
    states = _state_numbers(config) * torch.promote_types(dtype, torch.float32).itemsize
    return len(config.layers) * (states + (config.num_taps - 1) * config.num_channels * dtype.itemsize)


def _state_numbers(config: RecurrenceConfig) -> int:
    """Numbers in the state of one layer, with the padding of its last tile."""
    columns = -(-config.value_size // STATE_TILE) * STATE_TILE
    return config.num_value_heads * columns * config.key_size


def state_bytes(config: RecurrenceConfig, block_rows: int, dtype: torch.dtype) -> int:
    """Bytes of one text's memory in all recurrent layers."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    record = config.keys_width + config.values_width + config.num_value_heads
    numbers = _state_numbers(config) + (MOST_REPLAYED + 2 * block_rows) * record
    ring = (block_rows + config.num_taps - 1) * config.num_channels
    return len(config.layers) * (numbers * wide + ring * dtype.itemsize)
