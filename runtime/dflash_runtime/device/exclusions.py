"""Features that exclude each other: which one gives way, and what is said about it.

One is switched off with one warning that names both; nothing is ever dropped in silence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dflash_runtime.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides about exclusions, all of it resolved."""

    config: EngineConfig
    device: str
    kernels: str
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Where `applies`, the feature `gives_way` is switched off because of `because`."""

    gives_way: str
    because: str
    why: str
    applies: Callable[[Setting], bool]
    switch_off: Callable[[EngineConfig], EngineConfig]


EXCLUSIONS = (
    Exclusion(
        "asynchronous scheduling",
        "reference kernels on a GPU",
        "they wait for the device in every step",
        lambda setting: setting.config.is_async and setting.kernels == "reference" and setting.device == "cuda",
        lambda config: replace(config, scheduling="sync"),
    ),
    Exclusion(
        "probabilistic drafting",
        "plain decoding",
        "without drafts there is nothing to draw",
        lambda setting: setting.config.draft_sampling == "probabilistic" and setting.num_draft_tokens == 0,
        lambda config: replace(config, draft_sampling="greedy"),
    ),
)


def settle(setting: Setting) -> tuple[EngineConfig, list[str]]:
    """The config with every excluded feature off, and a warning for each."""
    config, warnings = setting.config, []
    for exclusion in EXCLUSIONS:
        if exclusion.applies(replace(setting, config=config)):
            config = exclusion.switch_off(config)
            warnings.append(f"{exclusion.gives_way} is off because of {exclusion.because}: {exclusion.why}")
    return config, warnings
