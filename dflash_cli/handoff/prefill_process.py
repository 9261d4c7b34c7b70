"""What runs in the prefill process of an evaluation: it loads a pair, runs prompts and hands their requests off.

It is told by lines of JSON on stdin and answers so on stdout; whatever else is written goes to stderr. It ends with
stdin, so that it does not outlive who has started it.

    {"draft", "target", "config", "causality", "threads"}   the pair        -> {"fingerprint"}
    {"place", "timeout_s"}                                  where to        -> {"opened"}
    {"keys", "prompts", "params"}                           requests        -> {"num_sent"}

A foreseen error is `{"message", "hint", "exit_code"}`, after which it ends.
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
    """Serve one evaluation, from its first line to its last."""
    answers = _take_stdout()
    try:
        for answer in _serve(_lines()):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except DFlashError as error:
        answers.write(json.dumps({"message": error.message, "hint": error.hint, "exit_code": error.exit_code}) + "\n")
        answers.flush()
        sys.exit(error.exit_code)


def _take_stdout() -> TextIO:
    """Stdout for answers alone: what libraries print goes to stderr from here on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _lines() -> "SimpleQueue[Any]":
    """What stdin brings, read by a thread that ends the process with it, whatever is under way."""
    queue: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            queue.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    return queue


def _serve(lines: "SimpleQueue[Any]") -> Iterator[dict[str, Any]]:
    llm = _load(lines.get())
    yield {"fingerprint": dict(llm.fingerprint.fields)}
    told = lines.get()
    device = llm.device if llm.device.type == "cuda" else None
    connector = open_connector(told["place"], "prefill", told["timeout_s"], device)
    yield {"opened": True}
    while True:
        yield {"num_sent": _hand_off(llm, connector, lines.get(), told["timeout_s"])}


def _load(pair: dict[str, Any]) -> LLM:
    """The pair that the first line names."""
    return open_session(
        pair["draft"],
        pair["target"],
        EngineConfig(**pair["config"]),
        causality=pair["causality"],
        threads=pair["threads"],
    ).llm


def _hand_off(llm: LLM, connector: Connector, asked: dict[str, Any], timeout_s: float) -> int:
    """Run prompts to their first token; whoever waits for one that fails is told so."""
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
