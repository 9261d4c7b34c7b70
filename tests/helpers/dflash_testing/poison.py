"""NaN in every slot that no request may read."""

import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request


def poison_free_slots(llm: LLM, requests: list[Request]) -> None:
    """Fill every slot with NaN, except the true KV of running requests."""
    runner = llm.engine.runner
    is_free = torch.ones(runner.target_kv.keys.shape[1:3], dtype=torch.bool)
    for request in requests:
        if request.pages and request.output_token_ids:
            positions = torch.arange(request.kv_len)
            pages = torch.tensor(request.pages)
            is_free[pages[positions // runner.page_size], positions % runner.page_size] = False
    assert runner.draft_kv is not None
    for cache in (runner.target_kv, runner.draft_kv):
        cache.keys[:, is_free] = torch.nan
        cache.values[:, is_free] = torch.nan
