"""A golden acceptance length: `{model: {thinking_on or thinking_off: {K: length}}}`, one file a model and draft.

Source: golden_al_distribution/README.md of SemiAnalysisAI/InferenceX. There a length is 1 + accepted / steps over the
`coding` prompts of SPEED-Bench with answers of 4096 tokens and the model's own sampling; a result of other conditions
has the same form and says so.
"""

from typing import Any, ClassVar

import yaml

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.publishing.exports.export_format import (
    EXPORTS,
    Exported,
    ExportFormat,
    ExportPlan,
    Thinking,
    name_of,
    template_options,
)
from dflash_runtime.errors import LossyConversion, UsageError

CATEGORY, ANSWER_LEN = "coding", 4096
METADATA = "_metadata"
SWITCHES = {True: "on", "enabled": "on", False: "off", "disabled": "off"}
"""What templates call thinking and not thinking."""


@EXPORTS.register("golden-al")
class GoldenLength(ExportFormat):
    """A result's cell of that table, added to the file that is there."""

    title: ClassVar[str] = "golden acceptance lengths of InferenceX"
    merges: ClassVar[bool] = True

    def _export(self, request: ExportPlan) -> Exported:
        evaluation = request.evaluation
        summary = _chosen(request)
        length = summary.counts.acceptance_len
        if length is None:
            raise UsageError(f"{request.stored.name}: category {CATEGORY} has no steps")
        head, content = _existing(request)
        _add(request, content, round(length, 2))
        if request.existing is None:
            head = "".join(f"# {line}\n" for line in _conditions(evaluation, summary))
        return Exported(head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), _warnings(evaluation))


def _chosen(request: ExportPlan) -> Summary:
    """Of several conditions the one that thinks as is asked for; else the category that a golden length is of."""
    evaluation = request.evaluation
    switched = {item.condition.thinking: item.summary for item in evaluation.conditions}
    return switched.get(_thinking(request)) or evaluation.categories.get(CATEGORY, evaluation.total)


def _existing(request: ExportPlan) -> tuple[str, dict[str, Any]]:
    """The comments at the head of the file, which are kept as they are, and what it holds.

    Raises:
        LossyConversion: it has comments elsewhere, which would be lost.
        UsageError: it is no such file.
    """
    text = request.existing or ""
    lines = text.splitlines(keepends=True)
    num_comments = next((place for place, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if any("#" in line for line in lines[num_comments:]):
        raise LossyConversion(
            "the file has comments among its figures, which would be lost", hint="move them to its head"
        )
    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"the file is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or not all(isinstance(item, dict) for item in content.values()):
        raise UsageError("the file holds something else, expected {model: {thinking_on or thinking_off: {K: length}}}")
    return "".join(lines[:num_comments]), content


def _add(request: ExportPlan, content: dict[str, Any], length: float) -> None:
    """Enter a length under its model, mode and K.

    Raises:
        UsageError: another one stands there, or the file is of another draft.
    """
    evaluation, model = request.evaluation, _model(request)
    draft = name_of(evaluation, "draft")
    metadata = content.setdefault(METADATA, {"draft-model": draft})
    if metadata.get("draft-model", draft) != draft and not request.force:
        raise UsageError(f"the file is of draft {metadata['draft-model']}, and the result of {draft}")
    mode = f"thinking_{_thinking(request)}"
    num_drafted = evaluation.total.counts.num_speculative_tokens
    curve = content.setdefault(model, {}).setdefault(mode, {})
    if curve.get(num_drafted, length) != length and not request.force:
        raise UsageError(
            f"{model}, {mode}, K = {num_drafted}: the file has {curve[num_drafted]}, and the result {length}",
            hint="pass --force to replace it",
        )
    curve[num_drafted] = length
    content[model][mode] = dict(sorted(curve.items()))


def _model(request: ExportPlan) -> str:
    return request.model or str(name_of(request.evaluation, "target")).rpartition("/")[2].lower()


def _thinking(request: ExportPlan) -> Thinking:
    """Whether the model was thinking: as asked, or as its template was told.

    Raises:
        UsageError: neither says it.
    """
    options = template_options(request.evaluation)
    told = next((options[name] for name in ("enable_thinking", "thinking", "thinking_mode") if name in options), None)
    told = request.evaluation.settings.get("thinking", told)
    found = request.thinking or (told if told in ("on", "off") else SWITCHES.get(told))
    if found not in ("on", "off"):
        raise UsageError(f"{request.stored.name}: does not say whether the model was thinking", hint="pass --thinking")
    return "on" if found == "on" else "off"


def _conditions(evaluation: Evaluation, summary: Summary) -> list[str]:
    settings, interval = evaluation.settings, summary.acceptance_len_interval
    sampling = " | ".join(f"{name}: {settings.get(name)}" for name in ("temperature", "top_p", "top_k"))
    lines = [
        "Acceptance lengths: key = num_speculative_tokens, value = 1 + accepted / steps.",
        f"dataset: {evaluation.prompts.name} | {sampling} | output_len: {settings.get('max_new_tokens')}",
        f"measured with dflash-cli on {summary.num_conversations} prompts, {evaluation.measured.date}",
    ]
    if interval is not None:
        lines.append(f"first entry: {100 * interval.confidence:g}% interval [{interval.low:.2f}, {interval.high:.2f}]")
    return lines


def _warnings(evaluation: Evaluation) -> tuple[str, ...]:
    unlike = []
    if evaluation.conditions:
        unlike.append(f"all prompts of {evaluation.prompts.name} under one condition of several")
    elif CATEGORY not in evaluation.categories:
        unlike.append(f"prompts {evaluation.prompts.name} without a category {CATEGORY}")
    if evaluation.settings.get("max_new_tokens") != ANSWER_LEN:
        unlike.append(f"answers of {evaluation.settings.get('max_new_tokens')} tokens")
    if not unlike:
        return ()
    expected = f"SPEED-Bench {CATEGORY} with answers of {ANSWER_LEN} tokens"
    return (f"measured on {', '.join(unlike)}; a golden length is of {expected}",)
