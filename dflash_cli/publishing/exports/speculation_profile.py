"""`speculation_profile.json`, which travels with a draft: acceptance by position under both conventions.

Source: the open pull requests NVIDIA/Model-Optimizer#2313, #2247, #2315 and #2316, whose fields these are. They may
change until they are merged, and the file says so.
"""

import json
from typing import Any, ClassVar

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.generation.run_facts import EvaluationRun
from dflash_cli.publishing.exports.export_format import EXPORTS, Exported, ExportFormat, ExportPlan
from dflash_runtime.documents import to_json

DRAFT = "draft: after NVIDIA/Model-Optimizer#2313, #2247, #2315 and #2316, which are open; fields may change"
TOLERANCE = 0.02
"""What the producers there allow between the mean and that of the marginal rates."""


@EXPORTS.register("speculation-profile")
class SpeculationProfile(ExportFormat):
    """The profile of one result. Blocks of another K are another draft, so nothing is said of them."""

    title: ClassVar[str] = "speculation_profile.json of Model-Optimizer"

    def _export(self, request: ExportPlan) -> Exported:
        return Exported(json.dumps(profile(request.evaluation), indent=2, ensure_ascii=False) + "\n")


def profile(evaluation: Evaluation) -> dict[str, Any]:
    """The profile. A rate of a position that no step reached is 0, as its producers have it."""
    total, measured = evaluation.total, to_json(evaluation.measured)
    counts = total.counts
    assert counts.acceptance_len is not None
    marginal = [round(rate, 6) for rate in counts.per_pos_acceptance_rates]
    length = round(counts.acceptance_len, 6)
    return {
        "schema_version": "1.0",
        "status": DRAFT,
        "measured": True,
        "method": "dflash",
        "draft_checkpoint": measured["draft"],
        "target_model": measured["target"],
        "num_speculative_tokens": counts.num_speculative_tokens,
        "block_size": _trained_block(evaluation),
        "max_supported_k": (_trained_block(evaluation) or counts.num_speculative_tokens + 1) - 1,
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
    """The block that the draft was trained with, where the run took it from the draft."""
    engine = evaluation.measured.engine if isinstance(evaluation.measured, EvaluationRun) else {}
    is_trained = "num_draft_tokens" in engine and engine["num_draft_tokens"] is None
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
