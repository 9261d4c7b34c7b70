"""The engine of a loaded pair: its pages, its prefix cache, its store of prompts, and how it chooses rows to verify."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dflash_runtime.device.capacity.memory import fit_num_pages, fit_num_snapshots
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.step_times import find_step_times
from dflash_runtime.device.storage.kv_pages import PagePorter
from dflash_runtime.drafts.lookups import lookups
from dflash_runtime.engine import Engine
from dflash_runtime.errors import DFlashError, UsageError
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.prefix_store import PrefixStore
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.row_budget import BestBudget, RowBudget
from dflash_runtime.scheduling.scheduler import Scheduler
from dflash_runtime.scheduling.snapshots import SnapshotIndex
from dflash_runtime.scheduling.width import AdaptiveWidth, LookupWidth, StepTimes, WidthPolicy

logger = logging.getLogger(__name__)

STORE_BYTES = 64 * 2**30
"""The limit of a prefix store, if the config does not state one."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine, the store that keeps its prompts between runs, and warnings about parts that are off."""

    engine: Engine
    store: PrefixStore | None
    warnings: tuple[Notice, ...]

    @classmethod
    def of(cls, pair: LoadedPair, find_fingerprint: Callable[[], Fingerprint]) -> "EngineSetup":
        """Build the engine of a pair. All ranks get as many pages as the rank with the least memory.

        Raises:
            CapacityError: the memory left after loading does not hold one request.
            UsageError: the path of the store is a file.
        """
        ranks, config = pair.placement.ranks, pair.config
        draft_config = pair.draft.config if pair.draft is not None else None
        sizes = (config, pair.target.config, draft_config, pair.limits, pair.placement)
        num_pages, num_snapshots = ranks.least(fit_num_pages(*sizes)), ranks.least(fit_num_snapshots(*sizes))
        pages = PagePool(num_pages, config.page_size)
        cache, without_snapshots = make_cache(pair, pages, num_snapshots)
        runner = Runner(pair, num_pages, num_snapshots)
        store, without_store = open_store(pair, find_fingerprint, runner.porter)
        make_index = lookups()[config.drafting] if pair.is_looking_up else None
        policy, budget = find_width_policy(pair, runner), find_row_budget(pair, runner)
        explain = partial(explain_non_finite, pair, runner)
        scheduler = Scheduler(pair.limits, pages, cache, policy, make_index, budget, explain)
        scheduler.load.keeps_to_ridge = pair.has_graphs
        max_in_flight = config.max_in_flight if config.is_async else 0
        engine = Engine(scheduler, runner, max_in_flight=max_in_flight, seed=config.seed)
        return cls(engine, store, tuple(item for item in (without_snapshots, without_store) if item is not None))


def explain_non_finite(pair: LoadedPair, runner: Runner, request: Request, where: str) -> DFlashError | None:
    """Return why a request's logits are not finite: a dead end of its grammar, or a tensor with NaN."""
    failure = runner.grammars.dead_end(request)
    return pair.non_finite.error(where) if failure is None and pair.non_finite is not None else failure


def find_width_policy(pair: LoadedPair, runner: Runner) -> WidthPolicy | None:
    """The width policy of a lookup, or of adaptive width. None, to verify whole blocks, if neither is on or step times
    cannot be measured.
    """
    if pair.is_looking_up:
        return LookupWidth(pair.limits.num_draft_tokens)
    if not pair.config.adaptive_width or runner.draft is None:
        return None
    times = _measured_times(runner, "adaptive width")
    return AdaptiveWidth(times, pair.limits.num_draft_tokens) if times is not None else None


def find_row_budget(pair: LoadedPair, runner: Runner) -> RowBudget | None:
    """The row budget. None, to verify whole blocks, if it is off or step times cannot be measured."""
    if not pair.config.row_budget or runner.draft is None:
        return None
    times = _measured_times(runner, "the row budget")
    return BestBudget(times) if times is not None else None


def _measured_times(runner: Runner, feature: str) -> StepTimes | None:
    """The step times of a runner, or None with a warning that the feature is off."""
    if runner.graphs is None:
        logger.warning("%s is off: the steps of these models are not captured, so their times are unknown", feature)
        return None
    try:
        return find_step_times(runner)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        logger.warning("%s is off: memory does not hold all the steps that it would measure", feature)
        return None


def make_cache(pair: LoadedPair, pages: PagePool, num_snapshots: int) -> tuple[PrefixCache, Notice | None]:
    """The prefix cache, and a warning if it is off because memory holds no state of recurrent layers."""
    if not pair.has_prefix_cache or pair.target.config.recurrence is None:
        return PrefixCache(pages, is_enabled=pair.has_prefix_cache), None
    if num_snapshots:
        return PrefixCache(pages, snapshots=SnapshotIndex(num_snapshots)), None
    notice = Notice("the prefix cache is off: its memory holds no state of the recurrent layers", id="no-snapshots")
    logger.warning(notice)
    return PrefixCache(pages, is_enabled=False), notice


def open_store(
    pair: LoadedPair, find_fingerprint: Callable[[], Fingerprint], porter: PagePorter
) -> tuple[PrefixStore | None, Notice | None]:
    """The store that keeps prompts between runs, or None without one, and a warning if it cannot be used.

    It needs the prefix cache. It keeps KV only, and a target with recurrent layers would need its states too.

    Raises:
        UsageError: the path of the store is a file.
    """
    if pair.config.prefix_store is None:
        return None, None
    folder = Path(pair.config.prefix_store)
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            "is a file, expected a folder",
            id="prefix-store-is-a-file", path=folder, field="prefix_store", found=str(folder), expected="a folder",
        )  # fmt: skip
    if not pair.has_prefix_cache or pair.target.config.recurrence is not None:
        why = "it does not hold the states of recurrent layers" if pair.has_prefix_cache else "the prefix cache is off"
        notice = Notice(f"prompts are not kept in {folder}: {why}", id="no-prefix-store")
        logger.warning(notice)
        return None, notice
    max_bytes = pair.config.prefix_store_bytes or STORE_BYTES
    return PrefixStore(folder, find_fingerprint, pair.config.page_size, porter.page_specs(), max_bytes), None
