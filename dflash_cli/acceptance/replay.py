"""Judge a draft on a dump: how many draft tokens the target would have accepted along the target's own text.

The dump's hidden states give the context KV of each text. One forward then drafts blocks at many anchors of many
texts. A draft token counts as accepted if it equals the text's next token: greedy or sampled, the target would have
chosen that token too.

The chained walk starts at the first anchor and continues after the accepted tokens, as a live run does. The mean over
anchors weights every anchor equally. It differs from the walk, which skips anchors inside accepted blocks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.borrowed_ends import borrow_ends
from dflash_cli.acceptance.conversation_counts import distinct_prompts
from dflash_cli.acceptance.draft_confidence import find_confidence
from dflash_cli.acceptance.dumps.dump_format import DumpedText, check_ids_within
from dflash_cli.acceptance.intervals.statistics import Anchors, Summary, summarise
from dflash_cli.acceptance.journal import Journal
from dflash_cli.acceptance.measure import by_category
from dflash_cli.acceptance.rejected_tokens import find_rejected
from dflash_cli.acceptance.replay_request import ReplayRequest
from dflash_cli.acceptance.tree_results import TreeResult
from dflash_cli.checkpoints.checkpoint_identity import digest_ends, identify
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.loaded_pair import device_name
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.prompts import digest_rows
from dflash_cli.generation.run_facts import BorrowedEnds, ReplayRun, RunFacts
from dflash_runtime.device.setup.attention import check_capability
from dflash_runtime.device.setup.settings import resolve_device, resolve_dtype, resolve_kernels, resolve_kv_dtype
from dflash_runtime.device.storage.kv import bytes_per_token
from dflash_runtime.device.storage.results import read_confidences
from dflash_runtime.device.text_pages import Anchor, TextPages
from dflash_runtime.device.trees import TreeShape
from dflash_runtime.documents import fields_of
from dflash_runtime.drafts.draft import Draft, build_draft, load_draft_weights
from dflash_runtime.errors import CheckpointError
from dflash_runtime.models.placement import Placement
from dflash_runtime.scheduling.request import DraftStep
from dflash_runtime.scheduling.request_output import RequestOutput, confidences_of

GROUP_BYTES = 1 << 30
"""Limit of hidden states and context KV held in memory at one time."""

TEXT_SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos", "chat")
"""Settings that decided the text of our own dump. A live evaluation has them in its settings too."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The steps of a draft along one text: at sampled anchors, in the chained walk, and in the walk of each tree."""

    text: DumpedText
    sampled: tuple[DraftStep, ...]
    walked: tuple[DraftStep, ...]
    trees: tuple[tuple[DraftStep, ...], ...] = ()

    def output(self, steps: Sequence[DraftStep]) -> RequestOutput:
        """Return the steps as a request's output, for the statistics."""
        text = self.text
        end = text.prompt_len + text.answer_len
        return RequestOutput(
            index=text.row.index,
            prompt_token_ids=text.token_ids[: text.prompt_len],
            token_ids=text.token_ids[text.prompt_len : end],
            finish_reason=text.finish_reason,
            acceptance_lengths=tuple(step.num_accepted + 1 for step in steps),
            verify_widths=tuple(step.verify_width for step in steps),
            committed_lengths=tuple(step.num_committed for step in steps),
            rejected_ids=tuple(step.rejected_id for step in steps),
            drafts=tuple(steps),
            draft_confidences=confidences_of(steps),
        )


