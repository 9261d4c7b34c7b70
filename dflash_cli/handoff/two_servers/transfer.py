"""The subject of rules of the level kv-transfer: a server that prefills, and a server that decodes."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dflash_cli.engines.serving_engine import Release, ServingEngine
from dflash_cli.handoff.two_servers.carriers import ENFORCE
from dflash_cli.handoff.two_servers.launch import Launch, LaunchKeys
from dflash_cli.handoff.two_servers.server import EngineConnector, Server
from dflash_cli.rules.rule import Outcome, Problem

Factor = Literal[
    "decode-only", "prefill-only", "version", "target", "target-revision", "draft", "method", "kv-dtype",
    "draft-kv-dtype",
]  # fmt: skip
"""A difference between two servers that a handshake may detect."""

EFFECTS: Mapping[Outcome, str] = {
    "stops": "the servers detect the difference when the first request is handed over, and refuse it",
    "drops": "nothing detects it: the text stays right, but the draft reads the wrong context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServers:
    """Facts about an engine's servers that hand KV over.

    read          makes a server from its role, its launch, and the release to assume if the launch states none
    notices       the differences that stop a request, according to the engine's code
    first         the first release that is known to hand over DFlash drafts
    last_failing  the last release that is known to fail; empty if none is known
    free_roles    families of connectors that may ignore the stated role and follow each request
    takes_drafts  a draft that names its target may be given as the model
    """

    keys: LaunchKeys
    read: Callable[[str, Launch, Release], Server]
    notices: "Callable[[Transfer], frozenset[Factor]]"
    first: Release
    last_failing: Release = ()
    free_roles: frozenset[str] = frozenset()
    takes_drafts: bool = False


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Two servers of one engine. `named` is the engine and release that the user named."""

    named: ServingEngine
    known: EngineServers
    prefill: Server
    decode: Server

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    @property
    def release(self) -> Release:
        """The older release of the two."""
        return min(self.prefill.release, self.decode.release)

    def engine(self, name: str) -> ServingEngine | None:
        """The engine of both servers, if it has this name."""
        return self.named if self.named.name == name else None

    @property
    def links(self) -> tuple[EngineConnector, EngineConnector] | None:
        """The connector of each server, or None if they are of different families."""
        first, second = self.prefill.link, self.decode.link
        if first is None or second is None or first.carrier.family != second.carrier.family:
            return None
        return first, second

    def is_over(self, family: str) -> bool:
        """Whether connectors of this family join the servers."""
        return self.links is not None and self.links[0].carrier.family == family

    @property
    def is_enforced(self) -> bool:
        """Whether NIXL's handshake compares the hashes of both servers."""
        return self.links is not None and all(item.options.get(ENFORCE) is not False for item in self.links)

    @cached_property
    def noticed(self) -> frozenset[Factor]:
        """The differences that stop a request."""
        return self.known.notices(self)

    def problem(self, factor: Factor, location: str, message: str) -> Problem:
        """A difference, with its effect on requests."""
        outcome: Outcome = "stops" if factor in self.noticed else "drops"
        return Problem(location, message, EFFECTS[outcome], outcome=outcome)

    def differs(self, key: str, prefill: object, decode: object, *, factor: Factor | None = None) -> Problem:
        """A problem at an argument of the decode server: `fp8; prefill server: auto`."""
        location, message = self.decode.location(key), f"{decode}; prefill server: {prefill}"
        return Problem(location, message) if factor is None else self.problem(factor, location, message)

    @property
    def command_words(self) -> dict[str, str]:
        """The values of the placeholders in a fix."""
        drafts = [server.draft.name for server in self.servers if server.draft is not None and server.draft.name]
        targets = [server.target for server in self.servers if server.target]
        return {
            "draft": shlex.quote(drafts[0]) if drafts else "DRAFT",
            "target": shlex.quote(targets[0]) if targets else "TARGET",
            "out": "OUT",
            "servers": " ".join(shlex.quote(str(server.launch.path)) for server in self.servers),
            "engine": str(self.named).replace(" ", "@"),
        }
