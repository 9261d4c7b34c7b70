"""The warm-up: compile kernels, capture decode steps and prefill prompts of all sizes before the first request.

Warm-up prompts run like requests, so that every prefill kernel is compiled. Afterwards the prefix cache, the seeds and
the expected length of answers are as before.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice

from dflash_kernels.attention.ragged_config import LONG_CONTEXT
from dflash_kernels.products.product_config import GATED_ROWS, many_rows_shape
from dflash_runtime.device.capacity.memory import log_use
from dflash_runtime.device.graphs.decode_graphs import StepMode, kinds_of
from dflash_runtime.engine import Engine
from dflash_runtime.errors import DFlashError
from dflash_runtime.scheduling.limits import rows_to_ridge
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_PROMPTS = 64
"""The most prompts to prefill at once. More prompts launch the same kernels."""

CONTEXTS, FEW_ROWS = (512, LONG_CONTEXT), 16
"""Lengths of contexts, and the number of prompt rows after each. Attention of few rows cuts the keys of the context
into parts, and a long context has other tiles."""

Progress = Callable[[int, int], None]
"""Gets the number of finished jobs, and the number of all jobs."""


def warm_up(engine: Engine, params: Sequence[SamplingParams], max_requests: int | None, progress: Progress) -> None:
    """Prepare an engine for requests with these parameters, if its steps are captured; see `LLM.warm_up`.

    Raises:
        DFlashError: the device failed, and the engine is closed.
    """
    graphs = engine.runner.graphs
    if graphs is None:
        return
    wanted = graphs.missing(lambda bucket: step_modes(engine, params, bucket), max_requests)
    if not wanted:
        return
    pieces = engine.runner.pieces
    jobs: list[Callable[[], object]] = [partial(graphs.capture, *item) for item in wanted]
    jobs += [partial(pieces.capture, bucket) for bucket in pieces.missing()] if pieces is not None else []
    num_captured, started = len(jobs), time.perf_counter()
    jobs += [partial(run_once, engine, batch) for batch in prefill_batches(engine, params, max_requests)]
    jobs += [partial(run_in_chunks, engine, params[0], context) for context in contexts_of(engine)]
    progress(0, len(jobs))
    for num_done, job in enumerate(jobs, start=1):
        with engine.lock:
            job()
        progress(num_done, len(jobs))
    logger.info("warmed up in %.1f s, with %d captures", time.perf_counter() - started, num_captured)
    log_use(engine.runner.device)


def step_modes(engine: Engine, params: Sequence[SamplingParams], bucket: int) -> list[StepMode]:
    """The modes of all steps that `bucket` requests with these parameters may have, widest first.

    Plain steps with room for prompts come before plain steps without it.
    """
    limits, policy = engine.scheduler.limits, engine.scheduler.width_policy
    block = limits.num_block_rows
    spare = rows_to_ridge(bucket) if limits.max_num_requests > 1 else 0
    asked = {min(item.verify_width or block, block) for item in params}
    budget = engine.scheduler.row_budget
    sizes = [
        (width, num_prompt_rows, mean_width)
        for width in reversed(policy.candidates(bucket, asked))
        for num_prompt_rows in ([spare, 0] if spare and width == 1 else [0])
        for mean_width in (budget.candidates(bucket, width) if budget is not None and width > 1 else [0])
    ]
    return [
        StepMode(width, is_greedy, has_filters, num_prompt_rows, mean_width)
        for width, num_prompt_rows, mean_width in sizes for is_greedy, has_filters in kinds_of(params)
    ]  # fmt: skip


def prefill_batches(engine: Engine, params: Sequence[SamplingParams], max_requests: int | None) -> list[list[Request]]:
    """Batches of prompts to prefill: one prompt for each power of two of tokens and for `gated_rows`, and many at once.

    A further prompt of one token runs each kind of sampling. All prompts begin differently, so none is cached.
    """
    limits = engine.scheduler.limits
    most, longest = limits.max_batched_tokens, limits.max_model_len - 1
    many = min(max_requests or limits.max_num_requests, limits.max_num_requests, MAX_PROMPTS)
    alone = [1 << power for power in range(most.bit_length())] + gated_rows(engine)
    lengths = [*((length,) for length in alone), (max(1, most // many),) * many]
    kinds = list({(item.is_greedy, item.has_filters): item for item in params}.values())
    fitting = [tuple(min(length, longest) for length in batch) for batch in lengths]
    plan = dict.fromkeys([*((batch, kinds[0]) for batch in fitting), *(((1,), kind) for kind in kinds)])
    first = count()
    return [[_prompt(next(first), length, kind, limits.vocab_size) for length in batch] for batch, kind in plan]


def gated_rows(engine: Engine) -> list[int]:
    """The smallest number of prompt rows that uses the kernel of `many_rows.py`; empty if it exceeds a step's limits.

    The kernel runs only if its tiles fill the device well, which may hold for no power of two.
    """
    limits, target = engine.scheduler.limits, engine.runner.target
    most = min(limits.max_batched_tokens, limits.max_model_len - 1)
    sizes = (target.config.intermediate_size, target.embedding.element_size(), engine.runner.device)
    taken = (rows for rows in range(GATED_ROWS, most + 1) if many_rows_shape(rows, *sizes) is not None)
    return list(islice(taken, 1))


def contexts_of(engine: Engine) -> list[int]:
    """CONTEXTS, limited to the model's length."""
    longest = engine.scheduler.limits.max_model_len - 1 - FEW_ROWS
    return [context for context in dict.fromkeys(min(context, longest) for context in CONTEXTS) if context > 0]


def run_in_chunks(engine: Engine, kind: SamplingParams, context: int) -> None:
    """Run a prompt in two steps: a context first, then FEW_ROWS rows.

    Raises:
        DFlashError: the device failed, and the engine is closed.
    """
    limits, load = engine.scheduler.limits, engine.scheduler.load
    load.max_batched_tokens = min(context, limits.max_batched_tokens)
    try:
        run_once(engine, [_prompt(0, context + FEW_ROWS, kind, limits.vocab_size)])
    finally:
        load.restore()


def _prompt(index: int, length: int, kind: SamplingParams, vocab_size: int) -> Request:
    params = replace(kind, max_new_tokens=1, seed=0, stop_token_ids=(), verify_width=None)
    return Request(index=index, prompt_token_ids=(index % vocab_size,) * length, params=params)


def run_once(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests to their end, then forget them and clear the prefix cache. Skip requests that the pool cannot hold.

    Raises:
        DFlashError: the device failed, and the engine is closed.
    """
    scheduler = engine.scheduler
    expected_share = scheduler.room.share
    try:
        for request in requests:
            try:
                scheduler.add(request)  # `Engine.add` would draw a seed
            except DFlashError as error:
                logger.info("no warm-up with %d tokens: %s", request.prompt_len, error.message)
        while scheduler.has_work:
            engine.step()
    finally:
        engine.abort()
        scheduler.restart()
        scheduler.room.share = expected_share
    if engine.failure is not None:
        raise engine.failure
