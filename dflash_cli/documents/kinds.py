"""The kinds of JSON documents, and the JSON Schema of each.

A kind is one line of `KINDS` and one or several dataclasses with that `KIND`. Their modules are imported only for
their schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dflash_runtime.documents import schema_of


@dataclass(frozen=True, slots=True)
class Kind:
    """The title of a kind of documents, and its classes as `module:Class`. A document has one of these classes.

    A module without a package is one of `dflash_cli`.
    """

    title: str
    classes: tuple[str, ...]

    @property
    def loaded(self) -> tuple[type, ...]:
        """The classes, imported."""
        full = (item if item.startswith("dflash_runtime.") else f"dflash_cli.{item}" for item in self.classes)
        pairs = (name.split(":") for name in full)
        return tuple(getattr(import_module(module), name) for module, name in pairs)


def kind_names() -> list[str]:
    """The names of all kinds."""
    return [*KINDS]


def _printed(command: str, *classes: str) -> Kind:
    return Kind(f"What dflash {command} --json prints", classes)


KINDS: Mapping[str, Kind] = {
    "answers": Kind(
        "The first line of a file of eval-acceptance --output; every further line is an answer",
        ("acceptance.journal:JournalHead",),
    ),
    "bench": _printed("bench", "tuning.batch_speeds:BenchDocument"),
    "card": _printed("card", "publishing.model_card:CardDocument"),
    "compare": _printed("compare", "comparing.comparison_report:CompareDocument"),
    "conversion": Kind("conversion.json beside a converted draft", ("conversion.manifest:Manifest",)),
    "convert": _printed("convert", "conversion.manifest:Converted", "conversion.manifest:DryRun"),
    "diagnose": _printed("diagnose", "diagnosis.likeliest_cause:DiagnoseDocument"),
    "dump": Kind(
        "manifest.json of a dump; dflash dump --json prints it with the prompts that failed",
        ("acceptance.dumps.own_dump:DumpManifest",),
    ),
    "env": _printed("env", "terminal.environment:Environment"),
    "eval-acceptance": _printed("eval-acceptance", "acceptance.acceptance_report:Evaluation"),
    "explain": _printed("explain", "rules.rule_document:ExplainDocument", "rules.rule_document:RuleListDocument"),
    "export": _printed("export", "publishing.exports.export_format:ExportDocument"),
    "generate": _printed("generate", "generation.generate_document:GenerateDocument"),
    "handoff": Kind("handoff.json in the folder of a hand-off", ("dflash_runtime.kv_transfer.handoff:HandoffHeader",)),
    "inspect": _printed(
        "inspect",
        "checkpoints.description:InspectDocument",
        "checkpoints.comparison:DifferenceDocument",
        "dflash_runtime.device.capacity.memory_parts:MemoryParts",
    ),
    "lock": Kind("What dflash lock writes", ("checkpoints.lock:LockDocument",)),
    "probe": _printed("probe", "probing.probe_result:Probed"),
    "pull": _printed("pull", "publishing.pull_plan:PullResult"),
    "push": _printed("push", "publishing.push_plan:PushResult"),
    "report": _printed("report", "publishing.report_format:ReportDocument"),
    "serve-command": _printed("serve-command", "engines.pair_serving:ServeCommandDocument"),
    "tune": _printed("tune", "tuning.tuning_report:TuneDocument"),
    "validate": _printed("validate", "rules.report:ValidateDocument", "diagnosis.run_report:RunValidateDocument"),
    "validate-handoff": _printed("validate-handoff", "handoff.two_servers.transfer_report:TransferReport"),
}


def read_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind, with every definition that it refers to."""
    found = KINDS[kind]
    return schema_of(found.title, *found.loaded)
