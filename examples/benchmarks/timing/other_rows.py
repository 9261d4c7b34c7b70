"""Rows of other software: transformers, a reference loop on its modules, and vLLM."""

from functools import partial

from timing.plan import OtherSpeed, Plan, add_other, add_prefill
from timing.report import Row, say
from timing.vllm_arm import VllmRun, run_vllm

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


def measure_vllm(plan: Plan, run: VllmRun) -> None:
    """Measure all cells in one engine of vLLM."""
    tokens = round(plan.steps * (run.acceptance or 1.0))
    cells: list[Row] = [
        {"kind": "step", "batch": batch, "context": context, "num_tokens": tokens}
        for context in plan.contexts
        for batch in plan.batches
    ]
    if not run.is_drafting:
        cells += [{"kind": "prefill", "lengths": lengths} for lengths in plan.prefills]
    say(f"{run.arm}: starting")
    assert plan.files is not None
    rows = run_vllm(
        plan.shape, cells, run, plan.vllm, files=plan.files, max_model_len=plan.max_model_len,
        max_num_requests=max([*plan.batches, *map(len, plan.prefills)]),
    )  # fmt: skip
    for index, cell in enumerate(cells):
        found = rows[index] if index < len(rows) else {"error": "time ran out before this cell"}
        _add_vllm(plan, run, cell, found)


def _add_vllm(plan: Plan, run: VllmRun, cell: Row, found: Row) -> None:
    """Record a row of vLLM's measurement. An error of vLLM becomes a failure row."""
    arm = run.arm.replace("-", " ")

    def add() -> None:
        if "error" in found:
            raise RuntimeError(found["error"])
        if cell["kind"] == "prefill":
            add_prefill(plan, arm, cell["lengths"], found["rounds"], found["spans"])
            return
        speed = OtherSpeed(
            arm=arm, batch=cell["batch"], context=cell["context"], num_tokens=cell["num_tokens"], ms=found["ms"],
            tokens_per_second=found["tokens_per_second"], asked=run.acceptance, achieved=found["acceptance_achieved"],
            spans=found["spans"],
        )  # fmt: skip
        facts = {"vllm": found["vllm"], "start_s": found["start_s"], "acceptance_note": run.acceptance_note}
        add_other(plan, speed, **plan.weights, **facts)

    what = {key: value for key, value in cell.items() if key in ("batch", "context")}
    plan.recorder.guard({"arm": arm, **what}, add)
