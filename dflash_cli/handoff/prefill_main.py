"""The program of an evaluation's prefill process: load a pair, run prompts, and hand the requests off.

It reads messages as lines of JSON from stdin and writes an answer to each on stdout; `prefill_messages` lists them. All
other output goes to stderr. It ends when stdin ends, so it does not outlive the process that started it.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO

from dflash_cli.generation.loaded_pair import open_session
from dflash_cli.handoff.prefill_messages import Loaded, Opened, Opening, PrefillRequest, Sent
from dflash_cli.workers.messages import Refusal, WorkerSpec
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import DFlashError
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.llm import LLM
from dflash_runtime.transfers import HandoffPlan


def main() -> None:
    """Answer messages until stdin ends or an error occurs."""
    answers = _take_stdout()

    def say(answer: object) -> None:
        answers.write(json.dumps(to_json(answer)) + "\n")
        answers.flush()

    try:
        for answer in _serve(_messages()):
            say(answer)
    except DFlashError as error:
        say(Refusal.of(error))
        sys.exit(error.exit_code)


def _take_stdout() -> TextIO:
    """Stdout for answers alone. Later prints of libraries go to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _messages() -> "SimpleQueue[Any]":
    """The messages from stdin. The thread that reads them ends the process when stdin ends."""
    queue: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            queue.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    return queue


def _serve(messages: "SimpleQueue[Any]") -> Iterator[Loaded | Opened | Sent]:
    spec = from_json(WorkerSpec, messages.get())
    llm = open_session(spec.draft, spec.target, spec.config, overrides=spec.overrides, threads=spec.threads).llm
    yield Loaded(llm.fingerprint.fields)
    opening = from_json(Opening, messages.get())
    device = llm.device if llm.device.type == "cuda" else None
    connector = open_connector(opening.place, "prefill", opening.timeout_s, device, opening.secret)
    yield Opened()
    while True:
        yield Sent(_hand_off(llm, connector, from_json(PrefillRequest, messages.get()), opening.timeout_s))


def _hand_off(llm: LLM, connector: Connector, asked: PrefillRequest, timeout_s: float) -> int:
    """Run prompts to their first token and hand them off. Refuses the key of a prompt that fails."""
    plan = HandoffPlan(connector=connector, keys=asked.keys, is_sending=True, timeout=timeout_s)
    num_sent = 0
    for delta in llm.stream(asked.prompts, asked.params, handoffs=plan):
        if delta.output is not None and delta.output.error is not None:
            with suppress(DFlashError):
                connector.refuse(asked.keys[delta.index], delta.output.error)
        num_sent += delta.output is not None and delta.output.error is None
    return num_sent


if __name__ == "__main__":
    main()
