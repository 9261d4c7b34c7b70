"""Milliseconds per step of an engine as a user runs it: from a long and a short run."""

import time

import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from timing.engine_arms import wait


def step_ms(llm: LLM, batch: int, vocab_size: int, num_steps: int) -> float:
    """Milliseconds per step: the difference of a long and a short run over the difference of their steps.

    A first run compiles kernels and captures only the graphs that the other runs need.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, vocab_size - 1, (64,), generator=generator).tolist() for _ in range(batch)]
    found = []
    for num_tokens in (num_steps, num_steps, 3 * num_steps):
        began = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
        wait(llm.device)
        steps = max(len(output.acceptance_lengths) or num_tokens for output in outputs)
        found.append((time.perf_counter() - began, steps))
    _, (short, few), (long, many) = found
    return (long - short) / (many - few) * 1000
