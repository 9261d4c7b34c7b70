"""The choice between kernels and references, and what happens where Triton cannot run."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from dflash_kernels.suite import REFERENCE, pick_kernels, triton_kernels
from dflash_testing.paths import ROOT

KERNELS = ROOT / "kernels"
FUNCTIONS = [field.name for field in fields(REFERENCE) if field.name != "name"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_and_its_reference_are_called_alike(name: str) -> None:
    kernel: Callable[..., Any] = getattr(triton_kernels(), name)
    reference: Callable[..., Any] = getattr(REFERENCE, name)
    assert kernel is not reference
    assert (kernel.__name__, reference.__name__) == (name, f"{name}_ref")
    assert inspect.signature(kernel) == inspect.signature(reference)
    assert kernel.__doc__
    assert reference.__doc__
    assert reference.__name__ in kernel.__doc__


def test_auto_is_triton_on_cuda_where_it_takes_the_dtype() -> None:
    assert pick_kernels("auto", "cpu") is REFERENCE
    assert pick_kernels("reference", "cuda") is REFERENCE
    assert pick_kernels("auto", torch.device("cuda")).name == "triton"
    assert pick_kernels("auto", "cuda", torch.bfloat16).name == "triton"
    assert pick_kernels("auto", "cuda", torch.float64) is REFERENCE
    with pytest.raises(ValueError, match="fast"):
        pick_kernels("fast", "cuda")  # type: ignore[arg-type]


def run(code: str, interpret: str = "0") -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(KERNELS), "TRITON_INTERPRET": interpret},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.reference
def test_without_triton_everything_imports_and_nothing_launches() -> None:
    run(
        "import sys; sys.modules['triton'] = sys.modules['triton.language'] = None\n"
        "import torch\n"
        "from dflash_kernels.suite import REFERENCE, pick_kernels\n"
        "from dflash_kernels.rope_norm import _rms_norm_kernel, rms_norm\n"
        "assert pick_kernels('auto', 'cpu') is REFERENCE\n"
        "REFERENCE.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)\n"
        "def fails(call, *arguments):\n"
        "    try:\n        call(*arguments)\n"
        "    except (RuntimeError, ValueError) as error:\n        return str(error)\n"
        "    raise AssertionError(call)\n"
        "assert 'not installed' in fails(pick_kernels, 'triton', 'cpu')\n"
        "assert pick_kernels('auto', 'cuda') is REFERENCE\n"
        "assert 'not installed' in fails(_rms_norm_kernel.__getitem__, (1,))\n"
        "assert 'not installed' in fails(rms_norm, torch.ones(2, 8), torch.ones(8), 1e-6)\n"
    )


def test_on_the_cpu_without_the_interpreter_a_launch_is_refused() -> None:
    run(
        "import torch\n"
        "from dflash_kernels.suite import pick_kernels, triton_kernels\n"
        "for call in (lambda: pick_kernels('triton', 'cpu'),\n"
        "             lambda: triton_kernels().rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)):\n"
        "    try:\n        call()\n"
        "    except ValueError as error:\n        assert 'TRITON_INTERPRET' in str(error)\n"
        "    else:\n        raise AssertionError(call)\n"
    )


def test_with_the_interpreter_the_cpu_may_run_them() -> None:
    run("from dflash_kernels.suite import pick_kernels; assert pick_kernels('triton', 'cpu').name == 'triton'", "1")
