"""Rules on two servers of SGLang."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dflash_cli.engines.sglang import ENGINE
from dflash_cli.handoff.two_servers.both_servers import AGAIN, transfer_rule
from dflash_cli.handoff.two_servers.carriers import MOONCAKE, SGLANG_CARRIERS
from dflash_cli.handoff.two_servers.transfer import Transfer
from dflash_cli.rules.rule import Problem

CODE = "SGLang 0.5.23"
DFLASH = "dflash"
FIX_BACKEND = f"give both servers the same --disaggregation-transfer-backend, then check again: {AGAIN}"

check_transfer = partial(transfer_rule, engines=ENGINE)


@check_transfer(
    "K21",
    effect="the decode server receives nothing",
    fix=FIX_BACKEND,
    source=f"{CODE} arg_groups/choices.py, disaggregation/fake/conn.py",
)
def backends_send(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have the same transfer backend, and it sends."""
    for server in transfer.servers:
        location, link = server.location("connector"), server.link
        if server.connectors and link is None:
            yield Problem(location, f"{server.connectors[0].name!r}, expected one of {', '.join(SGLANG_CARRIERS)}")
        elif link is not None and link.carrier.carries == "nothing":
            yield Problem(location, f"{link.name}: {link.carrier.why}")
        elif link is not None and link.carrier.carries == "unknown":
            effect = "whether the draft's context arrives must be measured"
            yield Problem(location, f"{link.name}: {link.carrier.why}", effect, severity="warning", outcome="drops")
    first, second = (server.link for server in transfer.servers)
    if first is not None and second is not None and transfer.links is None:
        yield transfer.differs("connector", first.name, second.name)


@check_transfer(
    "K22",
    effect="the decode server refuses every prefill server with another page size",
    fix=f"give both servers the same --page-size, then check again: {AGAIN}",
    source=f"{CODE} disaggregation/common/conn.py",
)
def pages_are_of_one_size(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have the same page size."""
    first, second = (server.page_size for server in transfer.servers)
    if first == second:
        return
    if first is None or second is None:
        message = "stated for one server only; the other server takes its attention backend's page size"
        yield Problem(transfer.decode.location("page_size"), message, severity="warning", outcome="serves")
    else:
        yield transfer.differs("page_size", first, second)


@check_transfer(
    "K23",
    effect="SGLang stops at start",
    fix=f"leave the option out, then check again: {AGAIN}",
    source=f"{CODE} arg_groups/speculative_hook.py",
)
def dflash_goes_with_the_options(transfer: Transfer) -> Iterator[Problem]:
    """A server with a DFlash draft runs without pipeline stages, and a decode server without a radix cache."""
    for server in transfer.servers:
        if server.draft is None or server.draft.method != DFLASH:
            continue
        stages = server.launch.get("pipeline_parallel") or 1
        if stages > 1:
            yield Problem(server.location("pipeline_parallel"), f"{stages}, expected 1 with DFlash")
        if server.role == "decode" and server.launch.get("radix_cache"):
            yield Problem(server.location("radix_cache"), "on, expected off with DFlash")


@check_transfer(
    "K24",
    effect="the prefill server refuses the decode server",
    fix=f"give both servers the same --tp-size, then check again: {AGAIN}",
    source=f"{CODE} disaggregation/mooncake/conn.py; sgl-project/sglang#34285, tried with equal ranks",
)
def ranks_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have the same number of ranks.

    With context parallelism on the prefill server, Mooncake refuses other numbers. Otherwise the draft's heads are
    split like the target's, and a draft with another number of KV heads is not known to arrive.
    """
    first, second = (server.tensor_parallel for server in transfer.servers)
    if first == second or transfer.prefill.draft is None:
        return
    problem = transfer.differs("tensor_parallel", first, f"{second} ranks")
    if transfer.prefill.context_parallel > 1 and transfer.is_over(MOONCAKE):
        yield replace(problem, message=f"{problem.message}, split by context parallelism")
        return
    config, facts = transfer.decode.config, transfer.decode.target_facts
    if config is None or facts is None or config.num_kv_heads != facts.num_kv_heads:
        effect = "heads are split like the target's; the draft's KV is not known to arrive complete"
        yield replace(problem, effect=effect, severity="warning", outcome="drops")
