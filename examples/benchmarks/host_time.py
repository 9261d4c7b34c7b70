"""Time the host's part of a step: scheduling and commits, with long contexts, a waiting prompt, and a full pool.

    python3 examples/benchmarks/host_time.py [--requests 32] [--contexts 1000,120000] [--shared 8192,32768]
        [--sharing 256] [--clock wall|processor] [--out host.jsonl]

The scheduler runs as in an engine with two steps in flight, but without a device: results are invented, with a random
number of accepted draft tokens. Rows are JSON lines; the table comes last.

    decoding     steps of requests after this many tokens of context
    waiting      the same while another prompt waits for a row
    full pool    all steps of one prompt in a pool that is full of pages of other texts
    shared       all steps of prompts that share this many tokens, from the first until each has its first token
    no room      decode steps beside a prompt that does not fit the pool, whose first half is cached

Processor time leaves out the time in which other programs use the processor.

For `shared` and `no room`, `ms` is the mean. For the others it is the median, or the sum of the full pool.
"""

import argparse
import gc
import itertools
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from dflash_runtime.scheduling.batch import Batch, StepOutput
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.scheduler import Scheduler
from timing.arguments import counts
from timing.engine_arms import PAGE_SIZE
from timing.report import Recorder, say, table
from timing.shapes import BLOCK

VOCAB = 151_936
PROMPT_ROWS = 8192
"""Most rows of a step with prompts."""

WALL = "wall"
CLOCKS = {WALL: time.perf_counter, "processor": time.process_time}
IN_FLIGHT = 2
OWN_TOKENS = 32
"""Tokens of each prompt after a shared prefix."""

COLUMNS = ("what", "requests", "tokens", "ms", "95% ms", "worst ms")


