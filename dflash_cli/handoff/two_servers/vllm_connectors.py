"""Rules on vLLM's connectors: whether they are two of a kind, and whether they carry the draft's layers."""

from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.engines.serving_engine import release_text
from dflash_cli.engines.vllm import ENGINE
from dflash_cli.handoff.two_servers.both_servers import AGAIN
from dflash_cli.handoff.two_servers.carriers import HASHES_DRAFTS, MORIIO, MULTI, NIXL, VLLM_CARRIERS, nixl_mode
from dflash_cli.handoff.two_servers.server import Server
from dflash_cli.handoff.two_servers.transfer import Transfer
from dflash_cli.rules.rule import Problem, check

UNTRIED = "this release does not know such layers, and what it does with them was not tried"
FIX_NIXL = f"use NixlConnector on both servers, then check again: {AGAIN}"
NO_GROUPS = "disable_hybrid_kv_cache_manager"
CLAMPS = (0, 32)
"""The first release whose MoRIIO connector leaves out blocks that a draft reserves ahead (vllm-project/vllm#55053)."""
PAIRS_TAILS = (0, 31)
"""The first in which, where the decode server reads, blocks of its own may follow those that it reads. It refuses
states together with a draft; earlier ones do not know states."""
KNOWS_GROUPS = (0, 30)
"""The first that knows windows; where it writes, it refuses them."""
CODE = "vLLM 0.24.0 to 0.33.0 distributed/kv_transfer/kv_connector/v1"


