"""Compile every kernel for a GPU on a machine without a GPU: the compiler rejects code that the interpreter accepts.

Use it in a separate process without the interpreter. It calls launchers with CPU tensors. Each launch compiles the
kernel with the launch's types, constants and options instead of running it.
"""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dflash_kernels
from dflash_kernels.launch import TensorDescriptor

CAPABILITY = 90
NAMES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
    torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv", torch.uint8: "*u8",
}  # fmt: skip
"""Triton's names of pointer types."""

Launches = dict[str, Callable[[], Any]]
"""Kernel with types, constants and options -> its compilation."""

SHARED_BYTES = 227 * 1024
"""Shared memory of one program on an H100 or H200."""

HALF_BYTES = 113 * 1024
"""Shared memory per program if two programs share a multiprocessor of an H100 or H200."""

MOST_SPILLED = 128
"""Most bytes per thread that a kernel with a limit of registers may spill."""


def record_launch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], launches: Launches) -> None:
    """Record how to compile the kernel of one launch. Integers 1 and multiples of 16 are known to the compiler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    parameters = inspect.signature(function.fn).parameters
    options = {name: value for name, value in kwargs.items() if name not in parameters}
    given = dict(zip(function.arg_names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in parameters}
    signature, constants, aligned = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        value = given[name]
        is_known = isinstance(value, int) and not function.params[place].do_not_specialize
        if "constexpr" in str(parameters[name].annotation) or value is None or (is_known and value == 1):
            signature[name], constants[place,] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{NAMES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, Tensor):
            signature[name], aligned[place,] = NAMES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i64" if abs(value) >= 2**31 else "i32"
            if is_known and value % 16 == 0:
                aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    compilation = partial(triton.compile, source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    launches[f"{function.fn.__name__} {signature} {constants} {options}"] = compilation


def fault(compilation: Callable[[], Any], *, makes_code: bool, is_light: bool) -> str | None:
    """Return the compiler's error message, or the resources of a kernel that the GPU lacks or that should be light.

    Without `makes_code`, only light kernels become machine code. Others are compiled to LLVM's code.
    """
    try:
        with nullcontext() if makes_code or is_light else without_machine_code():
            built = compilation()
    except Exception as error:
        return str(error)[-800:]
    if built.metadata.shared > SHARED_BYTES:
        return f"{built.metadata.shared} bytes of shared memory, the GPU has {SHARED_BYTES}"
    return too_heavy(built) if is_light else None


@contextmanager
def without_machine_code() -> Iterator[None]:
    """Make LLVM's code without its optimisations, and nothing in Triton's last two stages. Both take half of the time.

    Triton caches the results, so the process needs a cache of its own.
    """
    from triton.backends.nvidia import compiler

    backend = compiler.CUDABackend
    with pytest.MonkeyPatch.context() as patch:
        for name in ("link_extern_libs", "optimize_module"):
            patch.setattr(compiler.llvm, name, lambda *given: None)
        patch.setattr(backend, "make_ptx", lambda self, src, metadata, *options: metadata.update(name="unnamed") or "")
        patch.setattr(backend, "make_cubin", lambda self, src, metadata, *options: b"")
        yield


def too_heavy(built: Any) -> str | None:
    """Return the resources of a kernel if it spills registers or two programs do not fit on a multiprocessor.

    A kernel with a limit of registers may spill a few. Products of a warpgroup must run beside its instructions.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{CAPABILITY}a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    if "serialized" in said:
        return "each product of a warpgroup waits for the one before"
    spilled, registers = (int(re.findall(text, said)[0]) for text in (r"(\d+) bytes spill", r"Used (\d+) registers"))
    shared = built.metadata.shared
    most_spilled = MOST_SPILLED if built.metadata.maxnreg else 0
    is_light = spilled <= most_spilled and shared <= HALF_BYTES and registers * 32 * built.metadata.num_warps <= 2**15
    return None if is_light else f"{spilled} bytes spilled, {registers} registers, {shared} bytes of shared memory"


def intercept(launches: Launches) -> None:
    """Record launches instead of running them, and make launchers behave as on an H200."""
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: record_launch(self, args, kwargs, launches)
    early = {"IS_EARLY": True, "launch_pdl": True}
    stand_ins: dict[str, Callable[..., Any]] = {
        "check_tensors": lambda *tensors: None,
        "early": lambda device: early,
        "num_multiprocessors": lambda device: 132,
        "has_tile_loads": lambda device: True,
        "has_fp8": lambda device: True,
        "shared_memory": lambda device: SHARED_BYTES,
        "library_product": lambda rounded, weight: torch.empty(len(rounded.rows), len(weight), dtype=torch.bfloat16),
    }  # fmt: skip
    for info in pkgutil.walk_packages(dflash_kernels.__path__, "dflash_kernels."):
        module = importlib.import_module(info.name)
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)


def kernel_names() -> set[str]:
    """Return the names of all kernels of the package."""
    modules = [importlib.import_module(info.name)
               for info in pkgutil.walk_packages(dflash_kernels.__path__, "dflash_kernels.")]  # fmt: skip
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def run(
    calls: Callable[[], None],
    *,
    is_whole: bool,
    makes_code: bool = True,
    light: Sequence[str] = (),
    needs_every_kernel: bool = True,
) -> int:
    """Compile the launches of these calls: all of them, or the last one of each kernel. Returns the exit status.

    It prints errors, and with `needs_every_kernel` kernels that no call launched. For the kernels in `light`, two
    programs must fit on a multiprocessor of an H100 or H200.
    """
    launches: Launches = {}
    intercept(launches)
    calls()
    chosen = set(launches) if is_whole else set({key.split()[0]: key for key in launches}.values())
    faults = {key: fault(launches[key], makes_code=makes_code, is_light=key.split()[0] in light) for key in chosen}
    failed = {key: said for key, said in faults.items() if said is not None}
    for key, said in failed.items():
        print(f"{key}\n{said}\n", file=sys.stderr)
    left_out = kernel_names() - {key.split()[0] for key in launches} if needs_every_kernel else set()
    if left_out:
        print(f"no call launches: {', '.join(sorted(left_out))}", file=sys.stderr)
    print(f"{len(chosen) - len(failed)} compiled")
    return int(bool(failed or left_out))
