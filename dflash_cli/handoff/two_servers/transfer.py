"""What rules of the level kv-transfer see: the server that runs prompts, and the one that decodes after it."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dflash_cli.engines.serving_engine import Release, ServingEngine
from dflash_cli.handoff.two_servers.carriers import ENFORCE, EngineCarrier, carrier_of
from dflash_cli.handoff.two_servers.launch import Launch, LaunchKeys
from dflash_cli.handoff.two_servers.server import EngineConnector, Server
from dflash_cli.rules.rule import Outcome, Problem

Factor = Literal[
    "decode-only", "prefill-only", "version", "target", "target-revision", "draft", "method", "kv-dtype",
    "draft-kv-dtype",
]  # fmt: skip
"""What two servers may differ in, and a handshake may notice."""

EFFECTS: Mapping[Outcome, str] = {
    "stops": "the servers find the difference when the first request is handed over, and refuse it",
    "drops": "nothing notices: the text stays right, and the draft reads a context that is not its own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServers:
    """What is known of an engine's servers that hand KV over.

    read          makes a server of its role, its launch, and the release that is assumed where it states none
    carriers      its connectors by name
    notices       the differences that stop a request, by the engine's code that was read
    first         the first release that is known to hand DFlash drafts over
    last_failing  the last that is known not to; empty where none is
    free_roles    families of connectors that take the stated role for less than what each request says
    takes_drafts  a draft that names its target may be given in the place of one
    """

    keys: LaunchKeys
    read: Callable[[str, Launch, Release], Server]
    carriers: Mapping[str, EngineCarrier]
    notices: "Callable[[Transfer], frozenset[Factor]]"
    first: Release
    last_failing: Release = ()
    free_roles: frozenset[str] = frozenset()
    takes_drafts: bool = False


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Two servers of an engine; `named` is the engine at the release that was asked for, `known` is known of it."""

    named: ServingEngine
    known: EngineServers
    prefill: Server
    decode: Server

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    @property
    def release(self) -> Release:
        """The older of the two."""
        return min(self.prefill.release, self.decode.release)

    def engine(self, name: str) -> ServingEngine | None:
        """The engine, if it is the one of that name."""
        return self.named if self.named.name == name else None

    @property
    def carriers(self) -> tuple[tuple[EngineConnector, EngineCarrier], tuple[EngineConnector, EngineCarrier]] | None:
        """The connector of each server, where both have one of the same family."""
        first, second = (self.carrier_of(server) for server in self.servers)
        if first is None or second is None or first[1].family != second[1].family:
            return None
        return first, second

    def carrier_of(self, server: Server) -> tuple[EngineConnector, EngineCarrier] | None:
        """The connector by which a server reaches the other one, and what is known of it."""
        return carrier_of(self.known.carriers, server)

    def is_over(self, family: str) -> bool:
        """Whether both servers are joined by that family of connectors."""
        return self.carriers is not None and self.carriers[0][1].family == family

    @property
    def is_enforced(self) -> bool:
        """Whether NIXL's handshake compares its hash."""
        return self.carriers is not None and all(item.options.get(ENFORCE) is not False for item, _ in self.carriers)

    @cached_property
    def noticed(self) -> frozenset[Factor]:
        """The differences that stop a request."""
        return self.known.notices(self)

    def problem(self, factor: Factor, location: str, message: str) -> Problem:
        """A difference, with what comes of it."""
        outcome: Outcome = "stops" if factor in self.noticed else "drops"
        return Problem(location, message, EFFECTS[outcome], outcome=outcome)

    @property
    def command_words(self) -> dict[str, str]:
        """What stands for the placeholders of a fix."""
        drafts = [server.draft.name for server in self.servers if server.draft is not None and server.draft.name]
        targets = [server.target for server in self.servers if server.target]
        return {
            "draft": shlex.quote(drafts[0]) if drafts else "DRAFT",
            "target": shlex.quote(targets[0]) if targets else "TARGET",
            "out": "OUT",
            "servers": " ".join(shlex.quote(str(server.launch.path)) for server in self.servers),
            "engine": str(self.named).replace(" ", "@"),
        }
