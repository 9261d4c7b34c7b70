"""One of the two servers, as the rules see it, and its part of the JSON document."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from dflash_cli.engines.serving_engine import Release
from dflash_cli.handoff.two_servers.carriers import NO_CARRIER, EngineCarrier
from dflash_cli.handoff.two_servers.launch import Launch
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.targets.layer_kinds import FULL, LATENT, STATE_KINDS
from dflash_runtime.documents import HIDDEN
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.target_config import TargetFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConnector:
    """A connector of vLLM, or a transfer backend of SGLang.

    `role` is prefill, decode or both; None if the arguments do not state it.
    """

    name: str
    role: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_on_host: bool = False
    carrier: EngineCarrier = NO_CARRIER


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDraft:
    """The draft that a server is started with."""

    name: str | None
    revision: str | None = None
    method: Annotated[str | None, "of speculation"] = None
    num_draft_tokens: Annotated[int | None, "without the anchor"] = None
    kv_dtype: Annotated[str | None, HIDDEN] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server, which is meant to prefill or to decode (`role`).

    connectors    all connectors, including connectors inside another one
    subject       the draft's files, if they could be read here
    target_facts  facts about the target, if it could be read here
    """

    role: str
    launch: Launch
    release: Release
    draft: ServedDraft | None
    target: str | None
    target_revision: str | None = None
    connectors: tuple[EngineConnector, ...] = ()
    tensor_parallel: int = 1
    context_parallel: int = 1
    kv_dtype: str = "auto"
    page_size: int | None = None
    subject: Subject | None = None
    target_facts: TargetFacts | None = None

    def location(self, key: str) -> str:
        """`decode.json:block_size` for an argument, by the rules' word for it."""
        return self.launch.location(key)

    @property
    def link(self) -> EngineConnector | None:
        """The connector to the other server: the first that may send, otherwise the first that the engine knows."""
        known = [item for item in self.connectors if item.carrier is not NO_CARRIER]
        sending = [item for item in known if item.carrier.carries != "nothing"]
        return next(iter([*sending, *known]), None)

    @property
    def config(self) -> DraftConfig | None:
        """The draft's config, if it could be read here."""
        return self.subject.parsed.config if self.subject is not None and self.subject.parsed is not None else None

    @property
    def is_latent(self) -> bool:
        """Whether the target is known to keep compressed keys and values (MLA)."""
        return self.target_facts is not None and LATENT in self.target_facts.layer_kinds

    @property
    def has_state(self) -> bool:
        """Whether some layers of the target are known to keep a state instead of keys and values."""
        return self.target_facts is not None and bool(set(STATE_KINDS) & set(self.target_facts.layer_kinds))

    @property
    def is_plain(self) -> bool:
        """Whether target and draft are known to have full attention in every layer."""
        facts, config = self.target_facts, self.config
        is_full = facts is not None and set(facts.layer_kinds) == {FULL}
        return is_full and config is not None and set(config.windows) == {None}


def release_of(version: str | None, fallback: Release) -> Release:
    """The release `(0, 33)` of `v0.33.0+cu130`, or `fallback` without a version."""
    found = re.search(r"\d{1,9}(?:\.\d{1,9})+", version or "")
    if found is None:
        return fallback
    numbers = tuple(map(int, found[0].split(".")))
    while len(numbers) > 2 and numbers[-1] == 0:  # 0.33.0 is 0.33
        numbers = numbers[:-1]
    return numbers


def heads_of_rank(num_heads: int, tensor_parallel: int) -> int:
    """KV heads per rank. With more ranks than heads, each rank holds a copy of one head."""
    return max(1, num_heads // tensor_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEntry:
    """One server, as its file describes it."""

    file: str
    version: Annotated[str | None, "as the file states it"]
    connectors: tuple[str, ...]
    draft: ServedDraft | None
    target: str | None
    tensor_parallel: int
    kv_cache_dtype: str
    page_size: int | None
    is_draft_read: Annotated[bool, "whether the draft could be read here"]
    is_target_read: bool

    @classmethod
    def of(cls, server: Server) -> "ServerEntry":
        return cls(
            file=str(server.launch.path),
            version=server.launch.version,
            connectors=tuple(item.name for item in server.connectors),
            draft=server.draft,
            target=server.target,
            tensor_parallel=server.tensor_parallel,
            kv_cache_dtype=server.kv_dtype,
            page_size=server.page_size,
            is_draft_read=server.config is not None,
            is_target_read=server.target_facts is not None,
        )
