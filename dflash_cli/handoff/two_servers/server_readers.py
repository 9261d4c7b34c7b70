"""Servers of vLLM and SGLang, read from their arguments, and facts about each engine's servers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dflash_cli.engines.serving_engine import Release
from dflash_cli.engines.sglang import NAME as SGLANG
from dflash_cli.engines.vllm import NAME as VLLM
from dflash_cli.handoff.two_servers.carriers import (
    HASHES_DRAFTS,
    MOONCAKE,
    MULTI,
    NIXL,
    NO_CARRIER,
    SGLANG_CARRIERS,
    VLLM_CARRIERS,
)
from dflash_cli.handoff.two_servers.launch import Argument, Launch, LaunchKeys
from dflash_cli.handoff.two_servers.server import EngineConnector, ServedDraft, Server, release_of
from dflash_cli.handoff.two_servers.transfer import EngineServers, Factor, Transfer
from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import as_object, is_int

SPECULATIVE = "speculative_config"
TRANSFER = "kv_transfer_config"
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
MODES = ("prefill", "decode")

VLLM_LAUNCH = LaunchKeys(
    arguments={
        "target": Argument("model", "text"),
        "target_revision": Argument("revision", "text"),
        "kv_dtype": Argument("kv_cache_dtype", "text"),
        "page_size": Argument("block_size", "count"),
        "tensor_parallel": Argument("tensor_parallel_size", "count", ("tp",)),
        "context_parallel": Argument("decode_context_parallel_size", "count", ("dcp",)),
        "no_groups": Argument("disable_hybrid_kv_cache_manager", "switch"),
        "speculation": Argument(SPECULATIVE, "object", ("sc",)),
        "transfer": Argument(TRANSFER, "object"),
    },
    inner={
        "draft": f"{SPECULATIVE}.model",
        "draft_revision": f"{SPECULATIVE}.revision",
        "num_draft_tokens": f"{SPECULATIVE}.num_speculative_tokens",
        "draft_kv_dtype": f"{SPECULATIVE}.kv_cache_dtype",
        "method": f"{SPECULATIVE}.method",
        "connector": f"{TRANSFER}.kv_connector",
        "role": f"{TRANSFER}.kv_role",
    },
)
SGLANG_LAUNCH = LaunchKeys({
    "target": Argument("model_path", "text", ("model",)),
    "target_revision": Argument("revision", "text"),
    "kv_dtype": Argument("kv_cache_dtype", "text"),
    "page_size": Argument("page_size", "count"),
    "tensor_parallel": Argument("tp_size", "count", ("tensor_parallel_size", "tp")),
    "pipeline_parallel": Argument("pp_size", "count", ("pipeline_parallel_size",)),
    "context_parallel": Argument("attn_cp_size", "count", ("attention_context_parallel_size",)),
    "decode_context_parallel": Argument("dcp_size", "count", ("decode_context_parallel_size",)),
    "method": Argument("speculative_algorithm", "text"),
    "draft": Argument("speculative_draft_model_path", "text", ("speculative_draft_model",)),
    "draft_revision": Argument("speculative_draft_model_revision", "text"),
    "num_draft_tokens": Argument("speculative_num_draft_tokens", "count", ("speculative_dflash_block_size",)),
    "draft_kv_dtype": Argument("speculative_draft_kv_cache_dtype", "text"),
    "role": Argument("disaggregation_mode", "text"),
    "connector": Argument("disaggregation_transfer_backend", "text"),
    "radix_cache": Argument("disaggregation_decode_enable_radix_cache", "switch"),
})  # fmt: skip


def read_vllm(role: str, launch: Launch, release: Release) -> Server:
    """A server of vLLM.

    Raises:
        UsageError: a field inside an object has another type than vLLM takes.
    """
    speculation = launch.get("speculation")
    draft = None if speculation is None else _vllm_draft(launch, speculation)
    connectors = tuple(_vllm_connectors(launch, launch.get("transfer") or {}, TRANSFER))
    return _server(role, launch, release, draft, connectors)


def read_sglang(role: str, launch: Launch, release: Release) -> Server:
    """A server of SGLang. Its number of draft tokens includes the anchor."""
    method, name = launch.get("method"), launch.get("draft")
    block, mode = launch.get("num_draft_tokens"), launch.get("role")
    draft = ServedDraft(
        name=name,
        revision=launch.get("draft_revision"),
        method=method.lower() if method is not None else None,
        num_draft_tokens=block - 1 if block is not None else None,
        kv_dtype=launch.get("draft_kv_dtype"),
    )
    backend = launch.get("connector") or "mooncake"
    connector = EngineConnector(name=backend, role=mode, carrier=SGLANG_CARRIERS.get(backend, NO_CARRIER))
    has_draft = method is not None or name is not None
    return _server(role, launch, release, draft if has_draft else None, (connector,) if mode in MODES else ())


def _server(
    role: str,
    launch: Launch,
    release: Release,
    draft: ServedDraft | None,
    connectors: tuple[EngineConnector, ...],
) -> Server:
    return Server(
        role=role,
        launch=launch,
        release=release_of(launch.version, release),
        draft=draft,
        target=launch.get("target"),
        target_revision=launch.get("target_revision"),
        connectors=connectors,
        tensor_parallel=launch.get("tensor_parallel") or 1,
        context_parallel=launch.get("context_parallel") or launch.get("decode_context_parallel") or 1,
        kv_dtype=launch.get("kv_dtype") or "auto",
        page_size=launch.get("page_size"),
    )


def vllm_notices(transfer: Transfer) -> frozenset[Factor]:
    """Mooncake finds no memory for a layer that only the prefill server has. NIXL compares layer counts and hashes."""
    if transfer.is_over(MOONCAKE):
        return frozenset({"prefill-only"})
    if not transfer.is_over(NIXL):
        return frozenset()
    found: set[Factor] = {"decode-only", "prefill-only"}
    if transfer.is_enforced:
        found |= {"version", "target", "kv-dtype"}
        if transfer.release >= HASHES_DRAFTS:
            found |= {"draft", "method", "draft-kv-dtype"}
    return frozenset(found)


def sglang_notices(transfer: Transfer) -> frozenset[Factor]:
    """SGLang compares the target's KV dtype, and the page size, which has its own rule."""
    return frozenset({"kv-dtype"})


