"""A model-card section with a draft's measured acceptance: YAML metadata, and a block of Markdown.

The Hub reads the metadata: `model-index` as huggingface_hub writes it from `EvalResult`s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from huggingface_hub import EvalResult, ModelCardData

from dflash_cli.acceptance.acceptance_report import MEANING, Evaluation, command_line, headline, past_end
from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_cli.publishing.exports.export_format import name_of
from dflash_cli.publishing.markdown_report import as_block, as_code, as_text, markdown_table

TAGS = ("dflash", "speculative-decoding")
METRIC = "acceptance_length"
CONDITIONS = (
    "mode", "chat", "chat_template_kwargs", "max_new_tokens", "temperature", "top_p", "top_k", "dtype",
    "kv_dtype", "draft_sampling", "num_tree_nodes",
)  # fmt: skip
"""Settings that the card states beside the acceptance length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardDocument:
    """Result of `dflash card`."""

    KIND: ClassVar[str] = "card"

    output: Annotated[str | None, "the card that was written"]
    metadata: Annotated[Mapping[str, Any], "as the Hub reads it"]
    block: Annotated[str, "Markdown"]
    left: Annotated[tuple[str, ...], "metadata that the card already stated"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The metadata of a card, and its block of Markdown."""

    metadata: Mapping[str, Any]
    block: str


def make_card(
    stored: StoredEvaluation,
    serve_commands: Mapping[str, str],
    *,
    name: str | None = None,
    base_model: str | None = None,
) -> ModelCard:
    """Return the card of one result, with the serve command of each engine.

    `name` and `base_model` are the names of draft and target on the Hub, by default as measured. A target that was
    measured from a directory is left out of the metadata.
    """
    evaluation, published = stored.evaluation, name
    name = name or name_of(evaluation, "draft") or "draft"
    target = base_model or name_of(evaluation, "target") or "its target"
    data = ModelCardData(
        base_model=base_model or _hub_name(evaluation),
        pipeline_tag="text-generation",
        tags=list(TAGS),
        model_name=name.rpartition("/")[2],
        eval_results=_results(evaluation),
    )
    metadata = {key: value for key, value in data.to_dict().items() if value is not None}
    again = command_line(evaluation, draft=published, target=base_model)
    return ModelCard(metadata, "\n".join(_block(evaluation, name, target, serve_commands, again)))


def _hub_name(evaluation: Evaluation) -> str | None:
    """Return the target's name on the Hub, or None if it was measured from a directory."""
    target = name_of(evaluation, "target")
    return target if target is not None and target.count("/") == 1 else None


def _results(evaluation: Evaluation) -> list[EvalResult]:
    """Return the acceptance length over all prompts, and by category."""
    groups: list[tuple[str | None, Summary]] = [(None, evaluation.total), *_published(evaluation).items()]
    source = evaluation.prompts.name.rpartition("/")[2]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="prompts",
            dataset_name=source if category is None else f"{source}, {category}",
            dataset_config=category,
            metric_type=METRIC,
            metric_name=f"tokens per verify step, at most {summary.counts.num_speculative_tokens + 1}",
            metric_value=round(summary.counts.acceptance_len, 3),
            metric_args=_metric_args(summary),
            verified=False,
        )
        for category, summary in groups
        if summary.counts.acceptance_len is not None
    ]


def _metric_args(summary: Summary) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_speculative_tokens": summary.counts.num_speculative_tokens,
        "num_prompts": summary.num_conversations,
    }
    interval = summary.acceptance_len_interval
    if interval is not None:
        found |= {"interval": [round(interval.low, 3), round(interval.high, 3)], "confidence": interval.confidence}
    return found


def _block(evaluation: Evaluation, name: str, target: str, serve_commands: Mapping[str, str], again: str) -> list[str]:
    total, source = evaluation.total, evaluation.prompts
    lines = [
        "## Acceptance",
        "",
        f"**{as_text(headline(evaluation))}**",
        "",
        *(f"{as_text(line[:1].upper() + line[1:])}." for line in (MEANING, *past_end(evaluation.total))),
        f"{as_text(name)} drafts {total.counts.num_speculative_tokens} tokens per step for {as_text(target)}. "
        + _interval_line(total),
        "",
    ]
    if source.warning is not None:
        lines += [f"Note: {as_text(source.warning)}.", ""]
    lines += [*markdown_table(("category", "prompts", "steps", "acceptance length"), _rows(evaluation)), ""]
    withheld = sorted(evaluation.categories.keys() - _published(evaluation).keys())
    if withheld:
        names = as_text(", ".join(withheld))
        lines += [f"Categories with fewer than {MIN_FOR_INTERVAL} distinct prompts are left out: {names}.", ""]
    lines += ["Share of the steps that accept each position: " + _shares(total), ""]
    lines += ["Measured with " + "; ".join(_conditions(evaluation)) + ".", ""]
    for engine, command in serve_commands.items():
        lines += [f"Serve it with {engine}:", "", *as_block(command), ""]
    return [*lines, "Measure it again:", "", *as_block(again), ""]


def _interval_line(total: Summary) -> str:
    if total.acceptance_len_interval is None:
        return f"The interval is missing: {total.acceptance_len_no_interval}."
    return f"Brackets hold the {100 * total.acceptance_len_interval.confidence:g}% interval over prompts."


def _published(evaluation: Evaluation) -> dict[str, Summary]:
    """Return the categories with enough prompts to say something about other prompts."""
    return {name: item for name, item in evaluation.categories.items() if item.num_units >= MIN_FOR_INTERVAL}


def _rows(evaluation: Evaluation) -> Sequence[Sequence[str]]:
    groups = [*_published(evaluation).items(), ("all", evaluation.total)]
    return [
        (category, str(summary.num_conversations), str(summary.counts.num_drafts), summary.length_text)
        for category, summary in groups
    ]


def _shares(total: Summary) -> str:
    counts = total.counts
    pairs = zip(counts.per_pos_acceptance_rates, counts.per_pos_verified, strict=True)
    return ", ".join(f"{rate:.3f}" for rate, verified in pairs if verified)


def _conditions(evaluation: Evaluation) -> list[str]:
    settings, measured = evaluation.settings, evaluation.measured
    prompts = as_code(evaluation.prompts.name.rpartition("/")[2])
    found = [f"prompts {prompts} (digest {measured.prompts_digest})"]
    found += [f"{key} {as_text(str(settings[key]))}" for key in CONDITIONS if settings.get(key) is not None]
    found += [
        f"{role} digest {settings[f'{role}_digest']}" for role in ("draft", "target") if f"{role}_digest" in settings
    ]
    release, device = measured.packages.get("dflash-cli"), as_text(measured.device_name)
    return [*found, f"dflash-cli {release} on {device}, {measured.date}"]
