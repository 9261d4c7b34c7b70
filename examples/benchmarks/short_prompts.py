"""Time a prompt alone and while other requests decode, with random weights of a real shape.

    python3 examples/benchmarks/short_prompts.py [--prompts 64,512] [--beside 0,16,60] [--arms plain,dflash]

Alone, the time runs until the prompt has its first token. With other requests, it is the extra time of all steps until
then over the same number of plain steps. Prompts come one by one with two plain steps after each. The ways are
`captured` (piece by piece, or whole with few rows; needs a GPU) and `launched` (kernel by kernel). A forward with too
many rows is launched in both ways. Rows are JSON lines; the table comes last.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from timing.arguments import counts, open_device
from timing.engine_arms import PAGE_SIZE, engine_pair, wait
from timing.pairs import RandomPair, build_pair, random_prompt
from timing.report import Recorder, release, say, table
from timing.shapes import BLOCK, SHAPES

WAYS = ("launched", "captured")
STEPS_APART = 2
"""Plain steps after each prompt that joins other requests."""

ANSWER = 8192
"""Tokens that the decoding requests may write."""

NUM_WARM, NUM_TIMED = 2, 6
"""Prompts of each length."""

COLUMNS = ("arm", "beside", "tokens", "way", "ms", "plain step ms")


class Load:
    """An engine in which some requests decode while prompts arrive one by one."""

    def __init__(self, random: RandomPair, arm: str, num_beside: int, context: int, way: str) -> None:
        self._shape, max_len = random.shape, random.pair.limits.max_model_len
        pages = (num_beside + 2) * -(-max_len // PAGE_SIZE) + 1
        pair = engine_pair(
            random, arm, None, max_num_requests=num_beside + 3, num_pages=pages, prefix_cache=False,
            max_model_len=max_len,
        )  # fmt: skip
        self.llm = LLM(pair)
        self.llm.warm_up()
        if way == "launched":
            self.llm.engine.runner.pieces = None
            self.llm.engine.runner.room_beside = lambda batch: None  # type: ignore[method-assign]
            self.llm.engine.scheduler.load.keeps_to_ridge = False
        self._generator = torch.Generator().manual_seed(0)
        self._num_added = self._num_steps = 0
        for _ in range(num_beside):
            self._add(context, ANSWER)
        while not all(request.output_token_ids for request in self.llm.engine.scheduler.live):
            self.llm.engine.step()

    def step_ms(self, num_steps: int) -> float:
        """Milliseconds of a step without prompts; 0 if no request decodes."""
        if not self.llm.engine.scheduler.has_work:
            return 0.0
        return self._timed(lambda: self._step(num_steps)) / num_steps

    def prompt_ms(self, length: int, plain_ms: float) -> float:
        """Milliseconds that one prompt adds."""
        if plain_ms == 0:
            times = [self._timed(lambda: self._answer(length)) for _ in range(NUM_WARM + NUM_TIMED)]
            return statistics.median(times[NUM_WARM:])
        self._join(length, NUM_WARM)
        before = self._num_steps
        total = self._timed(lambda: self._join(length, NUM_TIMED))
        return (total - (self._num_steps - before) * plain_ms) / NUM_TIMED

    def _answer(self, length: int) -> None:
        self._add(length, 1)
        while self.llm.engine.scheduler.has_work:
            self.llm.engine.step()

    def _join(self, length: int, count: int) -> None:
        for _ in range(count):
            request = self._add(length, 1)
            while not request.is_finished:
                self._step(1)
            self._step(STEPS_APART)

    def _step(self, count: int) -> None:
        for _ in range(count):
            self.llm.engine.step()
        self._num_steps += count

    def _timed(self, call: Callable[[], object]) -> float:
        wait(self.llm.device)
        began = time.perf_counter()
        call()
        wait(self.llm.device)
        return (time.perf_counter() - began) * 1000

    def _add(self, length: int, num_tokens: int) -> Request:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        prompt = random_prompt(self._shape, length, self._generator)
        request = Request(index=self._num_added, prompt_token_ids=prompt, params=params)
        self.llm.engine.add(request)
        self._num_added += 1
        return request


def measure(recorder: Recorder, random: RandomPair, arm: str, num_beside: int, given: argparse.Namespace) -> None:
    """Record prompts of every length in each way."""
    for way in WAYS if random.pair.placement.device.type == "cuda" else WAYS[:1]:
        load = Load(random, arm, num_beside, given.context, way)
        try:
            plain_ms = load.step_ms(30)
            for length in given.prompts:
                ms = load.prompt_ms(length, plain_ms)
                row = {"arm": arm, "beside": num_beside, "tokens": length, "way": way, "ms": ms, "plain_ms": plain_ms}
                recorder.add("prompt", row)
                say(f"{arm}, beside {num_beside}: {length} tokens {way} {ms:.2f} ms")
        finally:
            load.llm.close()
            del load
            release()


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=["plain"], help="arms: plain, dflash")
    parser.add_argument("--prompts", type=counts, default="64,128,256,512,1024", help="tokens of each prompt")
    parser.add_argument("--beside", type=counts, default="0,16,60", help="numbers of requests that decode meanwhile")
    parser.add_argument("--context", type=int, default=900, help="tokens of the prompts of decoding requests")
    parser.add_argument("--out", type=Path, help="write all rows as JSON lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table. Returns 1 if a part failed."""
    given = make_parser().parse_args(arguments)
    device, shape = open_device(given.device), SHAPES[given.shape]
    random = build_pair(shape, max(*given.prompts, given.context + ANSWER) + 8 * BLOCK, device)
    with Recorder(given.out, device) as recorder:
        for arm in given.arms:
            for num_beside in given.beside:
                what = {"arm": arm, "beside": num_beside}
                recorder.guard(what, lambda arm=arm, count=num_beside: measure(recorder, random, arm, count, given))  # type: ignore[misc]
        rows = [tuple(row[key] for key in ("arm", "beside", "tokens", "way", "ms", "plain_ms"))
                for row in recorder.of("prompt")]  # fmt: skip
        print(table(COLUMNS, rows))
        return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
