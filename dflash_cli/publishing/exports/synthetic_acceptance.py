"""Settings by which an engine accepts as measured, with any weights: for capacity planning and load tests.

Lengths include the target's own token, except for TensorRT-LLM, which counts accepted draft tokens only.
"""

import json
import shlex
from typing import Any, ClassVar

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.publishing.exports.export_format import EXPORTS, Exported, ExportFormat, ExportPlan, method_of, name_of

DIGITS = 4


@EXPORTS.register("vllm-rates")
class VllmRates(ExportFormat):
    """vLLM's `--speculative-config` with the share of steps that accepted each position and all before it.

    Source: `synthetic_acceptance_rates` of vLLM 0.33 config/speculative.py.
    """

    title: ClassVar[str] = "vLLM, by position"

    def _export(self, request: ExportPlan) -> Exported:
        rates = [round(rate, DIGITS) for rate in request.evaluation.total.counts.per_pos_acceptance_rates]
        return Exported(_speculative_config(request, {"synthetic_acceptance_rates": rates}))


@EXPORTS.register("vllm-length")
class VllmLength(ExportFormat):
    """vLLM's `--speculative-config` with the acceptance length. The lengths of steps then vary as little as possible.

    Source: `synthetic_acceptance_length` of vLLM 0.33 config/speculative.py.
    """

    title: ClassVar[str] = "vLLM, by length"

    def _export(self, request: ExportPlan) -> Exported:
        length = acceptance_len(request.evaluation)
        return Exported(_speculative_config(request, {"synthetic_acceptance_length": length}))


@EXPORTS.register("sglang-length")
class SglangLength(ExportFormat):
    """SGLang's environment variables. Source: speculative/dflash_utils.py of SGLang 0.5.23."""

    title: ClassVar[str] = "SGLang"

    def _export(self, request: ExportPlan) -> Exported:
        length = acceptance_len(request.evaluation)
        return Exported(
            f"SGLANG_SIMULATE_ACC_LEN={length}\n"
            "SGLANG_SIMULATE_ACC_METHOD=match-expected\n"
            "SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token\n"
        )


@EXPORTS.register("tensorrt-llm-length")
class TensorrtLength(ExportFormat):
    """TensorRT-LLM's environment variable. Source: NVIDIA/TensorRT-LLM#9371 and #13569."""

    title: ClassVar[str] = "TensorRT-LLM"

    def _export(self, request: ExportPlan) -> Exported:
        num_accepted = round(acceptance_len(request.evaluation) - 1, DIGITS)
        return Exported(f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={num_accepted}\n")


def acceptance_len(evaluation: Evaluation) -> float:
    """Return the tokens per step, the target's own token included."""
    length = evaluation.total.counts.acceptance_len
    assert length is not None
    return round(length, DIGITS)


def _speculative_config(request: ExportPlan, acceptance: dict[str, Any]) -> str:
    config = {
        "method": method_of(request.evaluation),
        "model": name_of(request.evaluation, "draft"),
        "num_speculative_tokens": request.evaluation.total.counts.num_speculative_tokens,
        "rejection_sample_method": "synthetic",
        **acceptance,
    }
    return f"--speculative-config {shlex.quote(json.dumps(config))}\n"
