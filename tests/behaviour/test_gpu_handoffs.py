"""Hand-offs with a GPU on one or both sides: the traces of one engine, and copies without waits for the device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_runtime.device.storage import kv_pages
from dflash_runtime.kv_transfer.file_connector import FileConnector
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.gpu import detecting_syncs, gpu_llm
from dflash_testing.handoffs import LENGTHS, PROMPTS, go_on, hand_off, keys_of, traces
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_new_tokens=32)


def on_gpu(**engine: Any) -> LLM:
    return gpu_llm("tiny", "float32", **{"max_num_requests": 1} | engine)


def on_cpu() -> LLM:
    return bundled_llm(bundled_draft_model(), 7)


@pytest.mark.parametrize(("sender", "receiver"), [("gpu", "gpu"), ("cpu", "gpu"), ("gpu", "cpu")])
@pytest.mark.parametrize("piece_bytes", [kv_pages.PIECE_BYTES, 1])
def test_traces_equal_those_of_one_engine(
    sender: str, receiver: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads are copied as a whole, or page by page."""
    monkeypatch.setattr(kv_pages, "PIECE_BYTES", piece_bytes)
    sides = {"gpu": on_gpu, "cpu": on_cpu}
    wanted = on_cpu().generate(PROMPTS, PARAMS)
    one, other = sides[sender](), sides[receiver]()
    # The CPU pair was built without a loader, so its fingerprint lacks the digests of the weights.
    other.fingerprint = one.fingerprint
    found = go_on(other, PROMPTS, PARAMS, hand_off(one, PROMPTS, PARAMS))
    assert traces(found) == traces(wanted)
    assert [output.num_loaded for output in found] == list(LENGTHS)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_load_while_others_decode(temperature: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hand-offs are files, eight load at a time, page by page, and steps run in CUDA graphs."""
    monkeypatch.setattr(kv_pages, "PIECE_BYTES", 1)
    params = [replace(PARAMS, temperature=temperature, seed=index) for index in range(len(PROMPTS))]
    wanted = on_cpu().generate(PROMPTS, params)
    connector = FileConnector(tmp_path)
    keys = keys_of(PROMPTS)
    on_gpu().generate(PROMPTS, params, handoffs=HandoffPlan(connector=connector, keys=keys, is_sending=True))
    llm = on_gpu(max_num_requests=8)
    found = llm.generate(PROMPTS, params, handoffs=HandoffPlan(connector=connector, keys=keys))
    llm.engine.scheduler.check_integrity()
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert [output.num_loaded for output in found] == list(LENGTHS)
    connector.close()


def test_payloads_that_stay_on_the_device_are_the_same() -> None:
    """Connectors with `takes_device` get payloads on the GPU that equal the payloads on the host."""
    llm = on_gpu()
    host = hand_off(llm, PROMPTS, PARAMS)
    stays = hand_off(on_gpu(), PROMPTS, PARAMS, takes_device=True)
    for key, handoff in host.saved.items():
        for name, tensor in handoff.tensors.items():
            assert tensor.device.type == "cpu"
            assert stays.saved[key].tensors[name].is_cuda
            assert torch.equal(stays.saved[key].tensors[name].cpu(), tensor)


def test_steps_never_wait_for_the_device_while_requests_load() -> None:
    """The check covers copies in pieces and switching requests on. A first run of all prompts warms up."""
    prompts = [prompt[:40] for prompt in bundled_prompts()[:8]]
    connector = hand_off(gpu_llm("tiny", "bfloat16", max_num_requests=4), prompts, PARAMS)
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=4, prefix_cache=False)
    go_on(llm, prompts, PARAMS, connector)
    plan = HandoffPlan(connector=connector, keys=keys_of(prompts))
    llm.engine.open_transfers(plan, llm.fingerprint)
    requests = [
        plan.apply(Request(index=index, prompt_token_ids=prompt, params=PARAMS)) for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        llm.engine.add(request)
    with detecting_syncs():
        while llm.engine.scheduler.has_work:
            llm.engine.step()
    llm.engine.close_transfers()
    assert all(request.num_loaded == 40 for request in requests)
