"""Convert, validate, run and measure DFlash drafts. A name is imported when it is first used.

from dflash_cli import evaluate

print(evaluate(draft="tiny", num_prompts=8))
"""

from typing import TYPE_CHECKING, Any

from dflash_cli.version import __version__

if TYPE_CHECKING:
    from dflash_cli.api import open_draft as open_draft
    from dflash_cli.api import open_target as open_target
    from dflash_cli.commands.bench import BenchRequest as BenchRequest
    from dflash_cli.commands.bench import bench as bench
    from dflash_cli.commands.card import CardRequest as CardRequest
    from dflash_cli.commands.card import card as card
    from dflash_cli.commands.compare import ComparisonRequest as ComparisonRequest
    from dflash_cli.commands.compare import compare as compare
    from dflash_cli.commands.convert import ConversionRequest as ConversionRequest
    from dflash_cli.commands.convert import convert as convert
    from dflash_cli.commands.diagnose import DiagnosisRequest as DiagnosisRequest
    from dflash_cli.commands.diagnose import diagnose as diagnose
    from dflash_cli.commands.dump import DumpRequest as DumpRequest
    from dflash_cli.commands.dump import dump as dump
    from dflash_cli.commands.env import EnvironmentRequest as EnvironmentRequest
    from dflash_cli.commands.env import env as env
    from dflash_cli.commands.eval_acceptance import EvaluationRequest as EvaluationRequest
    from dflash_cli.commands.eval_acceptance import evaluate as evaluate
    from dflash_cli.commands.explain import ExplanationRequest as ExplanationRequest
    from dflash_cli.commands.explain import explain as explain
    from dflash_cli.commands.export import ExportRequest as ExportRequest
    from dflash_cli.commands.export import export as export
    from dflash_cli.commands.generate import GenerationRequest as GenerationRequest
    from dflash_cli.commands.generate import generate as generate
    from dflash_cli.commands.inspect import InspectionRequest as InspectionRequest
    from dflash_cli.commands.inspect import inspect as inspect
    from dflash_cli.commands.lock import LockRequest as LockRequest
    from dflash_cli.commands.lock import lock as lock
    from dflash_cli.commands.probe import ProbeRequest as ProbeRequest
    from dflash_cli.commands.probe import probe as probe
    from dflash_cli.commands.pull import PullRequest as PullRequest
    from dflash_cli.commands.pull import pull as pull
    from dflash_cli.commands.push import PushRequest as PushRequest
    from dflash_cli.commands.push import push as push
    from dflash_cli.commands.report import ReportRequest as ReportRequest
    from dflash_cli.commands.report import report as report
    from dflash_cli.commands.serve_command import ServeCommandRequest as ServeCommandRequest
    from dflash_cli.commands.serve_command import serve_command as serve_command
    from dflash_cli.commands.tune import TuningRequest as TuningRequest
    from dflash_cli.commands.tune import tune as tune
    from dflash_cli.commands.validate import ValidationRequest as ValidationRequest
    from dflash_cli.commands.validate import validate as validate
    from dflash_cli.commands.validate_handoff import HandoffValidationRequest as HandoffValidationRequest
    from dflash_cli.commands.validate_handoff import validate_handoff as validate_handoff
    from dflash_runtime.device.setup.loading import load_pair as load_pair
    from dflash_runtime.llm import LLM as LLM
    from dflash_runtime.scheduling.sampling_params import SamplingParams as SamplingParams

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
    "pull": ("pull", "PullRequest"),
    "push": ("push", "PushRequest"),
    "report": ("report", "ReportRequest"),
    "serve_command": ("serve_command", "ServeCommandRequest"),
    "tune": ("tune", "TuningRequest"),
    "validate": ("validate", "ValidationRequest"),
    "validate_handoff": ("validate_handoff", "HandoffValidationRequest"),
}
"""Module of `commands/` -> its verb and its request class."""

_HOMES = {
    "LLM": "dflash_runtime.llm",
    "SamplingParams": "dflash_runtime.scheduling.sampling_params",
    "load_pair": "dflash_runtime.device.setup.loading",
    "open_draft": "dflash_cli.api",
    "open_target": "dflash_cli.api",
    **{name: f"dflash_cli.commands.{module}" for module, names in _VERBS.items() for name in names},
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} does not have {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
