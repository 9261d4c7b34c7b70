"""The acceptance length that a file states: a result of any known format, a model card, or a speculation profile."""

from pathlib import Path
from typing import Any

from dflash_cli.comparing.measured_result import ResultFile, read_result
from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import as_object, is_number

METRIC = "acceptance_length"
PROFILE = "mean_accept_length"


def read_stated_figure(path: Path) -> float:
    """The acceptance length of a file, in tokens per step.

    Raises:
        CheckpointNotFound: the file does not exist.
        UsageError: the file states no figure.
    """
    if path.suffix.lower() == ".md":
        return _of_card(path)
    stated = as_object(ResultFile(path).document).get(PROFILE)
    return float(stated) if is_number(stated) else read_result(path).acceptance_len


def _of_card(path: Path) -> float:
    """The first acceptance length of the card's metadata, which is over all prompts."""
    from huggingface_hub import ModelCard

    try:
        card = ModelCard(ResultFile(path).text, ignore_metadata_errors=True)
        results = getattr(card.data, "eval_results", None) or []
    except ValueError:
        results = []
    found: list[Any] = [item.metric_value for item in results if item.metric_type == METRIC]
    if not found or not is_number(found[0]):
        raise UsageError(
            f"no {METRIC} in the metadata",
            id="no-stated-figure",
            path=path,
            expected=f"a model-index with a metric of type {METRIC}",
            hint="give the number itself: --expected 4.2",
        )
    return float(found[0])