class Host:
    """A scheduler with `num_requests` rows and pages for `num_tokens` tokens. Its steps finish at once."""

    def __init__(self, num_requests: int, num_tokens: int, max_model_len: int, clock: str = WALL) -> None:
        pool = PagePool(-(-num_tokens // PAGE_SIZE) + 1, PAGE_SIZE)
        limits = Limits(
            num_draft_tokens=BLOCK - 1, max_model_len=max_model_len, max_num_requests=num_requests, vocab_size=VOCAB,
            max_batched_tokens=PROMPT_ROWS,
        )  # fmt: skip
        self.scheduler = Scheduler(limits, pool, PrefixCache(pool))
        self._random, self._count = random.Random(0), itertools.count()
        self._now = CLOCKS[clock]
        self._in_flight: deque[Batch] = deque()

    def add(self, num_tokens: int, num_answered: int, beginning: Sequence[int] = ()) -> None:
        """Add a prompt of random tokens after a given beginning."""
        prompt = (*beginning, *(self._random.randrange(VOCAB) for _ in range(num_tokens)))
        params = SamplingParams(max_new_tokens=num_answered, ignore_eos=True)
        self.scheduler.add(Request(index=next(self._count), prompt_token_ids=prompt, params=params))

    def step(self) -> float:
        """Queue a step and commit the oldest step in flight -> milliseconds of both."""
        began = self._now()
        batch = self.scheduler.schedule(is_drained=not self._in_flight)
        spent = self._now() - began
        if not batch.is_empty:
            self._in_flight.append(batch)
        if batch.is_empty or len(self._in_flight) > IN_FLIGHT:
            oldest = self._in_flight.popleft()
            results = self._results(oldest)
            began = self._now()
            for chunk in oldest.chunks:
                self.scheduler.finish_chunk(chunk)
            for request, output in results:
                self.scheduler.commit(request, output)
            spent += self._now() - began
        return spent * 1000

    def _results(self, batch: Batch) -> list[tuple[Request, StepOutput]]:
        """Invented results: first tokens of prompts, and a random number of accepted tokens per block."""
        results = []
        for chunk in batch.chunks:
            if chunk.is_last:
                is_done = chunk.request.params.max_new_tokens == 1
                results.append((chunk.request, StepOutput([0], is_done=is_done, generation=chunk.generation)))
        for request in batch.decode:
            count = self._random.randrange(BLOCK // 2)
            tokens = [self._random.randrange(VOCAB) for _ in range(count + 1)]
            output = StepOutput(tokens, [0] * (BLOCK - 1), num_accepted=count, generation=request.generation)
            results.append((request, output))
        return results


def decoding_ms(num_requests: int, context: int, num_steps: int, waiting: int = 0, clock: str = WALL) -> list[float]:
    """Milliseconds of each step of `num_requests` requests, with a prompt of `waiting` tokens in the queue."""
    room = (num_steps + 2 * IN_FLIGHT + -(-num_requests * context // PROMPT_ROWS)) * BLOCK + 4 * BLOCK
    num_tokens = num_requests * (context + room + PAGE_SIZE) + waiting
    host = Host(num_requests, num_tokens, max(context, waiting) + room + 4 * BLOCK, clock)
    for _ in range(num_requests):
        host.add(context, room)
    while not all(request.output_token_ids for request in host.scheduler.live):
        host.step()
    if waiting:
        host.add(waiting, 1)
        host.step()
    return [host.step() for _ in range(num_steps)]


def evicting_ms(num_tokens: int, clock: str = WALL) -> float:
    """Milliseconds of all steps of one prompt, in a pool filled by earlier prompts."""
    host = Host(1, 4 * num_tokens, num_tokens + 4 * BLOCK, clock)
    spent = 0.0
    for _ in range(6):
        host.add(num_tokens, 1)
        spent = 0.0
        while host.scheduler.has_work:
            spent += host.step()
    return spent


def sharing_ms(num_requests: int, num_shared: int, clock: str = WALL) -> list[float]:
    """Milliseconds of each step of prompts with a shared prefix, until each has its first token."""
    room = 200 * BLOCK
    num_tokens = num_shared + num_requests * (OWN_TOKENS + room + PAGE_SIZE)
    host = Host(num_requests, num_tokens, num_shared + OWN_TOKENS + 2 * room, clock)
    text = [random.Random(1).randrange(VOCAB) for _ in range(num_shared)]
    for _ in range(num_requests):
        host.add(
            OWN_TOKENS, room, [int(str(token)) for token in text]
        )  # as a tokenizer gives them, in objects of their own
    gc.collect()  # the prompts, which the steps did not make
    times = []
    while any(not request.output_token_ids for request in host.scheduler.live):
        times.append(host.step())
    return times


def no_room_ms(num_tokens: int, num_steps: int, clock: str = WALL) -> list[float]:
    """Milliseconds of decode steps beside a prompt that waits for room. The first half of its text is cached."""
    text = [random.Random(1).randrange(VOCAB) for _ in range(num_tokens)]
    room = (num_steps + 4 * IN_FLIGHT) * BLOCK
    host = Host(8, num_tokens + 3 * room, num_tokens + 3 * room, clock)
    for num_own in (0, num_tokens // 2):
        host.add(num_own, room, text[: num_tokens // 2])
        while not all(request.output_token_ids for request in host.scheduler.live):
            host.step()
    host.add(num_tokens // 2, 1, text[: num_tokens // 2])
    host.step()
    return [host.step() for _ in range(num_steps)]


def measure(recorder: Recorder, given: argparse.Namespace) -> None:
    """Measure and record every row."""
    for context in given.contexts:
        for what, waiting in (("decoding", 0), ("waiting", given.waiting)):
            times = sorted(decoding_ms(given.requests, context, given.steps, waiting, given.clock))
            row = {"what": what, "requests": given.requests, "tokens": context, "ms": statistics.median(times),
                   "p95_ms": times[len(times) * 95 // 100]}  # fmt: skip
            recorder.add("host", row)
            say(f"{what}, {given.requests} requests of {context} tokens: {row['ms']:.3f} ms")
    for what, tokens, times in (
        *(("shared", count, sharing_ms(given.sharing, count, given.clock)) for count in given.shared),
        ("no room", given.waiting, no_room_ms(given.waiting, given.steps, given.clock)),
    ):
        ordered = sorted(times)
        row = {"what": what, "requests": given.sharing if what == "shared" else 8, "tokens": tokens,
               "ms": statistics.mean(times), "p95_ms": ordered[len(times) * 95 // 100], "worst_ms": ordered[-1],
               "steps": len(times)}  # fmt: skip
        recorder.add("host", row)
        say(f"{what}, {tokens} tokens: {row['ms']:.3f} ms in {len(times)} steps")
    row = {"what": "full pool", "requests": 1, "tokens": given.evicted, "ms": evicting_ms(given.evicted, given.clock)}
    recorder.add("host", row)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--contexts", type=counts, default="1000,120000")
    parser.add_argument("--waiting", type=int, default=140_000, help="tokens of the waiting prompt")
    parser.add_argument("--evicted", type=int, default=32_768, help="tokens of the prompt in a full pool")
    parser.add_argument("--shared", type=counts, default="8192,32768", help="tokens of a shared prefix")
    parser.add_argument("--sharing", type=int, default=256, help="prompts that share it")
    parser.add_argument("--clock", choices=list(CLOCKS), default=WALL)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, help="write all rows as JSON lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    given = make_parser().parse_args(arguments)
    with Recorder(given.out, torch.device("cpu")) as recorder:
        measure(recorder, given)
        rows = [
            tuple(row.get(key) for key in ("what", "requests", "tokens", "ms", "p95_ms", "worst_ms"))
            for row in recorder.rows
        ]
    print(table(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
