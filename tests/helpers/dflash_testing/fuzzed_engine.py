"""Engines that read hand-offs and stored pages, with sound inputs for `reader_fuzzing`. Their texts stay right."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_runtime.checkpoint.stored.digests import digest_value
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.handoff_folders import HEADER, TENSORS
from dflash_runtime.kv_transfer.stored_pages import StoredPages
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.hybrid_pair import random_hybrid_target
from dflash_testing.pairs import random_draft, random_llm, random_target
from dflash_testing.reader_fuzzing import Read, Reader, as_json

PARAMS = SamplingParams(max_new_tokens=3)
PROMPT = tuple(range(3, 22))
PAIR, PAGE = "ab" * 16, "cd" * 16


def of_stores(home: Path) -> dict[str, Reader]:
    shape = (2, 2, 4, 8)
    pages = StoredPages(home, PAIR, {"target": TensorSpec("float32", shape), "draft": TensorSpec("bfloat16", shape)}, 9)
    whole = {"target": torch.randn(shape), "draft": torch.randn(shape).bfloat16()}
    pages.write(PAGE, whole)
    file = home / PAIR / f"{PAGE}.safetensors"

    def read(data: bytes) -> None:
        """A page that is accepted is the page that was written. Another one is removed."""
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
        found = pages.read(PAGE)
        if found is None:
            assert not file.exists(), "an unfit page stays"
            raise ValueError("removed")
        assert found.keys() == whole.keys(), "another page was accepted"
        assert all(torch.equal(found[name], whole[name]) for name in whole), "another page was accepted"

    return {"stored page": Reader([file.read_bytes()], read, (ValueError,))}


def of_engines(home: Path) -> dict[str, Reader]:
    """Hand-offs of a target with KV pages and of a hybrid target, with changed headers or rows."""
    target, hybrid = random_target(num_layers=2), random_hybrid_target()
    llms = {
        "pages": random_llm(target, random_draft(target), 3, max_num_requests=1),
        "states": random_llm(hybrid, random_draft(hybrid), 3, max_num_requests=1),
    }
    readers = {}
    for name, llm in llms.items():
        folder = home / name
        wanted = llm.generate([PROMPT], PARAMS)
        _generate(llm, folder, is_sending=True)
        for what, changed, is_sealed in (("header", HEADER, False), ("rows", TENSORS, False), ("sealed", HEADER, True)):
            file = folder / "a" / changed
            readers[f"hand-off {what} with {name}"] = _reader(llm, folder, file, wanted, is_sealed=is_sealed)
    return readers


def _generate(llm: LLM, folder: Path, *, is_sending: bool) -> list[RequestOutput]:
    connector = open_connector(str(folder), "prefill" if is_sending else "decode")
    try:
        plan = HandoffPlan(connector=connector, keys=("a",), is_sending=is_sending, timeout=0.5)
        return llm.generate([PROMPT], PARAMS, handoffs=plan)
    finally:
        connector.close()


def _reader(llm: LLM, folder: Path, file: Path, wanted: list[RequestOutput], *, is_sealed: bool) -> Reader:
    """Every answer is the answer of one engine, or an error. A sealed header may state another text: it is trusted."""
    sound = file.read_bytes()
    read: Callable[[], list[RequestOutput]] = lambda: _generate(llm, folder, is_sending=False)  # noqa: E731

    def restoring(data: bytes) -> None:
        file.write_bytes(_sealed(data) if is_sealed else data)
        try:
            (found,) = read()
        finally:
            file.write_bytes(sound)
        llm.engine.scheduler.check_integrity()
        if found.error is not None:
            raise ValueError(found.error)
        assert is_sealed or found.token_ids == wanted[0].token_ids, "another text was accepted"
        assert all(0 <= token < llm.limits.vocab_size for token in found.token_ids)

    reader: Read = restoring
    return Reader([sound], reader, (ValueError,))


def _sealed(data: bytes) -> bytes:
    """A header with the right digest, where it is JSON."""
    try:
        value = loads(data)
        json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return data
    if not isinstance(value, dict):
        return data
    rest = {name: item for name, item in value.items() if name != "digest"}
    return as_json({**rest, "digest": digest_value(rest, digest_size=16)})
