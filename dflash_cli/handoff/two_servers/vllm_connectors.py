"""Rules on vLLM's connectors: whether both servers have the same kind, and whether they carry the draft's layers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dflash_cli.engines.serving_engine import release_text
from dflash_cli.engines.vllm import ENGINE
from dflash_cli.handoff.two_servers.both_servers import AGAIN, transfer_rule
from dflash_cli.handoff.two_servers.carriers import HASHES_DRAFTS, MORIIO, MULTI, NIXL
from dflash_cli.handoff.two_servers.server import Server
from dflash_cli.handoff.two_servers.transfer import Transfer
from dflash_cli.rules.rule import Problem

UNTRIED = "this release does not know such layers, and its behaviour with them was not tried"
FIX_NIXL = f"use NixlConnector on both servers, then check again: {AGAIN}"
CLAMPS = (0, 32)
"""From this release on, MoRIIO leaves out blocks that a draft reserves ahead (vllm-project/vllm#55053)."""
PAIRS_TAILS = (0, 31)
"""From this release on, MoRIIO accepts additional blocks of the decode server when it reads, and refuses states
together with a draft. Earlier releases do not know states."""
KNOWS_GROUPS = (0, 30)
"""From this release on, MoRIIO knows windows, and refuses them when it writes."""
CODE = "vLLM 0.24.0 to 0.33.0 distributed/kv_transfer/kv_connector/v1"

check_transfer = partial(transfer_rule, engines=ENGINE)


@check_transfer(
    "K11",
    effect="the decode server finds no KV of the prompt",
    fix=FIX_NIXL,
    source=f"{CODE}, factory.py; #49230 for pulling and pushing",
)
def connectors_are_of_a_kind(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have connectors that understand each other."""
    for server in transfer.servers:
        plain = [item.name for item in server.connectors if item.name != MULTI]
        if server.link is None and plain:
            yield Problem(server.location("connector"), f"{plain[0]!r} is not a connector of vLLM 0.24 to 0.33")
    first, second = (server.link for server in transfer.servers)
    if first is None or second is None:
        return
    problem = transfer.differs("connector", first.name, second.name)
    if transfer.links is None:
        yield problem
    elif transfer.is_over(NIXL) and first.carrier.pushes != second.carrier.pushes:
        is_refused = transfer.release >= HASHES_DRAFTS and transfer.is_enforced
        effect = "one pushes blocks, the other pulls them" + (", which the handshake refuses" if is_refused else "")
        yield replace(problem, effect=effect)


@check_transfer(
    "K12",
    effect="whether the draft's context arrives must be measured: compare with a server that prefills itself",
    fix="dflash probe URL --beside URL # asks both and compares their acceptance lengths",
    source=f"{CODE}; LMCache 0.5.6 integration/vllm/utils.py",
)
def connectors_carry_the_draft(transfer: Transfer) -> Iterator[Problem]:
    """The connector hands the draft's layers over to another server.

    The connectors for NIXL, Mooncake and MoRIIO register every layer that has KV, and DFlash's layers are numbered
    after the target's. LMCache counts a draft's layers for methods that use the target's hidden states, such as DFlash.
    """
    for server in transfer.servers:
        if server.link is None or server.link.carrier.carries == "all":
            continue
        problem = Problem(server.location("connector"), f"{server.link.name}: {server.link.carrier.why}")
        if server.link.carrier.carries == "nothing":
            yield replace(problem, effect="the decode server receives nothing", fix=FIX_NIXL)
        else:
            yield replace(problem, severity="warning", outcome="drops")


@check_transfer(
    "K13",
    effect="one server reserves blocks ahead for the draft, and the other server lacks them",
    fix=f"use vLLM {release_text(CLAMPS)} or later, or NixlConnector; then check again: {AGAIN}",
    source="vllm-project/vllm#55053, #50173; moriio/moriio_layout.py and moriio_connector.py of 0.24.0 to 0.33.0",
)
def moriio_leaves_out_reserved_blocks(transfer: Transfer) -> Iterator[Problem]:
    """MoRIIO leaves out the blocks that a draft reserves past the prompt.

    If the prefill server writes, before 0.32 a request fails if its reserve of K + 1 rows begins another block. If the
    decode server reads (`read_mode`), it reserves the blocks before it reads. That is reported to fail before 0.31.
    """
    if not _draft_is_over_moriio(transfer):
        return
    location = transfer.prefill.location("connector")
    if not _reads(transfer.prefill) and transfer.release < CLAMPS:
        yield Problem(location, f"MoRIIO writes, and {transfer.named} does not leave out reserved blocks")
    elif _reads(transfer.prefill) and transfer.release < PAIRS_TAILS:
        yield Problem(location, f"MoRIIO reads, with {transfer.named}", severity="warning", outcome="drops")


@check_transfer(
    "K14",
    effect="vLLM stops at start",
    fix=FIX_NIXL,
    source="vLLM 0.30.0 to 0.33.0 moriio/moriio_connector.py",
)
def moriio_takes_the_layers(transfer: Transfer) -> Iterator[Problem]:
    """With a DFlash draft over MoRIIO, layers lack states and, if MoRIIO writes, windows.

    From 0.30 on MoRIIO refuses windows; before, it treats them as full attention. From 0.31 on it refuses states
    together with a draft, except DSpark from 0.32 on; before, it does not know states.
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


@check_transfer(
    "K15",
    effect="the handshake refuses the pair, since the servers group KV differently",
    fix=f"give both servers the same connectors and --disable-hybrid-kv-cache-manager, then check again: {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py, kv_connector/factory.py; ai-dynamo/dynamo#12821",
)
def cache_managers_agree(transfer: Transfer) -> Iterator[Problem]:
    """Over NIXL, both servers have the hybrid KV cache manager, or neither has it.

    vLLM switches it off for a connector that cannot work with it. Such a connector may be on one server only.
    """
    if not transfer.is_over(NIXL) or not transfer.is_enforced:
        return
    first, second = ("on" if _manages_groups(server) else "off" for server in transfer.servers)
    if first != second:
        yield transfer.differs("no_groups", first, f"hybrid KV cache manager {second}")


def _manages_groups(server: Server) -> bool:
    is_off = server.launch.get("no_groups")
    return not is_off if is_off is not None else all(item.carrier.handles_groups for item in server.connectors)


def _draft_is_over_moriio(transfer: Transfer) -> bool:
    return transfer.is_over(MORIIO) and transfer.prefill.draft is not None


def _reads(server: Server) -> bool:
    stated = [str(item.options.get("read_mode", "")) for item in server.connectors]
    return any(text.lower().strip() in ("true", "1") for text in stated)


def _windows(server: Server) -> str | None:
    """The model with windows: the draft, or otherwise the target. None if none are known."""
    models = {"the draft": server.config, "the target": server.target_facts}
    return next((name for name, item in models.items() if item is not None and set(item.windows) - {None}), None)
