"""Let engines on a CPU choose the layers and kernels of a GPU of compute capability 9.0."""

from types import SimpleNamespace
from typing import Any


def hopper_of(base: Any) -> Any:
    """A platform of vLLM that runs on a CPU, and that kernels and quantization see as a GPU of capability 9.0."""
    import pkgutil
    from importlib import import_module

    import vllm._custom_ops as operators
    import vllm.model_executor.kernels.linear as kernels
    import vllm.model_executor.layers.quantization as quantization
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    class Hopper(base):  # type: ignore[misc]
        supported_quantization: tuple[str, ...] = ()

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

    class Seen(Hopper):
        _enum = PlatformEnum.CUDA

        @classmethod
        def is_cuda_alike(cls) -> bool:
            return True

    compiled = {getattr(operators, name) for name in dir(operators) if "_supports_" in name}
    for package in (kernels, quantization):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                module = import_module(found.name)
            except (ImportError, AttributeError):  # of other platforms
                continue
            if hasattr(module, "current_platform"):
                vars(module)["current_platform"] = Seen()
            for name in [name for name in dir(module) if any(getattr(module, name) is item for item in compiled)]:
                setattr(module, name, lambda *given: True)  # the compiled library answers so for capability 9.0
    kernels.current_platform = Seen()
    for name in [name for name in dir(operators) if "_supports_" in name]:
        setattr(operators, name, lambda *given: True)
    return Hopper


def seem_hopper() -> None:
    """Let SGLang find a GPU of compute capability 9.0 when it is imported and when it chooses kernels."""
    import torch

    torch.version.cuda = "12.9"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
    hopper: Any = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    torch.cuda.get_device_properties = lambda device=None: hopper


def use_one_rank() -> None:
    """Let SGLang's parallel layers be those of one rank."""
    import sglang.srt.layers.linear as linear

    rank = SimpleNamespace(tp_size=1, tp_rank=0, tp_group=None, attn_tp_size=1, attn_tp_rank=0, attn_tp_group=None)
    linear.get_parallel = lambda: rank
