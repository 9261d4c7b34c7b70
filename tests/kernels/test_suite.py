"""The choice between kernels and references, and errors on machines that cannot run Triton."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from dflash_kernels import launch, suite
from dflash_kernels.suite import REFERENCE, pick_kernels, triton_kernels
from dflash_testing.paths import ROOT

KERNELS = ROOT / "kernels"
FUNCTIONS = [field.name for field in fields(REFERENCE) if field.name != "name"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_and_its_reference_have_one_signature(name: str) -> None:
    kernel: Callable[..., Any] = getattr(triton_kernels(), name)
    reference: Callable[..., Any] = getattr(REFERENCE, name)
    assert kernel is not reference
    assert (kernel.__name__, reference.__name__) == (name, f"{name}_ref")
    assert inspect.signature(kernel) == inspect.signature(reference)
    assert kernel.__doc__
    assert reference.__doc__
    assert reference.__name__ in kernel.__doc__


def test_auto_is_triton_on_cuda_if_it_supports_the_dtype() -> None:
    assert pick_kernels("auto", "cpu") is REFERENCE
    assert pick_kernels("reference", "cuda") is REFERENCE
    assert pick_kernels("auto", torch.device("cuda")).name == "triton"
    assert pick_kernels("auto", "cuda", torch.bfloat16).name == "triton"
    assert pick_kernels("auto", "cuda", torch.float64) is REFERENCE
    with pytest.raises(ValueError, match="fast"):
        pick_kernels("fast", "cuda")  # type: ignore[arg-type]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = sys.modules["triton.language"] = None
import torch
from dflash_kernels.launch import NOT_INSTALLED
from dflash_kernels.norms.rope_norm import _rms_norm_kernel, rms_norm
from dflash_kernels import launch, suite
from dflash_kernels.suite import REFERENCE, pick_kernels, triton_kernels

def error_of(call, *arguments):
    try:
        call(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)

ones = torch.ones(2, 8), torch.ones(8), 1e-6
assert pick_kernels("auto", "cpu") is pick_kernels("auto", "cuda") is REFERENCE
assert REFERENCE.rms_norm(*ones).shape == (2, 8)
assert error_of(pick_kernels, "triton", "cpu") == NOT_INSTALLED
assert error_of(triton_kernels) == NOT_INSTALLED
assert error_of(_rms_norm_kernel.__getitem__, (1,)) == NOT_INSTALLED
assert error_of(rms_norm, *ones) == NOT_INSTALLED
"""


@pytest.mark.reference
def test_without_triton_the_references_run_and_launches_fail() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], env={"PYTHONPATH": str(KERNELS)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.interpreter
def test_only_the_interpreter_runs_kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(2, 8), torch.ones(8), 1e-6
    kernels = pick_kernels("triton", "cpu")
    assert kernels.name == "triton"
    assert kernels.rms_norm(*ones).shape == (2, 8)
    for module in (suite, launch):
        monkeypatch.setattr(module, "IS_INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        pick_kernels("triton", "cpu")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        triton_kernels().rms_norm(*ones)


def test_the_environment_chooses_the_interpreter() -> None:
    """TRITON_INTERPRET counts when Triton is imported; `tests/conftest.py` sets it on a machine without a GPU."""
    is_asked_for = os.environ.get("TRITON_INTERPRET") == "1"
    assert is_asked_for == launch.IS_INTERPRETED
