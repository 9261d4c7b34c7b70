"""The model card, written from the report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .data import Prompt
from .evaluate import Figures


def model_card(figures: Figures, prompts: Sequence[Prompt]) -> str:
    """README.md of the bundle."""
    return "# stub\n\n```json\n" + json.dumps(figures["evaluation"], indent=1) + "\n```\n"
