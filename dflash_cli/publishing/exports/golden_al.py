"""Golden acceptance lengths: `{model: {thinking_on or thinking_off: {K: length}}}`, one file per model and draft.

Source: golden_al_distribution/README.md of SemiAnalysisAI/InferenceX. Its lengths are 1 + accepted / steps over the
`coding` prompts of SPEED-Bench, with answers of 4096 tokens and the model's own sampling. A result measured under other
conditions is exported with a warning.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.comparing.measured_result import ResultFile
from dflash_cli.documents.yaml_text import read_yaml, to_yaml
from dflash_cli.publishing.exports.export_format import (
    EXPORTS,
    Exported,
    ExportFormat,
    ExportPlan,
    Thinking,
    name_of,
    template_options,
)
from dflash_runtime.errors import MISSING, LossyConversion, UsageError
from dflash_runtime.json_values import is_int, is_number
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

CATEGORY, ANSWER_LEN = "coding", 4096
METADATA = "_metadata"
FORM = "{thinking_on or thinking_off: {K: length}}"
SWITCHES: Mapping[Any, Thinking] = {
    True: "on", "on": "on", "enabled": "on", False: "off", "off": "off", "disabled": "off",
}  # fmt: skip
"""Values of --thinking and of chat templates that switch thinking on or off."""


@EXPORTS.register("golden-al")
class GoldenLength(ExportFormat):
    """The length of one result, added to an existing file."""

    title: ClassVar[str] = "golden acceptance lengths of InferenceX"
    options: ClassVar[frozenset[str]] = frozenset({"target_name", "thinking"})
    merges: ClassVar[bool] = True

    def _export(self, request: ExportPlan) -> Exported:
        evaluation = request.evaluation
        summary = _chosen(request)
        length = summary.counts.acceptance_len
        if length is None:
            raise UsageError(
                f"category {CATEGORY} lacks verify steps",
                id="no-steps",
                path=request.stored.path,
                field=f"categories.{CATEGORY}",
            )
        head, content = _existing(request)
        _add(request, content, round(length, 2))
        if head is None:
            head = "".join(f"# {line}\n" for line in _conditions(evaluation, summary))
        return Exported(head + to_yaml(content), _warnings(evaluation))


def _chosen(request: ExportPlan) -> Summary:
    """Return the condition with the requested thinking, or else the coding category, or else the total."""
    evaluation = request.evaluation
    switched = {item.condition.thinking: item.summary for item in evaluation.conditions}
    return switched.get(_thinking(request)) or evaluation.categories.get(CATEGORY, evaluation.total)


def _existing(request: ExportPlan) -> tuple[str | None, dict[str, Any]]:
    """Return the comments at the head of the existing file, which are kept, and its content; None for a new file.

    Raises:
        LossyConversion: the file has comments elsewhere, which would be lost.
        UsageError: the file has another form.
    """
    path = request.output
    if path is None or not path.is_file():
        return None, {}
    text = ResultFile(path).text
    lines = text.splitlines(keepends=True)
    num_comments = next((place for place, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if any("#" in line for line in lines[num_comments:]):
        raise LossyConversion(
            "the file has comments between its lengths, which would be lost",
            id="comments-lost",
            path=path,
            hint="move the comments to the head of the file",
        )
    content = read_yaml(text, "golden lengths", path)
    for field, found in _misfits(content):
        raise UsageError(id="not-golden-lengths", path=path, field=field, found=found, expected=FORM)
    return "".join(lines[:num_comments]), content


def _misfits(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each entry of a file that differs from `FORM`, with its keys. Metadata may be any mapping."""
    for model, modes in content.items():
        if not isinstance(modes, dict):
            yield str(model), modes
        elif model != METADATA:
            for mode, curve in modes.items():
                is_curve = isinstance(curve, dict) and all(is_int(key) for key in curve)
                lengths = curve.values() if is_curve else ()
                if not is_curve or not all(is_number(length) for length in lengths):
                    yield f"{model}.{mode}", curve


