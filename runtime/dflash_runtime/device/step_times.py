"""Times of decode steps on this GPU, by batch size and verify width: measured once, then read from a cache file.

Captured greedy steps are replayed on the padding row, without context. Context adds the time to read its KV. A cache
file is valid for one GPU, one version of all software, and the shapes of one pair.
"""

import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch

import dflash_kernels.suite
from dflash_runtime.checkpoint.stored.digests import digest_value, hash_files
from dflash_runtime.checkpoint.stored.strict_json import loads, read_bytes
from dflash_runtime.device.graphs.decode_graphs import StepMode, bucket_of
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.storage.kv import KVCache, bytes_per_token
from dflash_runtime.documents import Limits, from_json, to_json
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import DFlashError
from dflash_runtime.scheduling.width import StepTimes, widths_for
from dflash_runtime.target_config import TargetConfig
from dflash_runtime.whole_files import written_whole

logger = logging.getLogger(__name__)

NUM_REPLAYS = 5

MAX_READ_BYTES, MIN_READ_BYTES = 2**30, 2**28
"""The most and the fewest bytes of KV that are read to measure memory speed. Fewer bytes could fit the L2 cache."""

Observe = Callable[[int, int], None]


Milliseconds = Annotated[float, Limits(above=0, below=1e6)]
ContextMilliseconds = Annotated[float, Limits(least=0, below=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """A cache file: the measured times, and everything that they depend on."""

    key: Mapping[str, Any]
    ms: Annotated[Mapping[int, Mapping[int, Milliseconds]], "of a step, by batch size and verify width"]
    context_ms: Annotated[ContextMilliseconds, "to read the KV of one token of context"]
    draft_context_ms: ContextMilliseconds


def find_step_times(runner: Runner, observe: Observe = lambda num_done, total: None) -> StepTimes:
    """The step times of a runner with captured steps, from the cache if they were measured before.

    `observe` gets the number of measured steps, and the number of all steps.
    """
    key = describe(runner)
    path = cache_directory() / f"{digest_value(key, digest_size=12)}.json"
    batches, widths = measured_batches(runner.limits.max_num_requests), widths_for(runner.limits.num_draft_tokens)
    ranks = runner.ranks
    found = _read(path, key, batches, widths) if ranks.rank == 0 else None
    if not ranks.from_first(found is not None):  # all ranks take part in a measured step
        found = measure(runner, key, batches, widths, observe)
        if ranks.rank == 0:
            _write(path, found)
    if ranks.size > 1:
        found = from_json(MeasuredTimes, ranks.from_first(to_json(found)))
    assert found is not None
    buckets = {bucket_of(count, batches[-1]) for count in range(1, batches[-1] + 1)}
    return StepTimes.between(found.ms, sorted(buckets), found.context_ms, found.draft_context_ms)


def measured_batches(max_requests: int) -> tuple[int, ...]:
    """Batch sizes to measure: powers of two and the largest batch. Other times are interpolated."""
    powers = [1 << power for power in range(max_requests.bit_length())]
    return tuple(sorted({*powers, max_requests}))


def measure(
    runner: Runner, key: Mapping[str, Any], batches: tuple[int, ...], widths: tuple[int, ...], observe: Observe
) -> MeasuredTimes:
    """Replay every step a few times, largest first, and read a part of the KV. Waits for the device."""
    logger.info("measuring decode steps with %s rows per block and %s requests", widths, batches)
    table: dict[int, dict[int, float]] = {}
    total, num_done = len(batches) * len(widths), 0
    for batch in reversed(batches):
        table[batch] = row = {}
        ms = float("inf")
        for width in reversed(widths):
            # A step never needs longer than a wider step. A longer time is a disturbance.
            row[width] = ms = min(ms, _replay_ms(runner, batch, width))
            num_done += 1
            observe(num_done, total)
    byte_ms = _byte_ms(runner.target_kv)
    draft_bytes = _context_bytes(runner.draft.config, runner) if runner.draft is not None else 0.0
    return MeasuredTimes(
        key=key,
        ms=table,
        context_ms=byte_ms * _context_bytes(runner.target.config, runner),
        draft_context_ms=byte_ms * draft_bytes,
    )


def describe(runner: Runner) -> dict[str, Any]:
    """Everything that step times depend on."""
    draft, limits = runner.draft.config if runner.draft is not None else None, runner.limits
    return {
        "gpu": torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "triton": _release("triton"),
        "code": code_digest(),
        "target": _plain(runner.target.config),
        "draft": _plain(draft),
        "dtype": str(runner.target_kv.dtype),
        "kv_dtype": str(runner.target_kv.pages.dtype),
        "draft_sampling": "probabilistic" if runner.drafter.samples_drafts else "greedy",
        "most_exact_requests": None if runner.states is None else str(runner.states.most_exact),
        "num_draft_tokens": limits.num_draft_tokens,
        "row_budget": runner.acceptance is not None,
        "max_num_requests": limits.max_num_requests,
        "max_model_len": limits.max_model_len,
        "page_size": runner.page_size,
        "ranks": runner.ranks.size,
    }


@cache
def code_digest() -> str:
    """A digest of the kernels and the runtime. With other code, steps may take other times."""
    roots = (Path(dflash_kernels.suite.__file__).parent, Path(__file__).parents[1])
    return hash_files(sorted(file for root in roots for file in root.rglob("*.py")))


def cache_directory() -> Path:
    """The folder of the cache files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash" / "step_times"


def _replay_ms(runner: Runner, batch: int, width: int) -> float:
    """Milliseconds of a captured greedy step of `batch` padding rows."""
    assert runner.graphs is not None
    graphs, mode = runner.graphs, StepMode(verify_width=width, is_greedy=True, has_filters=False)
    block = runner.limits.num_lookahead_tokens
    if runner.acceptance is not None and 1 < width < block:  # a row budget gives as many rows on average
        mode = StepMode(block, is_greedy=True, has_filters=False, mean_width=width)
    rows = [runner.limits.max_num_requests] * batch
    return _milliseconds(runner.device, lambda: graphs.replay(rows, mode))


def _byte_ms(kv: KVCache) -> float:
    """Milliseconds to read a byte of KV; 0 if there is too little KV to measure it."""
    pages = kv.pages[: max(1, MAX_READ_BYTES // kv.page_bytes)]
    num_bytes = pages.numel() * pages.itemsize
    pages = pages if pages.itemsize > 1 else pages.view(torch.int16)  # FP8 has no maximum
    return _milliseconds(pages.device, pages.amax) / num_bytes if num_bytes >= MIN_READ_BYTES else 0.0


@torch.inference_mode()
def _milliseconds(device: torch.device, run: Callable[[], object]) -> float:
    """Milliseconds of a piece of work on a GPU, after one untimed run."""
    with torch.cuda.device(device):
        run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(NUM_REPLAYS):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / NUM_REPLAYS


def _context_bytes(config: TargetConfig | DraftConfig, runner: Runner) -> float:
    """KV bytes per token that every step reads. A layer with a window reads few of them, which are not counted."""
    windows = [config.windows[layer] for layer in config.kv_layers]
    share = sum(window is None for window in windows) / max(1, len(windows))
    return share * bytes_per_token(config, runner.target_kv.pages.dtype)


def _read(
    path: Path, key: Mapping[str, Any], batches: tuple[int, ...], widths: tuple[int, ...]
) -> MeasuredTimes | None:
    """The times in a cache file; None without a file. A damaged file or one of another pair is logged."""
    try:
        found = from_json(MeasuredTimes, loads(read_bytes(path)))
        has_all = found.ms.keys() == {*batches} and all(row.keys() == {*widths} for row in found.ms.values())
        if found.key == key and has_all:
            return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, DFlashError):
        pass
    logger.warning("%s: not the step times of this pair on this GPU; measuring them again", path)
    return None


def _write(path: Path, found: MeasuredTimes) -> None:
    """Write a cache file whole or not at all; where that is not possible, the next run measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_text(json.dumps(to_json(found), sort_keys=True, allow_nan=False), encoding="utf-8")
    except OSError as error:
        logger.warning("step times are not kept: %s", error)


def _plain(config: TargetConfig | DraftConfig | None) -> dict[str, Any] | None:
    """A config as JSON values, without the names of checkpoints."""
    if config is None:
        return None
    values: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    values.pop("verifier", None)
    return values


def _release(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
