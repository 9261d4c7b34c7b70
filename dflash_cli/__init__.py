"""Convert, validate, run and measure DFlash drafts. The names below are imported when they are first used.

from dflash_cli import evaluate

print(evaluate(draft="tiny", num_prompts=8))
"""

from typing import TYPE_CHECKING, Any

from dflash_cli.version import __version__

if TYPE_CHECKING:
    from dflash_cli.api import open_draft, open_target
    from dflash_cli.commands.bench import BenchRequest, bench
    from dflash_cli.commands.card import CardRequest, card
    from dflash_cli.commands.compare import ComparisonRequest, compare
    from dflash_cli.commands.convert import ConversionRequest, convert
    from dflash_cli.commands.diagnose import DiagnosisRequest, diagnose
    from dflash_cli.commands.dump import DumpRequest, dump
    from dflash_cli.commands.env import EnvironmentRequest, env
    from dflash_cli.commands.eval_acceptance import EvaluationRequest, evaluate
    from dflash_cli.commands.explain import ExplanationRequest, explain
    from dflash_cli.commands.export import ExportRequest, export
    from dflash_cli.commands.generate import GenerationRequest, generate
    from dflash_cli.commands.inspect import InspectionRequest, inspect
    from dflash_cli.commands.lock import LockRequest, lock
    from dflash_cli.commands.probe import ProbeRequest, probe
    from dflash_cli.commands.report import ReportRequest, report
    from dflash_cli.commands.serve_command import ServeCommandRequest, serve_command
    from dflash_cli.commands.tune import TuningRequest, tune
    from dflash_cli.commands.validate import ValidationRequest, validate
    from dflash_cli.commands.validate_handoff import HandoffValidationRequest, validate_handoff
    from dflash_runtime.device.loading import load_pair
    from dflash_runtime.llm import LLM
    from dflash_runtime.scheduling.request import SamplingParams

_VERBS = {
    "bench": ("bench", "BenchRequest"),
    "card": ("card", "CardRequest"),
    "compare": ("compare", "ComparisonRequest"),
    "convert": ("convert", "ConversionRequest"),
    "diagnose": ("diagnose", "DiagnosisRequest"),
    "dump": ("dump", "DumpRequest"),
    "env": ("env", "EnvironmentRequest"),
    "eval_acceptance": ("evaluate", "EvaluationRequest"),
    "explain": ("explain", "ExplanationRequest"),
    "export": ("export", "ExportRequest"),
    "generate": ("generate", "GenerationRequest"),
    "inspect": ("inspect", "InspectionRequest"),
    "lock": ("lock", "LockRequest"),
    "probe": ("probe", "ProbeRequest"),
    "report": ("report", "ReportRequest"),
    "serve_command": ("serve_command", "ServeCommandRequest"),
    "tune": ("tune", "TuningRequest"),
    "validate": ("validate", "ValidationRequest"),
    "validate_handoff": ("validate_handoff", "HandoffValidationRequest"),
}
"""Module of `commands/` -> its verb and its request class."""

_HOMES = {
    "LLM": "dflash_runtime.llm",
    "SamplingParams": "dflash_runtime.scheduling.request",
    "load_pair": "dflash_runtime.device.loading",
    "open_draft": "dflash_cli.api",
    "open_target": "dflash_cli.api",
    **{name: f"dflash_cli.commands.{module}" for module, names in _VERBS.items() for name in names},
}

__all__ = [
    "LLM",
    "BenchRequest",
    "CardRequest",
    "ComparisonRequest",
    "ConversionRequest",
    "DiagnosisRequest",
    "DumpRequest",
    "EnvironmentRequest",
    "EvaluationRequest",
    "ExplanationRequest",
    "ExportRequest",
    "GenerationRequest",
    "HandoffValidationRequest",
    "InspectionRequest",
    "LockRequest",
    "ProbeRequest",
    "ReportRequest",
    "SamplingParams",
    "ServeCommandRequest",
    "TuningRequest",
    "ValidationRequest",
    "__version__",
    "bench",
    "card",
    "compare",
    "convert",
    "diagnose",
    "dump",
    "env",
    "evaluate",
    "explain",
    "export",
    "generate",
    "inspect",
    "load_pair",
    "lock",
    "open_draft",
    "open_target",
    "probe",
    "report",
    "serve_command",
    "tune",
    "validate",
    "validate_handoff",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
