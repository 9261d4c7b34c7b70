"""Rules on two servers of SGLang."""

from collections.abc import Iterator

from dflash_cli.engines.sglang import ENGINE
from dflash_cli.handoff.two_servers.both_servers import AGAIN
from dflash_cli.handoff.two_servers.transfer import Transfer
from dflash_cli.rules.rule import Problem, check

CODE = "SGLang 0.5.23"
DFLASH = "dflash"
FIX_BACKEND = f"give both servers the same --disaggregation-transfer-backend, then check again: {AGAIN}"


@check(
    "K21",
    level="kv-transfer",
    effect="nothing reaches the decode server",
    fix=FIX_BACKEND,
    source=f"{CODE} arg_groups/choices.py, disaggregation/fake/conn.py",
    engines=ENGINE,
)
def backends_send(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have the same transfer backend, and it is one that sends."""
    first, second = (transfer.carrier_of(server) for server in transfer.servers)
    for server, found in zip(transfer.servers, (first, second), strict=True):
        if server.connectors and found is None:
            expected = ", ".join(transfer.known.carriers)
            message = f"{server.connectors[0].name!r}, expected one of {expected}"
            yield Problem(server.location("connector"), message)
        elif found is not None and found[1].carries == "nothing":
            yield Problem(server.location("connector"), f"{found[0].name}: {found[1].why}")
        elif found is not None and found[1].carries == "unknown":
            message = f"{found[0].name}: {found[1].why}"
            effect = "whether the draft's context arrives has to be measured"
            yield Problem(server.location("connector"), message, effect, severity="warning", outcome="drops")
    if first is not None and second is not None and first[1].family != second[1].family:
        message = f"{second[0].name}, that of the prefill server {first[0].name}"
        yield Problem(transfer.decode.location("connector"), message)


@check(
    "K22",
    level="kv-transfer",
    effect="the decode server refuses every prefill server of another page size",
    fix=f"give both servers the same --page-size, then check again: {AGAIN}",
    source=f"{CODE} disaggregation/common/conn.py",
    engines=ENGINE,
)
def pages_are_of_one_size(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have the same page size."""
    first, second = (server.page_size for server in transfer.servers)
    if first == second:
        return
    location = transfer.decode.location("page_size")
    if first is None or second is None:
        message = "stated for one server only; the other one takes that of its attention backend"
        yield Problem(location, message, severity="warning", outcome="serves")
    else:
        yield Problem(location, f"{second}, that of the prefill server {first}")


@check(
    "K23",
    level="kv-transfer",
    effect="SGLang stops as it starts",
    fix=f"leave the option out, then check again: {AGAIN}",
    source=f"{CODE} arg_groups/speculative_hook.py",
    engines=ENGINE,
)
def dflash_goes_with_the_options(transfer: Transfer) -> Iterator[Problem]:
    """A server with a DFlash draft has no pipeline stages, and no radix cache where it decodes."""
    for server in transfer.servers:
        if server.draft is None or server.draft.method != DFLASH:
            continue
        if (server.launch.get("pp_size") or 1) > 1:
            yield Problem(server.location("pp_size"), f"{server.launch.get('pp_size')}, expected 1 with DFlash")
        if server.role == "decode" and server.launch.get("disaggregation_decode_enable_radix_cache"):
            yield Problem(server.location("disaggregation_decode_enable_radix_cache"), "expected off with DFlash")


@check(
    "K24",
    level="kv-transfer",
    effect="the prefill server refuses the decode server",
    fix=f"give both servers the same --tp-size, then check again: {AGAIN}",
    source=f"{CODE} disaggregation/mooncake/conn.py; sgl-project/sglang#34285, tried with equal ranks",
    engines=ENGINE,
)
def ranks_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have the same number of ranks.

    With context parallelism at the prefill server Mooncake refuses another number. Otherwise heads are cut as the
    target's are, and a draft with another number of KV heads is not known to arrive.
    """
    first, second = (server.tensor_parallel for server in transfer.servers)
    if first == second or transfer.prefill.draft is None:
        return
    location, said = transfer.decode.location("tensor_parallel"), f"{second} ranks, the prefill server's {first}"
    if transfer.prefill.context_parallel > 1 and transfer.is_over("mooncake"):
        yield Problem(location, f"{said}, which shares them with context parallelism")
        return
    config, facts = transfer.decode.config, transfer.decode.target_facts
    known = config is not None and facts is not None and facts.num_kv_heads is not None
    if known and config is not None and facts is not None and config.num_kv_heads == facts.num_kv_heads:
        return
    effect = "heads are cut as the target's are; the draft's KV is not known to arrive whole"
    yield Problem(location, said, effect, severity="warning", outcome="drops")
