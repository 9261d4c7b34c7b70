"""One of the two servers as rules see it, whichever engine it runs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from dflash_cli.engines.serving_engine import Release
from dflash_cli.handoff.two_servers.launch import Launch
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.layer_kinds import FULL, LATENT, STATE_KINDS
from dflash_runtime.config import DraftConfig, TargetFacts
from dflash_runtime.documents import HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConnector:
    """What carries KV to the other server: a connector of vLLM, a transfer backend of SGLang.

    `role` is prefill, decode or both, None where none is stated; `is_external` says that its code is not the engine's.
    """

    name: str
    role: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_on_host: bool = False
    is_external: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDraft:
    """The draft that a server is started with."""

    name: str | None
    revision: str | None = None
    method: Annotated[str | None, "of speculation"] = None
    num_draft_tokens: Annotated[int | None, "without the anchor"] = None
    kv_dtype: Annotated[str | None, HIDDEN] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """What an engine calls the arguments that rules name in what they find."""

    draft: str
    draft_revision: str
    num_draft_tokens: str
    draft_kv_dtype: str
    method: str
    target: str
    page_size: str
    tensor_parallel: str
    connector: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server. `role` is what it is meant to do: prefill or decode.

    `connectors` are all that it has, those within another one included. `subject` and `target_facts` are what could be
    read here of the draft and the target that it names.
    """

    role: str
    launch: Launch
    keys: ServerKeys
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
        """Where an argument stands; `key` is a field of `ServerKeys`, or the engine's own word."""
        return self.launch.location(getattr(self.keys, key, key))

    @property
    def config(self) -> DraftConfig | None:
        """The draft's config, where it could be read here."""
        return self.subject.parsed.config if self.subject is not None and self.subject.parsed is not None else None

    @property
    def is_latent(self) -> bool:
        """Whether the target keeps compressed keys and values (MLA), as far as is known."""
        return self.target_facts is not None and LATENT in self.target_facts.layer_kinds

    @property
    def has_state(self) -> bool:
        """Whether some layers of the target keep a state instead of keys and values."""
        return self.target_facts is not None and bool(set(STATE_KINDS) & set(self.target_facts.layer_kinds))

    @property
    def is_plain(self) -> bool:
        """Whether target and draft are known to have full attention in every layer."""
        facts, config = self.target_facts, self.config
        is_full = facts is not None and set(facts.layer_kinds) == {FULL}
        return is_full and config is not None and set(config.windows) == {None}


def release_of(version: str | None, fallback: Release) -> Release:
    """`0.33.0` of `v0.33.0+cu130`; the engine's release that was asked for where no version is stated."""
    found = re.search(r"\d+(?:\.\d+)+", version or "")
    if found is None:
        return fallback
    numbers = tuple(map(int, found[0].split(".")))
    while len(numbers) > 2 and numbers[-1] == 0:  # 0.33.0 is 0.33
        numbers = numbers[:-1]
    return numbers


def heads_of_rank(num_heads: int, tensor_parallel: int) -> int:
    """KV heads that one rank holds; heads are repeated where there are more ranks."""
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
        """The entry of a server."""
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
