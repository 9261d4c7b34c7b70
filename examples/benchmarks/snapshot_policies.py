"""Compare policies for snapshots of recurrent states on a load of prompts with shared beginnings. Needs no GPU.

    python3 examples/benchmarks/snapshot_policies.py [--conversations 150] [--concurrency 16] [--seed 0]
        [--shares 1,5,25] [--slots 64,128,256] [--pool 100] [--every-policy] [--out rows.jsonl]

The scheduler and the prefix cache run as in an engine, with invented results. The load mixes:

    conversations   over a few system prompts; half of the clients leave the start of each answer out of the next
                    prompt, as clients of reasoning models do
    few-shot        questions to prompts that share parts of their examples
    repeated        prompts that are asked twice
    alone           prompts without a common beginning

Without a limit every page has a state. `hits` is the number of cached tokens divided by the number without a limit.
`states` is the number of slots divided by the most states without a limit. With `--pool` below 100, KV pages hold that
percentage of all tokens, and pages are evicted.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dflash_runtime.scheduling.batch import Batch, StepOutput
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.scheduler import Scheduler
from dflash_runtime.scheduling.snapshots import Lookup, Policy, SnapshotIndex, branches_and_ends
from timing.arguments import counts
from timing.engine_arms import PAGE_SIZE
from timing.report import Recorder, say, table
from timing.shapes import BLOCK

VOCAB = 151_936
Tokens = tuple[int, ...]

GREEDY_DUAL, DEEPEST, RECENT = "tokens saved, aged", "tokens before, aged", "least recently used"
"""Which snapshot is replaced first."""


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer. It arrives after the turn with number `after` has ended."""

    prompt: Tokens
    answer: Tokens
    after: int | None = None


@dataclass(frozen=True)
class Arm:
    """A way to keep snapshots. With `keeps_answers` a request also keeps the state at the last page of its answer."""

    name: str
    policy: Policy
    keeps_answers: bool = True
    replaces: str = GREEDY_DUAL


class RankedIndex(SnapshotIndex):
    """Snapshots that are replaced in another order."""

    def __init__(self, num_slots: int, arm: Arm) -> None:
        self._replaces, self._clock = arm.replaces, itertools.count()
        super().__init__(num_slots, arm.policy)
        self.most_spares = self.most_spares if arm.keeps_answers else 0

    def worth(self, position: int, below: int) -> int:
        return position if self._replaces == DEEPEST else super().worth(position, below)

    def rank(self, worth: int) -> float:
        return next(self._clock) if self._replaces == RECENT else super().rank(worth)