@check(
    "K11",
    level="kv-transfer",
    effect="the decode server finds no KV of the prompt",
    fix=FIX_NIXL,
    source=f"{CODE}, factory.py; #49230 for pulling and pushing",
    engines=ENGINE,
)
def connectors_are_of_a_kind(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have connectors that understand each other."""
    found = [transfer.carrier_of(server) for server in transfer.servers]
    for server, pair in zip(transfer.servers, found, strict=True):
        plain = [item.name for item in server.connectors if item.name != MULTI]
        if pair is None and plain:
            yield Problem(server.location("connector"), f"{plain[0]!r} is no connector of vLLM 0.24 to 0.33")
    first, second = found
    if first is None or second is None:
        return
    names = f"{second[0].name}, that of the prefill server {first[0].name}"
    if first[1].family != second[1].family:
        yield Problem(transfer.decode.location("connector"), names)
    elif first[1].family == NIXL and nixl_mode(first[0]) != nixl_mode(second[0]):
        refused = transfer.release >= HASHES_DRAFTS and transfer.is_enforced
        effect = "one pushes blocks, the other pulls them" + (", which the handshake refuses" if refused else "")
        yield Problem(transfer.decode.location("connector"), names, effect)


@check(
    "K12",
    level="kv-transfer",
    effect="whether the draft's context arrives has to be measured: compare with a server that runs prompts itself",
    fix="dflash probe URL --beside URL # asks both and compares their acceptance lengths",
    source=f"{CODE}; LMCache 0.5.6 integration/vllm/utils.py",
    engines=ENGINE,
)
def connectors_carry_the_draft(transfer: Transfer) -> Iterator[Problem]:
    """The connector hands the draft's layers over to another server.

    The connectors for NIXL, Mooncake and MoRIIO register every layer that has KV, and DFlash's are numbered after the
    target's. LMCache counts a draft's layers for methods that use the target's hidden states, DFlash among them.
    """
    for server in transfer.servers:
        found = transfer.carrier_of(server)
        if found is None or found[1].carries == "all":
            continue
        message = f"{found[0].name}: {found[1].why}"
        if found[1].carries == "nothing":
            yield Problem(server.location("connector"), message, "nothing reaches the decode server", fix=FIX_NIXL)
        else:
            yield Problem(server.location("connector"), message, severity="warning", outcome="drops")


@check(
    "K13",
    level="kv-transfer",
    effect="the blocks that a server reserves ahead for the draft have no place at the other one",
    fix=f"use vLLM {release_text(CLAMPS)} or later, or NixlConnector; then check again: {AGAIN}",
    source="vllm-project/vllm#55053, #50173; moriio/moriio_layout.py and moriio_connector.py of 0.24.0 to 0.33.0",
    engines=ENGINE,
)
def moriio_leaves_out_reserved_blocks(transfer: Transfer) -> Iterator[Problem]:
    """MoRIIO leaves out the blocks that a draft reserves past the prompt.

    Before 0.32, where the prefill server writes, a request fails whose reserve of K + 1 rows begins another block.
    Where the decode server reads, by read_mode, it reserves them before it reads, which is reported to fail, and is
    provided for from 0.31 on.
    """
    if not _draft_is_over_moriio(transfer):
        return
    location = transfer.prefill.location("connector")
    if not _reads(transfer.prefill) and transfer.release < CLAMPS:
        yield Problem(location, f"MoRIIO writes, and {transfer.named} clips no blocks")
    elif _reads(transfer.prefill) and transfer.release < PAIRS_TAILS:
        yield Problem(location, f"MoRIIO reads, by {transfer.named}", severity="warning", outcome="drops")


@check(
    "K14",
    level="kv-transfer",
    effect="vLLM stops as it starts",
    fix=FIX_NIXL,
    source="vLLM 0.30.0 to 0.33.0 moriio/moriio_connector.py",
    engines=ENGINE,
)
def moriio_takes_the_layers(transfer: Transfer) -> Iterator[Problem]:
    """MoRIIO with a DFlash draft has no windows, where it writes, and no layers with a state.

    It refuses windows from 0.30 on, and takes them for full attention before. States are refused with a draft from 0.31
    on, DSpark's excepted from 0.32 on, and are not known to it before.
    """
    if not _draft_is_over_moriio(transfer):
        return
    decode = transfer.decode
    if decode.has_state:
        problem = Problem(decode.location("target"), "layers with a state, which MoRIIO does not take with DFlash")
        is_known = transfer.release >= PAIRS_TAILS
        yield problem if is_known else replace(problem, effect=UNTRIED, severity="warning", outcome="drops")
    windows = _windows(decode)
    if windows and not _reads(transfer.prefill) and transfer.release >= KNOWS_GROUPS:
        yield Problem(decode.location("connector"), f"{windows} has windows, which MoRIIO does not write")


@check(
    "K15",
    level="kv-transfer",
    effect="the handshake refuses the pair, since KV is grouped in different ways",
    fix=f"give both servers the same connectors and --disable-hybrid-kv-cache-manager, then check again: {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py, kv_connector/factory.py; ai-dynamo/dynamo#12821",
    engines=ENGINE,
)
def cache_managers_agree(transfer: Transfer) -> Iterator[Problem]:
    """Over NIXL both servers have the hybrid KV cache manager, or neither has.

    It is off where a connector cannot work with it, which one that is only on one side may be.
    """
    if not transfer.is_over(NIXL) or not transfer.is_enforced:
        return
    first, second = (_manages_groups(server) for server in transfer.servers)
    if first != second:
        words = {True: "on", False: "off"}
        message = f"the hybrid KV cache manager is {words[second]}, at the prefill server {words[first]}"
        yield Problem(transfer.decode.location(NO_GROUPS), message)


def _manages_groups(server: Server) -> bool:
    if server.launch.get(NO_GROUPS) is not None:
        return not server.launch.get(NO_GROUPS)
    known = [VLLM_CARRIERS[item.name] for item in server.connectors if item.name in VLLM_CARRIERS]
    return all(carrier.handles_groups for carrier in known)


def _draft_is_over_moriio(transfer: Transfer) -> bool:
    return transfer.is_over(MORIIO) and transfer.prefill.draft is not None


def _reads(server: Server) -> bool:
    stated = [str(item.options.get("read_mode", "")) for item in server.connectors]
    return any(text.lower().strip() in ("true", "1") for text in stated)


def _windows(server: Server) -> str | None:
    """Whose layers have windows, the draft's or the target's; None where none are known of."""
    config, facts = server.config, server.target_facts
    if config is not None and any(window is not None for window in config.windows):
        return "the draft"
    return "the target" if facts is not None and any(window is not None for window in facts.windows) else None
