"""The acceptance length that a file states: a result of any known format, a model card, or a speculation profile."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_cli.comparing.measured_result import ResultFile, read_result
from dflash_cli.documents.yaml_text import read_yaml, split_card
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
    head, _, _ = split_card(ResultFile(path).text, path)
    metadata = read_yaml(head, "metadata of the card", path)
    results = [item for model in _objects(metadata.get("model-index")) for item in _objects(model.get("results"))]
    metrics = [metric for result in results for metric in _objects(result.get("metrics"))]
    found = next((metric.get("value") for metric in metrics if metric.get("type") == METRIC), None)
    if not is_number(found):
        raise UsageError(
            f"no {METRIC} in the metadata",
            id="no-stated-figure",
            path=path,
            expected=f"a model-index with a metric of type {METRIC}",
            hint="give the number itself: --expected 4.2",
        )
    return float(found)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; none if the value is not a list."""
    return [as_object(item) for item in value] if isinstance(value, list) else []