ENGINE_SERVERS: Mapping[str, EngineServers] = {
    VLLM: EngineServers(
        keys=VLLM_LAUNCH, read=read_vllm, notices=vllm_notices, first=(0, 24), free_roles=frozenset({NIXL}),
        takes_drafts=True,
    ),
    SGLANG: EngineServers(
        keys=SGLANG_LAUNCH, read=read_sglang, notices=sglang_notices, first=(0, 5, 23), last_failing=(0, 5, 16)
    ),
}  # fmt: skip
"""The engines that are known to have servers that hand KV over."""


def _vllm_draft(launch: Launch, speculation: Mapping[str, Any]) -> ServedDraft:
    """The draft of vLLM's speculative config. Without a method, vLLM derives it from the draft's name, eagle first."""
    name = _text(launch, SPECULATIVE, speculation, "model")
    method = _text(launch, SPECULATIVE, speculation, "method")
    if method is None and name is not None:
        lower = name.lower()
        method = "eagle" if "eagle-" in lower or "eagle3" in lower else "dflash" if "dflash" in lower else None
    number = speculation.get("num_speculative_tokens")
    if number is not None and not is_int(number):
        raise _wrong(launch, f"{SPECULATIVE}.num_speculative_tokens", number, "a whole number")
    return ServedDraft(
        name=name,
        revision=_text(launch, SPECULATIVE, speculation, "revision"),
        method=method,
        num_draft_tokens=number,
        kv_dtype=_text(launch, SPECULATIVE, speculation, "kv_cache_dtype"),
    )


def _vllm_connectors(launch: Launch, config: Mapping[str, Any], place: str) -> Iterator[EngineConnector]:
    """The connector of a transfer config, and then the connectors inside it. `place` is the config's dotted key."""
    name, role = _text(launch, place, config, "kv_connector"), _text(launch, place, config, "kv_role")
    if role is not None and role not in ROLES:
        raise _wrong(launch, f"{place}.kv_role", role, f"one of {', '.join(ROLES)}")
    if name is None:
        return
    carrier = VLLM_CARRIERS.get(name, NO_CARRIER)
    if config.get("kv_connector_module_path") is not None:
        carrier = replace(carrier, family=name, carries="unknown", why="its code is not the engine's")
    options = as_object(config.get("kv_connector_extra_config"))
    yield EngineConnector(
        name=name,
        role=ROLES[role] if role is not None else None,
        options=options,
        is_on_host=config.get("kv_buffer_device") == "cpu",
        carrier=carrier,
    )
    children = options.get("connectors", []) if name == MULTI else []
    inner = f"{place}.kv_connector_extra_config.connectors"
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        raise _wrong(launch, inner, children, "a list of objects")
    for at, child in enumerate(children):
        yield from _vllm_connectors(launch, child, f"{inner}[{at}]")


def _text(launch: Launch, place: str, values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(launch, f"{place}.{key}", value, "a text")
    return value


def _wrong(launch: Launch, key: str, value: Any, expected: str) -> UsageError:
    return UsageError(path=launch.path, field=key, found=value, expected=expected)
