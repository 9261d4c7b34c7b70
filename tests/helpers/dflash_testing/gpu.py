"""The bundled pair on a GPU."""

from typing import Any

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_testing.pairs import bundled_draft


def gpu_llm(name: str | None, dtype: str, **engine: Any) -> LLM:
    """A bundled draft, or none, beside the bundled target."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_pages": 3000} | engine
    config = EngineConfig(**settings)
    draft = bundled_draft(name) if name is not None else None
    return LLM(open_target(tiny_directory() / "target"), draft, config)
