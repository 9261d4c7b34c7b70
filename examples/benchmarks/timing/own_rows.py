"""Rows of our own engine, and of the device's limits."""

import statistics
from functools import partial

import torch

from timing.accounting import StepAccount, waterfall
from timing.ceilings import chain_ms, step_products
from timing.draft_kinds import KindCell, add_kinds, measure_kinds, ratios
from timing.engine_arms import Cell, StepTimes, measure_steps, prefill_ms, why_not_adaptive
from timing.floors import Rates, Work, least_ms, stated_rates
from timing.fp8_arms import FP8_ARMS, fp8_pairs
from timing.pair_files import read_pair
from timing.pairs import RandomPair, build_pair
from timing.plan import Plan, add_prefill, title
from timing.report import Row, say


def run_ours(plan: Plan) -> None:
    """Measure our arms on the pair in the plan's files, or on one in memory."""
    if plan.files is None:
        random = build_pair(plan.shape, plan.max_model_len, plan.device)
    else:
        random = read_pair(plan.shape, plan.files, plan.max_model_len, plan.device)
    if "ceilings" in plan.arms:
        plan.recorder.guard({"arm": "ceilings"}, partial(measure_ceilings, plan, random))
    random.variants.update(fp8_pairs(random, plan.arms))
    why_not = why_not_adaptive(plan.device)
    if "adaptive" in plan.arms and why_not:
        say(f"adaptive: skipped, {why_not}")
        plan.arms.remove("adaptive")
    for cell in plan.cells():
        what = {"arm": cell.arm, "batch": cell.batch, "context": cell.context, "graphs": cell.has_graphs}
        plan.recorder.guard(what, partial(measure_cell, plan, random, cell))
    if "drafts" in plan.arms:
        random = add_kinds(random, plan.kinds)
        for cells in plan.kind_cells():
            first = cells[0]
            what = {"arm": "drafts", "batch": first.batch, "context": first.context, "block": first.num_rows}
            plan.recorder.guard(what, partial(measure_drafts, plan, random, cells))
    if "prefill" in plan.arms:
        measure_prefills(plan, random)


def measure_drafts(plan: Plan, random: RandomPair, cells: list[KindCell]) -> None:
    """Record one row for each kind of draft, with its ratio to the first kind."""
    found = measure_kinds(random, cells, has_profile=plan.is_cuda)
    first = found[cells[0].arm]
    for cell in cells:
        times = found[cell.arm]
        over = ratios(times, first)
        row: Row = {
            "arm": cell.arm, "shape": plan.shape_name, "batch": cell.batch, "context": cell.context,
            "block": cell.num_rows, "graphs": cell.has_graphs, "acceptance_asked": cell.acceptance,
            "acceptance": "real" if cell.acceptance is None else "synthetic", "acceptance_achieved": times.acceptance,
            "ms": times.ms, "rounds": times.rounds, "ratio": statistics.median(over), "ratios": over,
            **plan.gauges.over(times.spans).fields(step=times.ms / 1000), "files": plan.weights["files"],
            "least_ratio": min(over), "most_ratio": max(over), "least_ms": min(times.rounds),
            "most_ms": max(times.rounds),
        }  # fmt: skip
        if times.account is not None:
            row |= {
                "busy_ms": times.account.busy_ms, "nodes": times.account.num_nodes,
                "kernels_us": dict(times.account.kinds_us), "top": times.account.top,
            }  # fmt: skip
        plan.recorder.add("draft", row)
        say(f"{title(row)}, block {cell.num_rows}: {times.ms:.3f} ms per step, {row['ratio']:.3f} of {cells[0].arm}")
        if times.account is not None and plan.shows_kernels:
            _show_kernels(times.account)


def measure_ceilings(plan: Plan, random: RandomPair) -> None:
    """Measure the chain of products for each kind of step. A chain has no experts, which depend on the row."""
    if plan.shape.experts is not None:
        say("ceilings: skipped, a chain of products has no routed experts")
        return
    for is_drafting in (False, True):
        for batch in plan.batches:
            ms = chain_ms(step_products(random, batch, is_drafting=is_drafting))
            plan.chains[is_drafting, batch] = ms
            kind = "dflash" if is_drafting else "plain"
            plan.recorder.add("ceiling", {"arm": "matrix products", "of": kind, "batch": batch, "ms": ms})
            say(f"matrix products alone, {kind} batch {batch}: {ms:.3f} ms")


