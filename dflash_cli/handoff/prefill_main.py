"""The program of an evaluation's prefill process: load a pair, run prompts, and hand the requests off.

It reads messages as lines of JSON from stdin and writes an answer to each on stdout. All other output goes to stderr.
It ends when stdin ends, so it does not outlive the process that started it.

    {"draft", "target", "config", "causality", "threads"}   load a pair          -> {"fingerprint"}
    {"place", "timeout_s"}                                  open a location      -> {"opened"}
    {"keys", "prompts", "params"}                           hand requests off    -> {"num_sent"}

After an error it answers `{"message", "id", "hint", "exit_code"}` and ends.
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
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import DFlashError
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import SamplingParams
from dflash_runtime.transfers import HandoffPlan


def main() -> None:
    """Answer messages until stdin ends or an error occurs."""
    answers = _take_stdout()
    try:
        for answer in _serve(_messages()):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except DFlashError as error:
        answer = {"message": error.message, "id": error.id, "hint": error.hint, "exit_code": error.exit_code}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
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


def _serve(messages: "SimpleQueue[Any]") -> Iterator[dict[str, Any]]:
    llm = _load(messages.get())
    yield {"fingerprint": dict(llm.fingerprint.fields)}
    location = messages.get()
    device = llm.device if llm.device.type == "cuda" else None
    connector = open_connector(location["place"], "prefill", location["timeout_s"], device)
    yield {"opened": True}
    while True:
        yield {"num_sent": _hand_off(llm, connector, messages.get(), location["timeout_s"])}


def _load(pair: dict[str, Any]) -> LLM:
    """Load the pair of the first message."""
    return open_session(
        pair["draft"],
        pair["target"],
        EngineConfig(**pair["config"]),
        causality=pair["causality"],
        threads=pair["threads"],
    ).llm


def _hand_off(llm: LLM, connector: Connector, asked: dict[str, Any], timeout_s: float) -> int:
    """Run prompts to their first token and hand them off. Refuses the key of a prompt that fails."""
    keys = tuple(asked["keys"])
    params = [SamplingParams(**{**item, "stop_token_ids": tuple(item["stop_token_ids"])}) for item in asked["params"]]
    plan = HandoffPlan(connector=connector, keys=keys, is_sending=True, timeout=timeout_s)
    num_sent = 0
    for delta in llm.stream(asked["prompts"], params, handoffs=plan):
        if delta.output is not None and delta.output.error is not None:
            with suppress(DFlashError):
                connector.refuse(keys[delta.index], delta.output.error)
        num_sent += delta.output is not None and delta.output.error is None
    return num_sent


if __name__ == "__main__":
    main()
