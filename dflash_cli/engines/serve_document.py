"""The JSON document of `dflash serve-command --json`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.engines.serving_engine import ServeCommand
from dflash_cli.rules.verdict import Verdict
from dflash_runtime.documents import INLINE


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """The commands of one engine."""

    engine: str
    command: Annotated[ServeCommand, INLINE]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ServeCommandDocument:
    """Result of `dflash serve-command`."""

    KIND: ClassVar[str] = "serve-command"

    serve_commands: tuple[ServedEngine, ...]
