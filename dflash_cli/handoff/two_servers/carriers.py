"""What each connector does with the draft's context KV, as its code was read, and what its handshake notices.

vLLM was read in the wheels of 0.24.0 to 0.33.0, distributed/kv_transfer/kv_connector/v1/; SGLang in that of 0.5.23,
srt/disaggregation/. LMCache's own package was read at 0.5.6.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dflash_cli.engines.serving_engine import Release
from dflash_cli.handoff.two_servers.server import EngineConnector, Server

Carries = Literal["all", "unknown", "nothing"]
NIXL, MOONCAKE, MORIIO = "nixl", "mooncake", "moriio"
MULTI = "MultiConnector"
"""A connector of vLLM that holds others."""
HASHES_DRAFTS: Release = (0, 28)
"""The first release of vLLM whose NIXL handshake has method, draft, its revision and its KV dtype in its hash
(vllm-project/vllm#49230, merged in July 2026), and whether blocks are pulled or pushed."""
ENFORCE = "enforce_handshake_compat"


@dataclass(frozen=True, slots=True)
class EngineCarrier:
    """What a connector carries: every layer that is registered, the draft's among them; nothing; or it is not known.

    Two servers understand each other where their carriers are of one family. `handles_groups` says that it works with
    vLLM's hybrid KV cache manager, which is off for a server otherwise.
    """

    family: str
    carries: Carries
    why: str = ""
    handles_groups: bool = True


_OWN_SERVER = "keeps KV in memory of its own server"
VLLM_CARRIERS: Mapping[str, EngineCarrier] = {
        "NixlConnector": EngineCarrier(NIXL, "all"),
        "NixlPullConnector": EngineCarrier(NIXL, "all"),
        "NixlPushConnector": EngineCarrier(NIXL, "all"),
        "MooncakeConnector": EngineCarrier(MOONCAKE, "all"),
        "MoRIIOConnector": EngineCarrier(MORIIO, "all"),
        "MooncakeStoreConnector": EngineCarrier(
            "mooncake-store", "unknown", "its keys do not name the draft, so that another draft's KV is found"
        ),
        "LMCacheConnectorV1": EngineCarrier(
            "lmcache", "unknown", "it counts the draft's layers, and makes room for them by the target's KV heads",
            handles_groups=False,
        ),
        "LMCacheMPConnector": EngineCarrier("lmcache-mp", "unknown", "what it stores is decided by LMCache's server"),
        "FlexKVConnectorV1": EngineCarrier(
            "flexkv", "unknown", "what it stores is decided by FlexKV", handles_groups=False
        ),
        "HF3FSKVConnector": EngineCarrier("hf3fs", "unknown", "nobody is known to have tried it", handles_groups=False),
        "UMBPStoreConnector": EngineCarrier(
            "umbp", "unknown", "its keys name the draft; nobody is known to have tried it"
        ),
        "ExampleConnector": EngineCarrier(
            "example", "unknown", "it writes a layer as its attention runs, and the draft's need not run for a prompt",
            handles_groups=False,
        ),
        "OffloadingConnector": EngineCarrier("offloading", "nothing", _OWN_SERVER),
        "SimpleCPUOffloadConnector": EngineCarrier("cpu-offload", "nothing", _OWN_SERVER),
        "HiSparseConnector": EngineCarrier("hisparse", "nothing", _OWN_SERVER),
        "DecodeBenchConnector": EngineCarrier("decode-bench", "nothing", "fills KV with made-up values, for timing"),
        "ExampleHiddenStatesConnector": EngineCarrier("hidden-states", "nothing", "writes hidden states, and no KV"),
}  # fmt: skip
SGLANG_CARRIERS: Mapping[str, EngineCarrier] = {
    "mooncake": EngineCarrier("mooncake", "all"),
    "mooncake_tcp": EngineCarrier("mooncake", "all"),
    "nixl": EngineCarrier("nixl", "all"),
    "mori": EngineCarrier("mori", "all"),
    "ascend": EngineCarrier("ascend", "unknown", "nobody is known to have tried it with DFlash"),
    "fake": EngineCarrier("fake", "nothing", "sends nothing, for tests of one server"),
}


def carrier_of(known: Mapping[str, EngineCarrier], server: Server) -> tuple[EngineConnector, EngineCarrier] | None:
    """The connector by which a server reaches the other one: the first that is known to send, or the first at all.

    Of one whose code is not the engine's nothing is known. None where there is none, or none of the engine's.
    """
    found = [
        (
            item,
            EngineCarrier(item.name, "unknown", "its code is not the engine's")
            if item.is_external
            else known[item.name],
        )
        for item in server.connectors
        if item.name in known or item.is_external
    ]
    sending = [pair for pair in found if pair[1].carries != "nothing"]
    return next(iter([*sending, *found]), None)


def nixl_mode(connector: EngineConnector) -> str:
    """Who moves the blocks: the decode server pulls them unless the connector is the one that pushes."""
    return "push" if connector.name == "NixlPushConnector" else "pull"
