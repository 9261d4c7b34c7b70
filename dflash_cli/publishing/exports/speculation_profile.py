"""`speculation_profile.json`, which is published with a draft: acceptance by position, marginal and conditional.

Source: the fields of the open pull requests NVIDIA/Model-Optimizer#2313, #2247, #2315 and #2316. The fields may change
until the pull requests are merged, so the file is marked as a draft.
"""

import json
from typing import Any, ClassVar

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.generation.run_facts import EvaluationRun
from dflash_cli.publishing.exports.export_format import EXPORTS, Exported, ExportFormat, ExportPlan, method_of
from dflash_runtime.documents import to_json

DRAFT = "draft: after NVIDIA/Model-Optimizer#2313, #2247, #2315 and #2316, which are open; fields may change"
TOLERANCE = 0.02
"""Largest difference between the mean length and the length from marginal rates, as Model-Optimizer allows it."""


@EXPORTS.register("speculation-profile")
class SpeculationProfile(ExportFormat):
    """The profile of one result. It covers only the measured K: other blocks give other draft tokens."""

    title: ClassVar[str] = "speculation_profile.json of Model-Optimizer"
    options: ClassVar[frozenset[str]] = frozenset({"draft_name", "target_name"})

    def _export(self, request: ExportPlan) -> Exported:
        found = profile(request.evaluation)
        for key, name in (("draft_checkpoint", request.draft), ("target_model", request.model)):
            if name is not None and found[key] is not None:
                found[key] |= {"name": name}
        return Exported(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def profile(evaluation: Evaluation) -> dict[str, Any]:
    """Return the profile. Positions that no step reached have rate 0, as in Model-Optimizer."""
    total, measured = evaluation.total, to_json(evaluation.measured)
    counts = total.counts
    assert counts.acceptance_len is not None
    marginal = [round(rate, 6) for rate in counts.per_pos_acceptance_rates]
    length = round(counts.acceptance_len, 6)
    return {
        "schema_version": "1.0",
        "status": DRAFT,
        "measured": True,
        "method": method_of(evaluation),
        "draft_checkpoint": measured["draft"],
        "target_model": measured["target"],
        "num_speculative_tokens": counts.num_speculative_tokens,
        "block_size": _trained_block(evaluation),
        "max_supported_k": counts.num_speculative_tokens,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(rate or 0.0, 6) for rate in total.per_pos_conditional_rates],
        "marginal_accept_rates": marginal,
        "mean_accept_length": length,
        "mean_accept_length_per_request": _rounded(total.definitions["zlab_untruncated"]),
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(counts.num_speculative_tokens): length},
        "acceptance_length_histogram": {str(place): count for place, count in enumerate(total.histogram, start=1)},
        "per_category": {
            name: {"mean_accept_length": _rounded(item.counts.acceptance_len), "num_requests": item.num_requests}
            for name, item in evaluation.categories.items()
        }
        or None,
        "measurement_conditions": _conditions(evaluation),
        "validation": _validation(length, marginal),
    }


def _trained_block(evaluation: Evaluation) -> int | None:
    """Return the draft's trained block size. None if the run set its own K, or the block lacks the anchor's row."""
    has_anchor = method_of(evaluation) == "dflash"
    engine = evaluation.measured.engine if isinstance(evaluation.measured, EvaluationRun) else {}
    is_trained = "num_draft_tokens" in engine and engine["num_draft_tokens"] is None and has_anchor
    return evaluation.total.counts.num_speculative_tokens + 1 if is_trained else None


def _conditions(evaluation: Evaluation) -> dict[str, Any]:
    settings, measured, total = evaluation.settings, evaluation.measured, evaluation.total
    return {
        "dataset": evaluation.prompts.name,
        "num_samples": total.num_conversations,
        "prompts_digest": measured.prompts_digest,
        "osl": settings.get("max_new_tokens"),
        **{name: settings.get(name) for name in ("temperature", "top_p", "top_k", "chat", "dtype")},
        "mode": settings.get("mode", "live"),
        "engine": f"dflash-cli {measured.packages.get('dflash-cli', '')}".rstrip(),
        "device": measured.device_name,
        "date": measured.date,
        "mean_accept_length_interval": to_json(total.acceptance_len_interval),
    }


def _validation(length: float, marginal: list[float]) -> dict[str, Any]:
    implied = round(1 + sum(marginal), 6)
    delta = round(abs(implied - length), 6)
    violations = [
        {"position": place, "value": marginal[place], "previous": marginal[place - 1]}
        for place in range(1, len(marginal))
        if marginal[place] > marginal[place - 1]
    ]
    return {
        "mean_consistency": {
            "implied_mean_accept_length": implied,
            "reported_mean_accept_length": length,
            "abs_delta": delta,
            "tolerance": TOLERANCE,
            "passed": delta <= TOLERANCE,
        },
        "marginal_monotonicity": {"passed": not violations, "violations": violations},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
