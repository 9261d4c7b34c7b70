"""The connectors of vLLM and SGLang: which of them carry the draft's context KV to another server.

Read in the wheels of vLLM 0.24.0 to 0.33.0, distributed/kv_transfer/kv_connector/v1/, of SGLang 0.5.23,
srt/disaggregation/, and of LMCache 0.5.6.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dflash_cli.engines.serving_engine import Release

Carries = Literal["all", "unknown", "nothing"]
NIXL, MOONCAKE, MORIIO = "nixl", "mooncake", "moriio"
MULTI = "MultiConnector"
"""A connector of vLLM that contains other connectors."""
HASHES_DRAFTS: Release = (0, 28)
"""From this release of vLLM on, NIXL's handshake compares the draft's name, revision, method and KV dtype, and the
direction: blocks pulled or pushed (vllm-project/vllm#49230)."""
ENFORCE = "enforce_handshake_compat"


@dataclass(frozen=True, slots=True)
class EngineCarrier:
    """Facts about a connector of an engine.

    family          two connectors understand each other if their families are equal
    carries         every layer that is registered, including the draft's; nothing; or unknown
    why             the reason if it does not carry every layer
    handles_groups  it works with vLLM's hybrid KV cache manager, which is switched off otherwise
    pushes          the prefill server writes the blocks, instead of the decode server reading them
    """

    family: str
    carries: Carries
    why: str = ""
    handles_groups: bool = True
    pushes: bool = False


NO_CARRIER = EngineCarrier("", "nothing")
"""The carrier of a name that no release has."""
_OWN_SERVER = "keeps KV in the memory of its own server"
_UNTRIED = "no test with DFlash is known"
VLLM_CARRIERS: Mapping[str, EngineCarrier] = {
        "NixlConnector": EngineCarrier(NIXL, "all"),
        "NixlPullConnector": EngineCarrier(NIXL, "all"),
        "NixlPushConnector": EngineCarrier(NIXL, "all", pushes=True),
        "MooncakeConnector": EngineCarrier(MOONCAKE, "all"),
        "MoRIIOConnector": EngineCarrier(MORIIO, "all"),
        "MooncakeStoreConnector": EngineCarrier(
            "mooncake-store", "unknown", "its keys do not name the draft, so it may return another draft's KV"
        ),
        "LMCacheConnectorV1": EngineCarrier(
            "lmcache", "unknown", "it counts the draft's layers, but sizes them by the target's KV heads",
            handles_groups=False,
        ),
        "LMCacheMPConnector": EngineCarrier("lmcache-mp", "unknown", "LMCache's server decides which layers it stores"),
        "FlexKVConnectorV1": EngineCarrier(
            "flexkv", "unknown", "FlexKV decides which layers it stores", handles_groups=False
        ),
        "HF3FSKVConnector": EngineCarrier("hf3fs", "unknown", _UNTRIED, handles_groups=False),
        "UMBPStoreConnector": EngineCarrier("umbp", "unknown", f"its keys name the draft, but {_UNTRIED}"),
        "ExampleConnector": EngineCarrier(
            "example", "unknown", "it writes a layer when its attention runs, and a prompt may not run the draft's",
            handles_groups=False,
        ),
        "OffloadingConnector": EngineCarrier("offloading", "nothing", _OWN_SERVER),
        "SimpleCPUOffloadConnector": EngineCarrier("cpu-offload", "nothing", _OWN_SERVER),
        "HiSparseConnector": EngineCarrier("hisparse", "nothing", _OWN_SERVER),
        "DecodeBenchConnector": EngineCarrier("decode-bench", "nothing", "fills KV with made-up values, for timing"),
        "ExampleHiddenStatesConnector": EngineCarrier("hidden-states", "nothing", "writes hidden states, but no KV"),
}  # fmt: skip
SGLANG_CARRIERS: Mapping[str, EngineCarrier] = {
    "mooncake": EngineCarrier(MOONCAKE, "all"),
    "mooncake_tcp": EngineCarrier(MOONCAKE, "all"),
    "nixl": EngineCarrier(NIXL, "all"),
    "mori": EngineCarrier("mori", "all"),
    "ascend": EngineCarrier("ascend", "unknown", _UNTRIED),
    "fake": EngineCarrier("fake", "nothing", "sends nothing, for tests of one server"),
}
