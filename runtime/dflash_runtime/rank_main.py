"""The program of ranks 1 and up: load a share of the pair, and repeat the calls of rank 0.

It reads messages as lines of JSON from stdin and writes answers to stdout; `rank_messages` lists them. All other output
goes to stderr. It ends when stdin ends, so it does not outlive rank 0.
"""

import os
import sys
import threading
from queue import SimpleQueue
from typing import TextIO

import torch
import torch.distributed

from dflash_runtime.checkpoint.canonical_names import CanonicalCheckpoint
from dflash_runtime.checkpoint.pair import DraftSource, TargetSource
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.gguf_checkpoint import open_stored
from dflash_runtime.checkpoint.targets.hf_config import read_target_facts
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.device.setup.settings import device_of
from dflash_runtime.engine import Engine, StopAt
from dflash_runtime.errors import DFlashError
from dflash_runtime.llm import LLM
from dflash_runtime.lossless import find_regrets
from dflash_runtime.rank_messages import (
    DraftSpec,
    Joining,
    Message,
    RankFailure,
    RankSpec,
    Regrets,
    Run,
    Stop,
    Stopping,
    WarmUp,
    from_line,
    to_line,
)
from dflash_runtime.ranks.exchanges import connect_store, join
from dflash_runtime.ranks.rank_group import ENDED
from dflash_runtime.scheduling.request import Request


class Follower:
    """A rank that repeats the calls of rank 0. One thread reads messages, the main thread acts on them."""

    def __init__(self, messages: TextIO, answers: TextIO) -> None:
        self._answers = answers
        self._queue: SimpleQueue[Message] = SimpleQueue()
        self._engine: Engine | None = None
        self._rank = 0
        threading.Thread(target=self._read, args=(messages,), name="rank-messages", daemon=True).start()

    def serve(self) -> None:
        """Load the pair, then act on messages until stdin ends.

        Raises:
            DFlashError: the pair cannot be loaded, or a step failed.
        """
        spec = self._queue.get()
        assert isinstance(spec, RankSpec)
        llm = self._load(spec)
        self._engine = llm.engine
        while True:
            self._act(llm, self._queue.get())

    def _load(self, spec: RankSpec) -> LLM:
        torch.set_num_threads(spec.num_threads)
        checkpoint, size = Checkpoint(spec.target), spec.config.tensor_parallel_size
        target = TargetSource(read_target_facts(checkpoint.config, checkpoint.config_path), checkpoint)
        draft = None if spec.draft is None else _draft_of(spec.draft)
        device = device_of(spec.config.device, spec.rank, size)
        self._rank = spec.rank
        self._say(Joining(spec.rank))
        ranks = join(spec.rank, size, device, connect_store(spec.port), spec.config.all_reduce)
        return LLM(load_pair(target, draft, spec.config, ranks))

    def _act(self, llm: LLM, message: Message) -> None:
        if isinstance(message, WarmUp):
            llm.warm_up(message.params, max_requests=message.max_requests)
        elif isinstance(message, Run):
            asked = message.requests
            requests = [
                Request(index=item.index, prompt_token_ids=item.prompt_token_ids, params=item.params) for item in asked
            ]
            for _ in llm.engine.run(requests):
                pass
        else:
            assert isinstance(message, Regrets)
            for text in message.texts:
                find_regrets(llm.engine.runner, text.prompt_token_ids, text.output_token_ids)

    def _read(self, messages: TextIO) -> None:
        """Queue messages. `Stop` is for a run that the main thread is in, or that is queued before it."""
        for line in messages:
            message = from_line(line)
            if not isinstance(message, Stop):
                self._queue.put(message)
                continue
            while self._engine is None:
                threading.Event().wait(0.01)
            self._engine.stop_at = StopAt(message.run, message.step)
            self._say(Stopping(self._rank))
        os._exit(0)

    def _say(self, message: Message) -> None:
        self._answers.write(to_line(message))
        self._answers.flush()


def main() -> None:
    """Follow rank 0 until it ends, or until an error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # later prints of libraries go to stderr
    code = 1
    try:
        Follower(sys.stdin, answers).serve()
    except Exception as error:
        if not (isinstance(error, DFlashError) and error.id == ENDED):  # rank 0 learns the reason from the other rank
            if not isinstance(error, DFlashError):
                sys.excepthook(type(error), error, error.__traceback__)
            answers.write(to_line(RankFailure.of(error)))
            answers.flush()
        code = getattr(error, "exit_code", code)
    sys.stderr.flush()
    os._exit(code)  # the GPU may still wait for another rank


def _draft_of(spec: DraftSpec) -> DraftSource:
    stored = open_stored(spec.path)
    if spec.names == "stored":
        return DraftSource(spec.config, stored)
    config = spec.config if spec.names == "split" else None
    return DraftSource(spec.config, CanonicalCheckpoint(stored, config, is_renamed=spec.names == "renamed"))


if __name__ == "__main__":
    main()
