"""Rows of other software: transformers, a reference loop on its modules, and vLLM."""

from functools import partial

from timing.plan import OtherSpeed, Plan, add_other, add_prefill
from timing.report import Row, say
from timing.vllm_arm import acceptance_note, run_vllm

TRANSFORMERS_BATCHES, TRANSFORMERS_TOKENS = (1, 8), 24


def measure_transformers(plan: Plan) -> None:
    """Measure `generate` and the reference loop on one transformers model."""
    from timing.transformers_arms import ReferenceLoop, build_target, generate_ms

    model = build_target(plan.shape, plan.device)
    context, tokens = plan.contexts[0], TRANSFORMERS_TOKENS if plan.is_cuda else 4

    def generate(batch: int) -> None:
        ms = generate_ms(model, plan.shape, batch, context, tokens)
        speed = OtherSpeed(
            arm="transformers generate", batch=batch, context=context, num_tokens=tokens, ms=ms,
            tokens_per_second=1000 * batch / ms,
        )  # fmt: skip
        add_other(plan, speed)

    def loop(acceptance: float | None) -> None:
        ms, achieved = ReferenceLoop(model, plan.shape, acceptance).step_ms(context, tokens)
        speed = OtherSpeed(
            arm="reference loop, transformers' modules", batch=1, context=context, num_tokens=round(achieved * tokens),
            ms=ms, tokens_per_second=1000 * achieved / ms, asked=acceptance, achieved=achieved,
        )  # fmt: skip
        add_other(plan, speed)

    if "transformers" in plan.arms:
        for batch in TRANSFORMERS_BATCHES:
            plan.recorder.guard({"arm": "transformers", "batch": batch}, partial(generate, batch))
    if "reference" in plan.arms:
        for acceptance in plan.acceptances:
            what = {"arm": "reference", "acceptance": acceptance}
            plan.recorder.guard(what, partial(loop, acceptance))


def measure_vllm(plan: Plan, *, is_drafting: bool, acceptance: float | None) -> None:
    """Measure all cells in one engine of vLLM."""
    arm = "vllm dflash" if is_drafting else "vllm plain"
    tokens = round(plan.steps * (acceptance or 1.0)) if is_drafting else plan.steps
    cells: list[Row] = [
        {"kind": "step", "batch": batch, "context": context, "num_tokens": tokens}
        for context in plan.contexts
        for batch in plan.batches
    ]
    if not is_drafting:
        cells += [{"kind": "prefill", "lengths": lengths} for lengths in plan.prefills]
    say(f"{arm}: starting")
    rows = run_vllm(
        plan.shape, cells, is_drafting=is_drafting, acceptance=acceptance, max_model_len=plan.max_model_len,
        max_num_requests=max([*plan.batches, *map(len, plan.prefills)]), device=plan.device, pair=plan.pair,
        extra=plan.vllm_path, timeout_s=plan.vllm_timeout_s,
    )  # fmt: skip
    for index, cell in enumerate(cells):
        found = rows[index] if index < len(rows) else {"error": "time ran out before this cell"}
        _add_vllm(plan, arm, cell, found, acceptance)


def _add_vllm(plan: Plan, arm: str, cell: Row, found: Row, acceptance: float | None) -> None:
    """Record a row of vLLM's measurement. An error of vLLM becomes a failure row."""

    def add() -> None:
        if "error" in found:
            raise RuntimeError(found["error"])
        if cell["kind"] == "prefill":
            add_prefill(plan, arm, cell["lengths"], found["rounds"])
            return
        speed = OtherSpeed(
            arm=arm, batch=cell["batch"], context=cell["context"], num_tokens=cell["num_tokens"], ms=found["ms"],
            tokens_per_second=found["tokens_per_second"], asked=acceptance, achieved=found["acceptance_achieved"],
        )  # fmt: skip
        note = acceptance_note("dflash" in arm, acceptance)
        add_other(plan, speed, vllm=found["vllm"], start_s=found["start_s"], acceptance_note=note)

    what = {key: value for key, value in cell.items() if key in ("batch", "context")}
    plan.recorder.guard({"arm": arm, **what}, add)
