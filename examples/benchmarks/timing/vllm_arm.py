"""Measure vLLM on the same shapes in a subprocess. Without vLLM, the arm is skipped with one line."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from timing.forced import acceptance_rates
from timing.pair_files import write_pair
from timing.pairs import BLOCK, Shape
from timing.report import last_errors, say

WORKER = Path(__file__).with_name("vllm_worker.py")
Row = dict[str, Any]


def find_vllm(extra: Path | None) -> bool:
    """Whether vLLM is installed, or in a folder that only the subprocess sees."""
    is_here = (extra / "vllm").is_dir() if extra is not None else importlib.util.find_spec("vllm") is not None
    if not is_here:
        say(f"vllm: skipped, not found {f'in {extra}' if extra else 'in this environment'} (--vllm-path DIR)")
    return is_here


def run_vllm(
    shape: Shape,
    cells: Sequence[Row],
    *,
    is_drafting: bool,
    acceptance: float | None,
    max_model_len: int,
    max_num_requests: int,
    device: torch.device,
    pair: Path | None = None,
    extra: Path | None = None,
    timeout_s: float = 280,
) -> list[Row]:
    """Run all cells in one engine -> a row per cell, in order. Rows are missing if time ran out.

    vLLM reads the weights of our random pair from files: its dummy weights are tiny numbers that take less power. The
    files are written to `pair`, where they stay, or to a temporary folder. With `acceptance`, vLLM's synthetic mode
    accepts as many draft tokens as our forced acceptance.

    Raises:
        RuntimeError: the subprocess wrote no row; with the last line of its log.
    """
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        files = pair or folder
        write_pair(shape, files, device)
        job = {
            "target": str(files / "target"), "has_recurrence": shape.recurrence is not None,
            "vocab": shape.vocab, "max_model_len": max_model_len,
            "max_num_requests": max_num_requests, "gpu_memory_utilization": 0.8, "cells": list(cells),
            "speculative": _speculative(files / "draft", acceptance) if is_drafting else None,
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        log = _run(folder, extra, timeout_s)
        out = folder / "out.jsonl"
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if not rows:
        raise RuntimeError(f"vllm: {last_errors(log)}")
    return rows


def acceptance_note(is_drafting: bool, acceptance: float | None) -> str | None:
    """The note on acceptance in a row of vLLM."""
    if not is_drafting:
        return None
    return "1.0: random weights accept nothing" if acceptance is None else "synthetic, by its own mode"


def _speculative(draft: Path, acceptance: float | None) -> Row:
    config: Row = {"method": "dflash", "model": str(draft), "num_speculative_tokens": BLOCK - 1}
    if acceptance is not None:
        rates = acceptance_rates(acceptance, BLOCK)
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return config


def _run(folder: Path, extra: Path | None, timeout_s: float) -> str:
    """Run the worker -> its log, which is not part of the results."""
    paths = [str(extra)] if extra is not None else []
    env = dict(os.environ)
    if paths:
        env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(WORKER), str(folder / "job.json"), str(folder / "out.jsonl")]
    # A new session: vLLM starts processes too, and all of them end with it.
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        return worker.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        return f"{worker.communicate()[0]}\nended after {timeout_s:.0f} s"
