"""Measure vLLM on the same files in a subprocess. Without vLLM, its arms are skipped with one line."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing.forced import acceptance_rates
from timing.report import last_errors, release, say
from timing.shapes import Shape

WORKER = Path(__file__).with_name("vllm_worker.py")
VLLM_ARMS = ("vllm-plain", "vllm-dflash", "vllm-adaptive")
Row = dict[str, Any]


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM is started.

    path       folder with vLLM, which only the subprocess sees; None: it is installed
    timeout_s  seconds for one engine, its start included
    memory     share of the GPU's memory that it may use
    """

    path: Path | None
    timeout_s: float
    memory: float


@dataclass(frozen=True)
class VllmRun:
    """One engine of vLLM: its arm, and the forced mean acceptance length or None."""

    arm: str
    acceptance: float | None

    @property
    def is_drafting(self) -> bool:
        return self.arm != "vllm-plain"

    @property
    def is_adaptive(self) -> bool:
        return self.arm == "vllm-adaptive"

    @property
    def acceptance_note(self) -> str | None:
        """The note on acceptance in its rows."""
        if not self.is_drafting:
            return None
        return "1.0: random weights accept nothing" if self.acceptance is None else "synthetic, by its own mode"

    def speculative(self, draft: Path, block: int) -> Row | None:
        """vLLM's config of drafting. Its synthetic mode draws as many accepted tokens as our forced acceptance."""
        if not self.is_drafting:
            return None
        config: Row = {"method": "dflash", "model": str(draft), "num_speculative_tokens": block - 1}
        if self.is_adaptive:
            config["enable_adaptive_verification"] = True
        if self.acceptance is not None:
            rates = acceptance_rates(self.acceptance, block)
            config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        return config


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `vllm_settings` reads."""
    parser.add_argument("--vllm-path", type=Path, help="folder with vLLM for the subprocess")
    parser.add_argument(
        "--vllm-timeout", type=float, default=280, help="seconds for one engine of vLLM, its start included"
    )
    parser.add_argument("--vllm-memory", type=float, default=0.8, help="share of the GPU's memory for vLLM")


def vllm_settings(given: argparse.Namespace) -> VllmSettings:
    return VllmSettings(given.vllm_path, given.vllm_timeout, given.vllm_memory)


def find_vllm(extra: Path | None) -> bool:
    """Whether vLLM is installed, or in a folder that only the subprocess sees."""
    is_here = (extra / "vllm").is_dir() if extra is not None else importlib.util.find_spec("vllm") is not None
    if not is_here:
        say(f"vllm: skipped, not found {f'in {extra}' if extra else 'in this environment'} (--vllm-path DIR)")
    return is_here


def run_vllm(
    shape: Shape,
    cells: Sequence[Row],
    run: VllmRun,
    settings: VllmSettings,
    *,
    files: Path,
    max_model_len: int,
    max_num_requests: int,
) -> list[Row]:
    """Run all cells in one engine -> a row per cell, in order. Rows are missing if time ran out.

    vLLM reads the weights in `files`, which our engine reads too. Its dummy weights are tiny numbers that take less
    power.

    Raises:
        RuntimeError: the subprocess wrote no row; with the last line of its log.
    """
    release()  # vLLM counts the memory that is free
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        job = {
            "target": str(files / "target"), "has_recurrence": shape.recurrence is not None,
            "vocab": shape.vocab, "max_model_len": max_model_len, "max_num_requests": max_num_requests,
            "gpu_memory_utilization": settings.memory, "speculative": run.speculative(files / "draft", shape.block),
            "cells": list(cells),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        log = _run(folder, settings)
        out = folder / "out.jsonl"
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if not rows:
        raise RuntimeError(f"vllm: {last_errors(log)}")
    return rows


def _run(folder: Path, settings: VllmSettings) -> str:
    """Run the worker -> its log, which is not part of the results."""
    env = dict(os.environ)
    if settings.path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(settings.path), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(WORKER), str(folder / "job.json"), str(folder / "out.jsonl")]
    # A new session: vLLM starts processes too, and all of them end with it.
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        return worker.communicate(timeout=settings.timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        return f"{worker.communicate()[0]}\nended after {settings.timeout_s:.0f} s"
