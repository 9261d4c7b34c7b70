"""What happens once, made to happen at start: kernels compiled, decode steps captured, prompts of all sizes prefilled.

Prompts go the way of every request, so whatever a prefill launches is compiled, however it is cut. Nothing of them is
left: no page is in the prefix cache, no seed was drawn, and nothing was learnt of how long answers are.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice

from dflash_kernels.launch_config import LONG_CONTEXT
from dflash_kernels.product_config import GATED_ROWS, many_rows_shape
from dflash_runtime.device.decode_graphs import StepMode, kinds_of
from dflash_runtime.device.memory import log_use
from dflash_runtime.engine import Engine
from dflash_runtime.errors import DFlashError
from dflash_runtime.scheduling.limits import rows_to_ridge
from dflash_runtime.scheduling.request import Request, SamplingParams

logger = logging.getLogger(__name__)

MAX_PROMPTS = 64
"""Prompts that are prefilled at once; more of them are no other launches."""

CONTEXTS, FEW_ROWS = (512, LONG_CONTEXT), 16
"""Tokens after which so few rows of a prompt follow: their keys are cut into parts, and long ones have other tiles."""

Progress = Callable[[int, int], None]
"""Hears how much is done, and of how much."""


def warm_up(engine: Engine, params: Sequence[SamplingParams], max_requests: int | None, progress: Progress) -> None:
    """Prepare an engine whose steps are captured for requests with these parameters; see `LLM.warm_up`.

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
        job()
        progress(num_done, len(jobs))
    logger.info("warmed up in %.1f s, with %d captures", time.perf_counter() - started, num_captured)
    log_use(engine.runner.device)


def step_modes(engine: Engine, params: Sequence[SamplingParams], bucket: int) -> list[StepMode]:
    """The modes of all steps that so many requests with these parameters can come to share, the widest first.

    Plain steps with room for prompts, of other requests, come before the plain ones.
    """
    limits, policy = engine.scheduler.limits, engine.scheduler.width_policy
    block = limits.num_lookahead_tokens
    spare = rows_to_ridge(bucket) if limits.max_num_requests > 1 else 0
    asked = {min(item.verify_width or block, block) for item in params}
    sizes = [
        (width, num_prompt_rows)
        for width in reversed(policy.candidates(bucket, asked))
        for num_prompt_rows in ([spare, 0] if spare and width == 1 else [0])
    ]
    return [
        StepMode(width, is_greedy, has_filters, num_prompt_rows)
        for width, num_prompt_rows in sizes for is_greedy, has_filters in kinds_of(params)
    ]  # fmt: skip


def prefill_batches(engine: Engine, params: Sequence[SamplingParams], max_requests: int | None) -> list[list[Request]]:
    """Prompts that run together, batch by batch: of each power of two alone, and many at once; see `gated_rows` too.

    Each kind of sampling chooses a first token. No two prompts begin alike, so that none is found in the prefix cache.
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
    """The fewest rows of a prompt for which feed-forward layers gate in their product, if a step has so many.

    That has a kernel of its own, and is chosen by how rows fill the device: powers of two may all be passed over.
    """
    limits, target = engine.scheduler.limits, engine.runner.target
    most = min(limits.max_batched_tokens, limits.max_model_len - 1)
    sizes = (target.config.intermediate_size, target.embedding.element_size(), engine.runner.device)
    taken = (rows for rows in range(GATED_ROWS, most + 1) if many_rows_shape(rows, *sizes) is not None)
    return list(islice(taken, 1))


def contexts_of(engine: Engine) -> list[int]:
    """CONTEXTS, as far as the model is so long."""
    longest = engine.scheduler.limits.max_model_len - 1 - FEW_ROWS
    return [context for context in dict.fromkeys(min(context, longest) for context in CONTEXTS) if context > 0]


def run_in_chunks(engine: Engine, kind: SamplingParams, context: int) -> None:
    """Run a prompt of which few rows follow a context that steps before have prefilled.

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
    """Run requests to their end and forget them, and whatever the prefix cache held. Those without pages are left out.

    Raises:
        DFlashError: the device failed, and the engine is closed.
    """
    scheduler = engine.scheduler
    expected_share = scheduler.room.share
    try:
        for request in requests:
            try:
                scheduler.add(request)  # not by way of the engine, which would draw a seed
            except DFlashError as error:
                logger.info("not warmed up with %d tokens: %s", request.prompt_len, error.message)
        while scheduler.has_work:
            engine.step()
    finally:
        engine.abort()
        scheduler.restart()
        scheduler.room.share = expected_share
    if engine.failure is not None:
        raise engine.failure
