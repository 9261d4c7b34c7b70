"""Measure the further drafts of a bundle beside its DFlash draft, on the same text, and write them into the report.

Each draft is compared with the bundled one prompt by prompt, and with a DFlash draft that was trained as long as the
further drafts (the control). Without the control, the gain of a kind would contain the gain of longer training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from . import bundle
from .card import model_card
from .data import Prompt
from .draft import Draft, Head
from .evaluate import Figures, Judge, Passage, Step, Tally, summary, totals, write_passages
from .further import KINDS, Bundle
from .settings import Settings

FURTHER = {"dflash2": "draft-dflash2", "dspark": "draft-dspark"}
NUM_DRAWS = 10_000


def read_prompts(found: Bundle) -> list[Prompt]:
    """The bundled prompts with their token ids."""
    lines = (found.folder / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        Prompt(
            row["id"], row["category"], row["source"], row["prompt"], tuple(found.tokenizer.encode(row["prompt"]).ids)
        )
        for row in rows
    ]


def read_draft(kind: str, folder: Path, settings: Settings, found: Bundle) -> Draft:
    """A stored draft with the stored weights."""
    draft = KINDS[kind](settings, settings.draft, found.special()["mask"])
    draft.load_state_dict({name: item.float() for name, item in load_file(folder / "model.safetensors").items()})
    draft.requires_grad_(False)
    return draft


def paired(base: Sequence[Step], other: Sequence[Step], seed: int = 0) -> Figures:
    """The difference of acceptance lengths over the same prompts, its 95% interval, and a p-value.

    The interval is a bootstrap over prompts. The p-value is the share of random swaps of the two drafts, prompt by
    prompt, that give a difference at least as large, in either direction.
    """
    both = (totals(base), totals(other))
    names = sorted(both[0].keys() & both[1].keys())
    rows = [(both[0][name], both[1][name]) for name in names]
    chance = random.Random(seed)
    found = _difference(rows)
    drawn = sorted(_difference(chance.choices(rows, k=len(rows))) for _ in range(NUM_DRAWS // 10))
    swapped = (_difference([row if chance.random() < 0.5 else row[::-1] for row in rows]) for _ in range(NUM_DRAWS))
    as_large = sum(abs(value) >= abs(found) for value in swapped)
    return {
        "difference": round(found, 4),
        "interval_95": [round(drawn[len(drawn) * 25 // 1000], 3), round(drawn[len(drawn) * 975 // 1000], 3)],
        "p_value": round((as_large + 1) / (NUM_DRAWS + 1), 5),
    }


def _difference(rows: Sequence[tuple[Tally, Tally]]) -> float:
    base, other = zip(*rows, strict=True)
    return _length(other) - _length(base)


def _length(tallies: Sequence[Tally]) -> float:
    accepted, steps = map(sum, zip(*tallies, strict=True))
    return float(accepted / max(1, steps))


def measure(draft: Draft, found: Bundle, settings: Settings, passages: Sequence[Passage]) -> list[Step]:
    """The steps of a draft on passages of the target's greedy text."""
    head = Head.full(found.target.model.embed_tokens.weight)
    return Judge(draft, head, found.target, settings).steps(passages)


def write_report(found: Bundle, settings: Settings, trained: Path) -> Figures:
    """Put the drafts of a folder into the bundle, measure them, and write the bundle's report and card.

    The folder has a subfolder per kind, as `train_further` writes it. Its DFlash draft is the control.
    """
    target = nn.Module.to(found.target, "cpu")
    recipe = settings.evaluation
    passages = write_passages(target, read_prompts(found), recipe.new_tokens, 0.0, found.special()["end"])
    bundled = measure(read_draft("dflash", found.folder / "draft", settings, found), found, settings, passages)
    control: list[Step] = []
    figures: Figures = {}
    for kind in KINDS:
        folder = trained / kind
        draft = read_draft(kind, folder, settings, found)
        steps = measure(draft, found, settings, passages)
        control = control or steps
        figures[kind] = {
            "training": json.loads((folder / "training.json").read_text()),
            "num_draft_tokens": draft.num_draft_tokens,
            "temperature_0": summary(steps, draft.num_draft_tokens),
            "against_draft": paired(bundled, steps),
            "against_control": paired(control, steps),
        }
        if draft.num_draft_tokens > settings.num_draft_tokens:
            draft.block_size -= draft.num_draft_tokens - settings.num_draft_tokens
            steps = measure(draft, found, settings, passages)
            figures[f"{kind} with {draft.num_draft_tokens} draft tokens"] = {
                "temperature_0": summary(steps, draft.num_draft_tokens),
                "against_draft": paired(bundled, steps),
                "against_control": paired(control, steps),
            }
        if kind in FURTHER:
            for name in ("config.json", "model.safetensors"):
                copy = found.folder / FURTHER[kind] / name
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes((folder / name).read_bytes())
    path = found.folder / "report.json"
    report = json.loads(path.read_text()) | {"further": figures}
    report["bundle_bytes"] = bundle.folder_bytes(found.folder)
    bundle.write_json(path, report)
    (found.folder / "README.md").write_text(model_card(report))
    return figures