class Replay:
    """A draft that is loaded and ready to be judged on a dump.

    Raises:
        UnsupportedError: the kernels of this machine do not run the draft.
        UsageError, UnsupportedError, TensorMismatch: see `borrow_ends`.
    """

    def __init__(self, request: ReplayRequest) -> None:
        self.request = request
        draft, config, dump = request.draft, request.config, request.dump
        self.num_drafts = request.num_drafts
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        kernels = resolve_kernels(config.kernels, device, dtype)
        longest = max(len(text.token_ids) for text in dump.texts)
        kv_dtype = resolve_kv_dtype(config.kv_dtype)
        self.placement = Placement(device, dtype, kernels, longest + self.num_drafts + 1, kv_dtype=kv_dtype)
        check_capability(
            kernels.name, None, draft.config, self.placement.dtype_name, num_tree_nodes=max(request.trees, default=0)
        )  # fmt: skip
        self.tree_shape: TreeShape | None = None
        if request.trees:
            most = max(request.trees)
            self.tree_shape = TreeShape(most, request.tree_candidates or most)
        ends = borrow_ends(draft, request.head_from, self.placement)
        weights = load_draft_weights(draft, self.placement)
        self.draft: Draft = build_draft(draft.config, weights, ends, self.placement)
        self.num_blocks = 0  # blocks drafted so far
        self._columns = [dump.taps.index(tap) for tap in draft.config.target_layer_ids]

    def run(self) -> Iterator[Replayed]:
        """Judge every text. Texts of similar length run together."""
        for group in self._groups():
            yield from _TextGroup(self, group).replay(self.request.every)

    def anchors(self, text: DumpedText) -> range:
        """Return the anchors of a text with a complete block: known tokens within the draft's position limit."""
        ends = (
            text.prompt_len + text.answer_len - 1,
            len(text.token_ids) - self.num_drafts,
            text.num_rows + 1,
            self.request.draft.config.max_position_embeddings - self.num_drafts,
        )
        return range(text.prompt_len, max(text.prompt_len, min(ends)))

    def features(self, text: DumpedText) -> Tensor:
        """Return the draft's context features of a text, [T, F].

        Raises:
            CheckpointError: a hidden state is not finite, or a token id is outside the draft's vocabulary.
        """
        check_ids_within(text.token_ids, self.request.draft.config.vocab_size, text.file)
        rows = text.read()[: text.num_rows, self._columns]
        if not bool(rows.isfinite().all()):
            raise CheckpointError(
                "hidden_states: found a value that is not finite",
                id="not-finite",
                path=text.file,
                field="hidden_states",
            )
        return rows.flatten(1).to(self.placement.device, self.placement.dtype)

    def _groups(self) -> Iterator[list[DumpedText]]:
        config = self.request.draft.config
        row_bytes = config.num_taps * config.feature_size * self.placement.dtype.itemsize
        row_bytes += bytes_per_token(config, self.placement.page_dtype)
        most = max(1, GROUP_BYTES // row_bytes)
        group: list[DumpedText] = []
        num_rows = 0
        for text in sorted(self.request.dump.texts, key=lambda item: len(item.token_ids)):
            if group and num_rows + len(text.token_ids) > most:
                yield group
                group, num_rows = [], 0
            group.append(text)
            num_rows += len(text.token_ids)
        yield group


class _TextGroup:
    """Some texts in KV pages, with the draft's context KV and the steps known at their anchors."""

    def __init__(self, replay: Replay, texts: Sequence[DumpedText]) -> None:
        self._replay, self._texts = replay, texts
        token_ids, num_rows = [text.token_ids for text in texts], [text.num_rows for text in texts]
        page_size = replay.request.config.page_size
        self._pages = TextPages(token_ids, page_size, replay.placement, num_rows)
        features = torch.cat([replay.features(text) for text in texts])
        self._cache = self._pages.write_context(replay.draft, features)
        self._steps: dict[Anchor, DraftStep] = {}
        self._ranks: dict[Anchor, list[int]] = {}  # nodes of the text after an anchor, in the largest tree

    def replay(self, every: int) -> Iterator[Replayed]:
        ranges = [self._replay.anchors(text) for text in self._texts]
        sampled = [[(index, at) for at in span[::every]] if every else [] for index, span in enumerate(ranges)]
        self._judge([anchor for anchors in sampled for anchor in anchors])
        walks = self._walk(ranges, self._steps.__getitem__)
        trees = [self._walk(ranges, partial(self._tree_step, num_nodes)) for num_nodes in self._replay.request.trees]
        for index, text in enumerate(self._texts):
            steps = tuple(self._steps[anchor] for anchor in sampled[index])
            yield Replayed(text, steps, tuple(walks[index]), tuple(tuple(walk[index]) for walk in trees))

    def _walk(self, ranges: Sequence[range], step_at: Callable[[Anchor], DraftStep]) -> list[list[DraftStep]]:
        """Return the steps of each text's chained walk. All texts advance one step at a time."""
        walks: list[list[DraftStep]] = [[] for _ in ranges]
        front = {index: span.start for index, span in enumerate(ranges) if span}
        while front:
            self._judge([anchor for anchor in front.items() if anchor not in self._steps])
            for index, position in list(front.items()):
                step = step_at((index, position))
                walks[index].append(step)
                front[index] = position + step.num_accepted + 1
                if front[index] not in ranges[index]:
                    del front[index]
        return walks

    def _tree_step(self, num_nodes: int, anchor: Anchor) -> DraftStep:
        """Return the step of a tree of `num_nodes` nodes at an anchor that was judged."""
        block, (index, position) = self._steps[anchor], anchor
        num_accepted = sum(rank < num_nodes for rank in self._ranks[anchor])
        accepted = self._texts[index].token_ids[position + 1 : position + 1 + num_accepted]
        return replace(
            block,
            draft_ids=(*accepted, *[-1] * (self._replay.num_drafts - num_accepted)),
            num_accepted=num_accepted,
            num_committed=min(num_accepted + 1, self._num_left(anchor)),
        )

    def _num_left(self, anchor: Anchor) -> int:
        """Return the number of tokens that an answer has after an anchor."""
        text = self._texts[anchor[0]]
        return text.prompt_len + text.answer_len - 1 - anchor[1]

    def _judge(self, anchors: Sequence[Anchor]) -> None:
        if not anchors:
            return
        replay = self._replay
        replay.num_blocks += len(anchors)
        proposed, confidences = self._pages.propose(replay.draft, self._cache, anchors, replay.num_drafts)
        accepted = self._pages.count_right(anchors, proposed).tolist()
        predicted = [()] * len(anchors) if confidences is None else read_confidences(confidences)
        for anchor, draft_ids, num_accepted, own in zip(anchors, proposed.tolist(), accepted, predicted, strict=True):
            self._steps[anchor] = DraftStep(
                start=anchor[1] + 1 - self._texts[anchor[0]].prompt_len,
                draft_ids=tuple(draft_ids),
                num_accepted=num_accepted,
                num_committed=min(num_accepted + 1, self._num_left(anchor)),
                confidences=own,
            )
        if replay.tree_shape is not None:
            ranks = self._pages.rank_in_trees(replay.draft, self._cache, anchors, replay.num_drafts, replay.tree_shape)
            self._ranks |= zip(anchors, ranks.tolist(), strict=True)


def replay(request: ReplayRequest) -> Evaluation:
    """Judge a draft on a dump. The evaluation has the chained walk, and the mean over anchors beside it.

    Raises:
        PairMismatch, UsageError, UnsupportedError, CheckpointError: see `Replay`.
    """
    ready = Replay(request)
    started = time.perf_counter()
    found = sorted(ready.run(), key=lambda item: (item.text.row.index, item.text.turn))
    seconds = time.perf_counter() - started
    answers = [Answer(item.text.row, item.text.turn, item.output(item.walked), None) for item in found]
    sampled = [Answer(item.text.row, item.text.turn, item.output(item.sampled), None) for item in found]
    trees = [
        [Answer(item.text.row, item.text.turn, item.output(item.trees[index]), None) for item in found]
        for index in range(len(request.trees))
    ]
    rows = list({item.text.row.index: item.text.row for item in found}.values())
    settings, head = _settings(ready), request.head_from
    with Journal(request.journal, settings, rows, resume=False, force=request.force) as journal:
        for answer in answers:
            journal.add(answer)
    total = _summarise(answers, ready)
    return Evaluation(
        total=total,
        trees=tuple(
            TreeResult.of(num_nodes, _summarise(walked, ready), total)
            for num_nodes, walked in zip(request.trees, trees, strict=True)
        ),
        categories={name: _summarise(members, ready) for name, members in by_category(answers).items()},
        anchors=Anchors.of(_summarise(sampled, ready)) if request.every else None,
        settings=settings,
        rejected_tokens=find_rejected([answer.output for answer in answers], None),
        draft_confidence=find_confidence([answer.output for answer in answers], ready.num_drafts),
        prompts=request.dump.prompts or PromptSource(name=request.dump.path.name, num_available=len(rows)),
        measured=ReplayRun(
            **fields_of(RunFacts.here(device_name(ready.placement.device))),
            draft=identify(request.draft.checkpoint, request.draft_reference),
            draft_method=request.draft.format.serve_method,
            target=request.dump.target,
            head_from=None
            if head is None
            else BorrowedEnds(name=head.checkpoint.path.name, ends_digest=digest_ends(head)),
            dump=request.dump.facts,
            num_blocks=ready.num_blocks,
            num_prompts=len(rows),
            prompts_digest=digest_rows(rows),
        ),
        seconds=seconds,
    )


def _summarise(answers: Sequence[Answer], ready: Replay) -> Summary:
    return summarise(
        [answer.output for answer in answers],
        ready.num_drafts,
        conversations=[answer.row.index for answer in answers],
        prompts=distinct_prompts(answers),
        confidence=ready.request.confidence,
        num_resamples=ready.request.num_resamples,
    )


def _settings(ready: Replay) -> dict[str, object]:
    request, placement = ready.request, ready.placement
    target, dumped = request.dump.target, request.dump.settings
    return {
        "mode": "replay",
        "draft": request.draft_reference,
        "target": target.name if target is not None else None,
        "draft_digest": identify(request.draft.checkpoint, request.draft_reference).digest,
        "target_digest": target.digest if target is not None else None,
        "num_speculative_tokens": ready.num_drafts,
        "every": request.every,
        "dtype": placement.dtype_name,
        "device": placement.device.type,
        "kernels": placement.kernels.name,
        **({"kv_dtype": request.config.kv_dtype} if placement.has_fp8_pages else {}),
        **({"dump_kv_dtype": dumped["kv_dtype"]} if "kv_dtype" in dumped else {}),
        **request.overrides.settings,
        **{name: dumped[name] for name in TEXT_SETTINGS if name in dumped},
    }