def _add(request: ExportPlan, content: dict[str, Any], length: float) -> None:
    """Enter a length under its model, mode and K.

    Raises:
        UsageError: the file has lengths of another draft, or without `force` another length there.
    """
    evaluation, model = request.evaluation, _model(request)
    draft = name_of(evaluation, "draft")
    metadata = content.setdefault(METADATA, {"draft-model": draft})
    if metadata.get("draft-model", draft) != draft:
        raise UsageError(
            f"the file has lengths of draft {metadata['draft-model']}, but the result is of {draft}",
            id="other-draft",
            path=request.output,
            field="draft-model",
            found=metadata["draft-model"],
            expected=draft,
            hint="name another file with --output",
        )
    mode = f"thinking_{_thinking(request)}"
    num_drafted = evaluation.total.counts.num_speculative_tokens
    curve = content.setdefault(model, {}).setdefault(mode, {})
    if curve.get(num_drafted, length) != length and not request.force:
        raise UsageError(
            f"{model}, {mode}, K = {num_drafted}: the file has {curve[num_drafted]}, but the result has {length}",
            id="other-length",
            path=request.output,
            field=f"{model}.{mode}.{num_drafted}",
            found=curve[num_drafted],
            expected=f"{length}",
            hint="pass --force to replace it",
        )
    curve[num_drafted] = length
    content[model][mode] = dict(sorted(curve.items()))


def _model(request: ExportPlan) -> str:
    return request.model or str(name_of(request.evaluation, "target")).rpartition("/")[2].lower()


def _thinking(request: ExportPlan) -> Thinking:
    """Return whether the model was thinking: by the request, or else by the run's --thinking or template options.

    Raises:
        UsageError: none of them states it, or the run measured both.
    """
    options = template_options(request.evaluation)
    words: Any = request.evaluation.settings.get("thinking") or ()
    names = [name for name in ("enable_thinking", "thinking", "thinking_mode") if name in options]
    stated = words[0] if len(words) == 1 else words or (options[names[0]] if names else None)
    found = request.thinking or next((word for switch, word in SWITCHES.items() if switch == stated), None)
    if found is None:
        raise UsageError(
            "the result does not state whether the model was thinking",
            id="thinking-unknown",
            path=request.stored.path,
            field="--thinking",
            found=MISSING,
            hint="pass --thinking on or --thinking off",
        )
    return found


def _conditions(evaluation: Evaluation, summary: Summary) -> list[str]:
    settings, interval = evaluation.settings, summary.acceptance_len_interval
    sampling = " | ".join(f"{name}: {settings.get(name)}" for name in ("temperature", "top_p", "top_k"))
    lines = [
        "Acceptance lengths: key = num_speculative_tokens, value = 1 + accepted / steps.",
        f"dataset: {evaluation.prompts.name} | {sampling} | output_len: {settings.get('max_new_tokens')}",
        f"measured with dflash-cli on {plural(summary.num_conversations, 'prompt')}, {evaluation.measured.date}",
    ]
    if interval is not None:
        lines.append(f"first entry: {100 * interval.confidence:g}% interval [{interval.low:.2f}, {interval.high:.2f}]")
    return lines


def _warnings(evaluation: Evaluation) -> tuple[str, ...]:
    unlike = []
    if evaluation.conditions:
        unlike.append(f"all prompts of {evaluation.prompts.name}, under one of several conditions")
    elif CATEGORY not in evaluation.categories:
        unlike.append(f"prompts {evaluation.prompts.name} without a category {CATEGORY}")
    if evaluation.settings.get("max_new_tokens") != ANSWER_LEN:
        unlike.append(f"answers of {evaluation.settings.get('max_new_tokens')} tokens")
    if not unlike:
        return ()
    expected = f"SPEED-Bench {CATEGORY} with answers of {ANSWER_LEN} tokens"
    return (Notice(f"measured on {', '.join(unlike)}; golden lengths are measured on {expected}", id="not-golden"),)