def measure_cell(plan: Plan, random: RandomPair, cell: Cell) -> None:
    """Record one row of decode steps."""
    times = measure_steps(random, cell, has_profile=plan.is_cuda and cell.has_graphs)
    has_floor = cell.arm != "adaptive" and cell.arm not in FP8_ARMS
    floor_ms = _floor_ms(plan, cell, times, plan.rates) if has_floor else None
    account = times.account
    rows = cell.batch * (plan.shape.block if cell.is_drafting else 1)
    experts = plan.shape.experts if cell.arm != "adaptive" else None
    row: Row = {
        "arm": cell.arm, "shape": plan.shape_name, "batch": cell.batch, "context": cell.context,
        "graphs": cell.has_graphs, "acceptance": "real" if cell.acceptance is None else "synthetic",
        "acceptance_asked": cell.acceptance, "acceptance_achieved": times.acceptance, "ms": times.ms,
        "verify_width": times.verify_width,
        "rounds": times.rounds, "tokens_per_second": times.tokens_per_second, "floor_ms": floor_ms,
        "ratio": times.ms / floor_ms if floor_ms else None,
        "experts": experts.distinct(rows) if experts else None,
        "experts_ms": least_ms([Work(plan.floor.experts_bytes(rows), 0)], plan.rates)
        if experts else None,
        **plan.weights,
        **plan.gauges.over([times.span]).fields(step=times.ms / 1000, token=1 / times.tokens_per_second),
    }  # fmt: skip
    if account is not None:
        row |= {
            "busy_ms": account.busy_ms, "idle_ms": times.ms - account.busy_ms, "nodes": account.num_nodes,
            "kernels_us": dict(account.kinds_us),
        }  # fmt: skip
    if cell.has_graphs and floor_ms is not None:
        row["waterfall"] = _waterfall(plan, cell, times)
    plan.recorder.add("step", row)
    say(f"{title(row)}: {times.ms:.3f} ms per step, {times.tokens_per_second:.0f} tokens/s")
    if account is not None and plan.shows_kernels:
        _show_kernels(account)


def measure_prefills(plan: Plan, random: RandomPair) -> None:
    """Record prefills of each set of prompts, without and with a draft."""
    for lengths in plan.prefills:
        for arm in ("plain", "dflash", *(arm for arm in FP8_ARMS if arm in plan.arms)):
            what = {"arm": f"prefill {arm}", "prompts": len(lengths), "tokens": lengths[0]}
            plan.recorder.guard(what, partial(measure_prefill, plan, random, arm, lengths))


def measure_prefill(plan: Plan, random: RandomPair, arm: str, lengths: list[int]) -> None:
    """Record one row of prefills."""
    has_profile = plan.is_cuda and plan.shows_kernels
    times, spans, account = prefill_ms(random, lengths, arm, has_profile=has_profile)
    add_prefill(plan, arm, lengths, times, spans)
    if account is not None:
        _show_kernels(account)


def _floor_ms(plan: Plan, cell: Cell, times: StepTimes, rates: Rates) -> float:
    acceptance = times.acceptance or 1.0
    return least_ms(plan.floor.step(cell.batch, times.mean_context, acceptance if cell.is_drafting else None), rates)


def _waterfall(plan: Plan, cell: Cell, times: StepTimes) -> list[tuple[str, float]]:
    stated = stated_rates(torch.cuda.get_device_name(plan.device))
    steps = [
        ("floor by the data sheet", _floor_ms(plan, cell, times, stated) if stated else None),
        ("floor at measured rates", _floor_ms(plan, cell, times, plan.rates)),
        ("matrix products alone, cuBLAS", plan.chains.get((cell.is_drafting, cell.batch))),
    ]
    return waterfall(steps, times.account, times.ms)


def _show_kernels(account: StepAccount) -> None:
    print(f"  busy {account.busy_ms:.2f} ms in {account.num_nodes:.0f} launches per step")
    for name, us, count in account.top:
        print(f"  {us:8.1f} us {count:6.1f} x  {name[:90]}")