class Mix:
    """The turns of a load, in the order of their arrival."""

    def __init__(self, num_conversations: int, seed: int) -> None:
        self._random = random.Random(seed)
        systems = [self._tokens(200, 1500) for _ in range(4)]
        scripts = [list(self._conversation(self._random.choice(systems))) for _ in range(num_conversations)]
        scripts += [[turn] for turn in self._few_shot(2 * num_conversations)]
        scripts += [[Turn(self._tokens(100, 1500), self._tokens(50, 300))] for _ in range(num_conversations // 2)]
        scripts += [list(self._repeated()) for _ in range(num_conversations // 4)]
        self.turns = list(self._interleaved(scripts))

    def _tokens(self, least: int, most: int) -> Tokens:
        return tuple(self._random.choices(range(VOCAB), k=self._random.randint(least, most)))

    def _conversation(self, system: Tokens) -> Iterator[Turn]:
        """One to eight turns. With a hidden part, the next prompt has only the rest of each answer."""
        text, is_hidden = system, self._random.random() < 0.5
        for number in range(self._random.randint(1, 8)):
            text += self._tokens(20, 150)
            answer = self._tokens(50, 400)
            yield Turn(text, answer, number - 1 if number else None)
            text += answer[len(answer) // 2 :] if is_hidden else answer

    def _few_shot(self, count: int) -> Iterator[Turn]:
        """Questions after the instructions of one of three tasks, and its examples in one of three selections."""
        tasks = [self._tokens(100, 300) for _ in range(3)]
        shots = [[self._tokens(60, 200) for _ in range(8)] for _ in tasks]
        for _ in range(count):
            task, num_own = self._random.randrange(3), self._random.choice((0, 3, 5))
            chosen = shots[task][: 8 - num_own] + shots[task][::-1][:num_own]
            yield Turn(sum(chosen, tasks[task]) + self._tokens(20, 120), self._tokens(5, 40))

    def _repeated(self) -> Iterator[Turn]:
        prompt = self._tokens(100, 2000)
        yield Turn(prompt, self._tokens(50, 300))
        yield Turn(prompt, self._tokens(50, 300), 0)

    def _interleaved(self, scripts: Sequence[Sequence[Turn]]) -> Iterator[Turn]:
        """Turns of scripts that begin at random times. Turns of other scripts come between the turns of a script."""
        timed = [
            (begin + 0.03 * number, script, number)
            for script, begin in ((index, self._random.random()) for index in range(len(scripts)))
            for number in range(len(scripts[script]))
        ]
        places = {(script, number): place for place, (_, script, number) in enumerate(sorted(timed))}
        for _, script, number in sorted(timed):
            turn = scripts[script][number]
            yield turn if turn.after is None else Turn(turn.prompt, turn.answer, places[script, turn.after])


class Simulation:
    """A scheduler that gives each request the answer of its turn. Its steps finish at once."""

    def __init__(
        self,
        snapshots: SnapshotIndex | None,
        num_pages: int,
        concurrency: int = 16,
        page_size: int = PAGE_SIZE,
        block: int = BLOCK,
        max_batched_tokens: int = 8192,
    ) -> None:
        limits = Limits(
            num_draft_tokens=block - 1, max_model_len=100_000, max_num_requests=concurrency, vocab_size=VOCAB,
            max_batched_tokens=max_batched_tokens,
        )  # fmt: skip
        pool = PagePool(num_pages, page_size)
        self.cache = PrefixCache(pool, snapshots=snapshots)
        self.scheduler = Scheduler(limits, pool, self.cache)
        self._concurrency, self._block = concurrency, block
        self._random = random.Random(0)

    def run(self, turns: Sequence[Turn]) -> list[int]:
        """Run turns in their order, each after the turn before it in its conversation -> cached tokens of each."""
        requests = [
            Request(
                index=index, prompt_token_ids=turn.prompt,
                params=SamplingParams(max_new_tokens=len(turn.answer), ignore_eos=True),
            )
            for index, turn in enumerate(turns)
        ]  # fmt: skip
        waiting = list(enumerate(turns))
        while waiting or self.scheduler.has_work:
            for place, (index, turn) in enumerate(waiting[: 4 * self._concurrency]):
                if len(self.scheduler.live) >= self._concurrency:
                    break
                if turn.after is None or requests[turn.after].is_finished:
                    self.scheduler.add(requests[index])
                    waiting[place] = (-1, turn)
            waiting = [item for item in waiting if item[0] >= 0]
            self._step(turns)
        return [request.num_cached for request in requests]

    def _step(self, turns: Sequence[Turn]) -> None:
        batch = self.scheduler.schedule(is_drained=True)
        results = [(request, self._output(request, turns)) for request in batch.decode]
        for chunk in batch.chunks:
            self.scheduler.finish_chunk(chunk)
        results += [(request, self._output(request, turns, 1)) for request in _first(batch)]
        for request, output in results:
            self.scheduler.commit(request, output)

    def _output(self, request: Request, turns: Sequence[Turn], most: int | None = None) -> StepOutput:
        """The next tokens of an answer: a random number of them, as if drafts had been accepted."""
        answer, done = turns[request.index].answer, len(request.output_token_ids)
        found = answer[done : done + self._random.randint(1, most or self._block)]
        num_accepted = None if most is not None else len(found) - 1
        is_done = done + len(found) == len(answer)
        return StepOutput(list(found), [0] * (self._block - 1), num_accepted, is_done, request.generation)


def _first(batch: Batch) -> list[Request]:
    """The requests of a batch that get their first token."""
    return [chunk.request for chunk in batch.chunks if chunk.is_last and not chunk.request.output_token_ids]


def every(num_pages: int, found: Lookup) -> list[int]:
    """Keep the state after every `num_pages` pages."""
    first = found.num_restored // num_pages + 1
    return [number * num_pages for number in range(first, found.num_pages // num_pages + 1)]


def ends(found: Lookup) -> list[int]:
    """Keep the state at the end of each prompt."""
    return [found.num_pages] if found.num_pages > found.num_restored else []


def branches(found: Lookup) -> list[int]:
    """Keep the state where a text leaves the cached texts."""
    return [found.num_found] if found.num_found > found.num_restored else []


def geometric(found: Lookup) -> list[int]:
    """Keep the state at the end, in the middle, after a quarter, and so on."""
    halves = (found.num_pages >> power for power in range(found.num_pages.bit_length()))
    return sorted({pages for pages in halves if pages > found.num_restored})


CHOSEN = Arm("branches and ends", branches_and_ends)
ARMS = (
    *(Arm(f"every {pages} pages" if pages > 1 else "every page", partial(every, pages)) for pages in (1, 8, 32, 64)),
    Arm("ends", ends),
    Arm("branches", branches),
    Arm("ends and halves", geometric),
    CHOSEN,
    Arm("branches and ends", branches_and_ends, keeps_answers=False),
    Arm("branches and ends", branches_and_ends, replaces=DEEPEST),
    Arm("branches and ends", branches_and_ends, replaces=RECENT),
)


def compare(recorder: Recorder, given: argparse.Namespace) -> None:
    """Run the load without a limit, then with each arm and number of slots."""
    turns = Mix(given.conversations, given.seed).turns
    num_pages = sum((len(turn.prompt) + len(turn.answer)) // PAGE_SIZE + 2 for turn in turns) * given.pool // 100 + 1
    num_tokens = sum(len(turn.prompt) for turn in turns)
    unlimited = Simulation(None, num_pages, given.concurrency)
    most_hits, most_states = sum(unlimited.run(turns)), len(unlimited.cache)
    say(f"{len(turns)} prompts, {num_tokens} tokens; without a limit {most_hits / num_tokens:.3f} of them are cached, "
        f"with {most_states} states")  # fmt: skip
    for share in given.shares:
        recorder.add("limit", {"prompts": len(turns), "tokens": num_tokens, "cached": most_hits, "states": most_states})
        sizes = max(1, most_states * share // 100)
        for arm in ARMS if given.every_policy else (CHOSEN,):
            run_arm(recorder, arm, sizes, turns, num_pages, given.concurrency, (most_hits, most_states))
    for slots in given.slots:
        run_arm(recorder, CHOSEN, slots, turns, num_pages, given.concurrency, (most_hits, most_states))


def run_arm(
    recorder: Recorder,
    arm: Arm,
    num_slots: int,
    turns: Sequence[Turn],
    num_pages: int,
    concurrency: int,
    most: tuple[int, int],
) -> None:
    """Run one arm with a number of slots."""
    cached = sum(Simulation(RankedIndex(num_slots, arm), num_pages, concurrency).run(turns))
    recorder.add("policy", {
        "policy": arm.name, "answers": arm.keeps_answers, "replaced": arm.replaces, "slots": num_slots,
        "states": num_slots / most[1], "hits": cached / most[0],
    })  # fmt: skip
    say(f"{arm.name}, {num_slots} slots: {cached / most[0]:.3f}")


COLUMNS = ("policy", "answers", "replaced", "slots", "states", "hits")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=150, help="other prompts are in proportion")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", type=counts, default="1,5,25", help="slots in percent of the states without limit")
    parser.add_argument("--slots", type=counts, default="64,128,256", help="numbers of slots")
    parser.add_argument("--pool", type=int, default=100, help="KV pages in percent of all tokens of the load")
    parser.add_argument("--every-policy", action="store_true", help="also run the policies that were not chosen")
    parser.add_argument("--out", type=Path, help="write all rows as JSON lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    given = make_parser().parse_args(arguments)
    with Recorder(given.out, torch.device("cpu")) as recorder:
        compare(recorder, given)
        rows = [tuple(row[key] for key in COLUMNS) for row in recorder.of("policy")]
    print(table(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
