"""Convert, validate, run and measure DFlash drafts. The names below are imported when they are first used.

from dflash_cli import LLM, SamplingParams, open_draft, open_target
"""

from typing import TYPE_CHECKING, Any

from dflash_cli.version import __version__

if TYPE_CHECKING:
    from dflash_cli.api import convert_draft, open_draft, open_target, validate_draft
    from dflash_cli.measuring_api import evaluate, measure_speed, probe_server, tune
    from dflash_runtime.device.loading import load_pair
    from dflash_runtime.llm import LLM
    from dflash_runtime.scheduling.request import SamplingParams

__all__ = [
    "LLM",
    "SamplingParams",
    "__version__",
    "convert_draft",
    "evaluate",
    "load_pair",
    "measure_speed",
    "open_draft",
    "open_target",
    "probe_server",
    "tune",
    "validate_draft",
]

_HOMES = {
    "LLM": "dflash_runtime.llm",
    "SamplingParams": "dflash_runtime.scheduling.request",
    "convert_draft": "dflash_cli.api",
    "evaluate": "dflash_cli.measuring_api",
    "load_pair": "dflash_runtime.device.loading",
    "measure_speed": "dflash_cli.measuring_api",
    "open_draft": "dflash_cli.api",
    "open_target": "dflash_cli.api",
    "probe_server": "dflash_cli.measuring_api",
    "tune": "dflash_cli.measuring_api",
    "validate_draft": "dflash_cli.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
