"""The model card of the bundled pair, written from the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Report = dict[str, Any]

HEADER = """\
---
license: apache-2.0
language: [en, code]
tags: [dflash, speculative-decoding, qwen3, python]
---

# A tiny Python model with drafts

A small Qwen3 that writes Python-like text, and DFlash drafts (arXiv 2602.06036) trained for it. With this pair,
drafting, verifying, converting and validating can be tried and tested within seconds and without a download. It is
useless as a code assistant.

| file or folder | content | dialect |
|---|---|---|
| `target/` | the target, `Qwen3ForCausalLM` with tied embeddings, and its byte-level tokenizer | transformers |
| `draft/` | draft over the target's whole vocabulary, without embedding and head of its own | native (z-lab) |
| `draft-reduced/` | draft over the ids that the target writes most often, with its own head and id maps | speculators |
{further}| `prompts.jsonl` | prompts cut from held-out modules, the same number from each source | |
| `heldout.json` | every held-out file with its sha256 | |
| `report.json` | all numbers below and more | |
"""

FURTHER_FILES = """\
| `draft-dflash2/` | DFlash 2 draft: convolutions and a selector added to `draft/` | native (z-lab) |
| `draft-dspark/` | DSpark draft: a Markov head added, every row predicts the token after it | native (DSpark) |
"""

FURTHER = """\
## Further drafts

`draft-dflash2/` and `draft-dspark/` have the layers, the block size and the tapped layers of `draft/`. Their training
begins with its weights and goes on with new text of the target: {texts:,} sequences, the same for all. The control is a
DFlash draft that was trained in the same way for the same time, so it shows the gain of longer training alone. It is
not in the bundle.

- DFlash 2 adds convolutions of {taps} taps over groups of {group} columns, which begin as identities, and a selector of
  rank {selector} among {top_k} candidates. Its loss is the cross-entropy of the single tokens plus the cross-entropy of
  the selector's choice after the right token before.
- DSpark adds a vanilla Markov head of rank {markov} and a confidence head. Its loss is the cross-entropy with the
  head's bias after the right token before. Confidence learns the overlap of the draft's distribution and the target's.
  The layout is anchor-first (`sample_from_anchor` is true), so a block of 8 rows has 8 draft tokens, one more than in
  the other drafts.

Acceptance on the {prompts} held-out prompts at temperature 0. Differences are over the same prompts, with a 95%
interval. The p-value is the share of random swaps of the two drafts, prompt by prompt, that give a difference as large.
The weights were chosen on other text of the target.

{table}
Train them again (here {seconds:.0f} s for the longest, three side by side on one GPU):

    python examples/train_tiny_pair.py --further texts --texts texts.pt
    python examples/train_tiny_pair.py --further KIND --texts texts.pt --output DIR/KIND   # dflash, dflash2 and dspark
    python examples/train_tiny_pair.py --further report --output DIR
"""

RECIPE = """\
## Recipe

1. **Target.** Trained with AdamW, warm-up and a cosine, in bf16 autocast. The weights with the lowest held-out loss are
   kept.
2. **Against loops.** The target reads its own greedy text. Runs of {gram} tokens that it has written before become
   unlikely at word boundaries (unlikelihood training, arXiv 1908.04319), together with the usual loss.
3. **Drafts.** They learn from the target's own continuations of training text: {sequences} sequences, three fifths
   greedy, the rest at temperatures 0.8 and 1.0. Anchors are random, and the block after each anchor is masked. Context
   features come from the target's forward over the true sequence up to the anchor. Attention inside the block is not
   causal. The k-th draft token has the weight exp(-(k-1)/4) in the cross-entropy. The target is frozen, and its
   embedding and head are shared.

All numbers below are measured in fp32 with the stored bf16 weights. Held-out text decided when the training of the
target stopped. The strength of step 2 was set by hand after reading samples and acceptance of earlier runs, also on
held-out prompts. Nothing else was chosen on held-out text.

The `config.json` of each draft states mask id, tapped layers (counted from 0) and block size. The rope base is
{theta:,.0f}; a reader that loses it uses {lost:,.0f}.

Train it again with this command (here {seconds:.0f} s on one {device}, without start-up):

    python examples/train_tiny_pair.py --output DIR
"""

LIMITS = """\
## Limits

- Trained on sequences of {length} tokens (the drafts on {draft_length}); positions beyond that, up to
  `max_position_embeddings`, are untested.
- The special tokens of the chat template never occurred in training. The template exists to run chat code paths.
- Code in transformers is largely copied between models. Whole model packages are held out, and files of mostly known
  lines are dropped. A prompt is skipped if more than half of its longer lines occur in a training file. The column
  above shows how much of the held-out text is known nevertheless.
- Up to two prompts come from one file, and they may overlap.
- Acceptance at temperature 1 is low because a model of this size is unsure of most tokens.

## Licences

The weights are under Apache-2.0. `prompts.jsonl` contains short excerpts with file and version, each under the licence
of its source: CPython (PSF-2.0, copyright Python Software Foundation), PyTorch (BSD-3-Clause, copyright
Facebook, Inc. and the PyTorch contributors), Transformers (Apache-2.0, copyright The Hugging Face team), NumPy
(BSD-3-Clause, copyright NumPy Developers)."""


def model_card(report: Report) -> str:
    """The text of the bundle's README.md."""
    settings = report["settings"]
    recipe = RECIPE.format(
        gram=settings["unloop"]["gram"],
        sequences=report["drafts"]["training_sequences"],
        theta=settings["shape"]["rope_theta"],
        lost=settings["shape"]["lost_rope_theta"],
        seconds=sum(report["seconds"].values()),
        device=report["environment"]["device"],
    )
    limits = LIMITS.format(
        length=settings["target"]["sequence_length"],
        draft_length=max(settings["continuations"]["prompt_lengths"]) + settings["continuations"]["new_tokens"],
    )
    sections = [
        HEADER.format(further=FURTHER_FILES if "further" in report else ""), sizes(report), data(report), recipe,
        target(report), acceptance(report), further(report), repetition(report), wrong_readings(report), limits,
    ]  # fmt: skip
    return "\n".join(section.rstrip() + "\n" for section in sections if section)


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def sizes(report: Report) -> str:
    settings, drafts = report["settings"], report["drafts"]
    parts = (
        ("target", settings["target"], report["target"]["parameters"], settings["shape"]["intermediate_size"]),
        ("draft", settings["draft"], drafts["draft"]["parameters"], settings["draft"]["intermediate_size"]),
        (
            "draft-reduced",
            settings["reduced"],
            drafts["draft_reduced"]["parameters"],
            settings["reduced"]["intermediate_size"],
        ),
    )
    rows = [(name, part["num_layers"], width, f"{count:,}", part["steps"]) for name, part, count, width in parts]
    shape = settings["shape"]
    return (
        f"Hidden size {shape['hidden_size']}, {shape['num_heads']} heads ({shape['num_kv_heads']} for keys and values) "
        f"of {shape['head_dim']}, vocabulary {settings['vocab_size']} (reduced draft "
        f"{settings['reduced']['draft_vocab_size']}), block size {settings['block_size']}, tapped layers "
        f"{list(settings['target_layer_ids'])}.\n\n" + table(("", "layers", "MLP width", "parameters", "steps"), rows)
    )


def data(report: Report) -> str:
    rows = [
        (
            source["version"],
            source["licence"],
            f"{source['train_files']:,} / {source['held_out_files']:,}",
            f"{source['train_tokens']:,} / {source['held_out_tokens']:,}",
            f"{source['held_out_lines_also_in_training']:.0%}",
        )
        for source in report["data"]["sources"]
    ]
    header = ("source", "licence", "files, train / held out", "tokens, train / held out", "held-out lines known")
    return "## Data\n\n" + table(header, rows)


def target(report: Report) -> str:
    figures, unlooping = report["target"], report["target"]["unlooping"]
    bytes_per_token = report["data"]["held_out_bytes_per_token"]
    loss = figures["held_out_loss_nats_per_token"]
    return (
        "## Target\n\n"
        f"Trained on {figures['training_tokens_seen'] / 1e6:.0f} M tokens. "
        f"Held-out loss: {loss:.3f} nats per token ({loss / 0.6931 / bytes_per_token:.3f} bits per byte), "
        f"{figures['held_out_loss_before_unlooping']:.3f} before "
        f"the training against loops. Tokens that end a long copy of earlier text: {unlooping[0]['copied_share']:.0%} "
        f"of its greedy text before, {unlooping[-1]['copied_share']:.0%} after, and "
        f"{figures['copied_share_of_code']:.0%} of the training code.\n\n"
        f"Greedy continuation of `{report['sample']['prompt']}`:\n\n"
        f"~~~python\n{report['sample']['prompt']}{report['sample']['continuation']}\n~~~\n"
    )


def acceptance(report: Report) -> str:
    evaluation = report["evaluation"]
    runs = [
        (f"{title}, temperature {temperature}", evaluation[name][f"temperature_{temperature}"])
        for name, title in (("draft", "draft"), ("draft_reduced", "draft-reduced"))
        for temperature in (0, 1)
    ]
    categories = list(runs[0][1]["per_category"])
    lengths = table(
        ("", "acceptance length", "95% interval", "steps", *categories),
        (
            (
                title,
                f"**{run['acceptance_length']:.2f}**",
                "{:.2f} to {:.2f}".format(*run["interval_95"]),
                run["steps"],
                *(f"{run['per_category'][name]:.2f}" for name in categories),
            )
            for title, run in runs
        ),
    )
    count = len(runs[0][1]["per_position_rates"])
    rates = table(
        ("accepted at position", *range(1, count + 1)),
        ((title, *(f"{rate:.3f}" for rate in run["per_position_rates"])) for title, run in runs),
    )
    coverage = report["drafts"]["draft_reduced"]["coverage_of_target_text"]
    return (
        "## Acceptance\n\n"
        f"{evaluation['prompts']} held-out prompts, {evaluation['new_tokens']} new tokens. Acceptance length is the "
        "number of tokens per step, the target's own token included, pooled over all steps with a whole block of text "
        f"after them. Intervals are over prompts. The reduced vocabulary covers {coverage:.1%} of the "
        f"target's text.\n\n{lengths}\n{rates}"
    )


def further(report: Report) -> str:
    if "further" not in report:
        return ""
    found = report["further"]
    titles = {"dflash": "control: DFlash, trained as long", "dflash2": "draft-dflash2", "dspark": "draft-dspark"}
    rows = []
    for kind, part in found.items():
        name = kind.partition(" ")[0]
        title = titles[name] + kind.removeprefix(name)
        run = part["temperature_0"]
        cells = [f"{run['acceptance_length']:.2f}", "{:.2f} to {:.2f}".format(*run["interval_95"])]
        for base in ("against_draft", "against_control"):
            is_same = kind == "dflash" and base == "against_control"
            cells.append("" if is_same else _difference(part[base]))
        training = found[name]["training"]
        rows.append((title, f"{training['parameters']:,}", training["curve"][-1]["step"], *cells))
    header = (
        "",
        "parameters",
        "further steps",
        "acceptance length",
        "95% interval",
        "against draft",
        "against control",
    )
    recipe = found["dflash2"]["training"]["recipe"]
    return FURTHER.format(
        texts=found["dflash2"]["training"]["texts"],
        taps=recipe["selector"]["kernel_size"],
        group=recipe["selector"]["group_size"],
        selector=recipe["selector"]["rank"],
        top_k=recipe["selector"]["top_k"],
        markov=recipe["markov"]["rank"],
        prompts=report["evaluation"]["prompts"],
        seconds=max(part["training"]["seconds"] for part in found.values() if "training" in part),
        table=table(header, rows),
    )


def _difference(paired: Report) -> str:
    low, high = paired["interval_95"]
    chance = f"p = {paired['p_value']:.4f}" if paired["p_value"] >= 0.0002 else "p < 0.0002"
    return f"{paired['difference']:+.2f} ({low:+.2f} to {high:+.2f}), {chance}"


def repetition(report: Report) -> str:
    rows = (
        ("written tokens that end a 4-gram seen before", "written_tokens_in_repeated_4_gram", ".0%"),
        ("accepted draft tokens that end one", "accepted_drafts_in_repeated_4_gram", ".0%"),
        ("acceptance length after a repeated 4-gram", "acceptance_length_after_repeated_4_gram", ".2f"),
        ("acceptance length after a new 4-gram", "acceptance_length_after_fresh_4_gram", ".2f"),
        ("acceptance length of prompt lookup, no network", "prompt_lookup_acceptance_length", ".2f"),
        ("passages that end in a loop", "passages_that_loop", "d"),
        ("acceptance length without these passages", "acceptance_length_without_looping_passages", ".2f"),
        ("prompt lookup without these passages", "prompt_lookup_without_looping_passages", ".2f"),
    )
    evaluation = report["evaluation"]
    columns = [
        evaluation[name][f"repetition_temperature_{temperature}"]
        for name, temperature in (("draft", 0), ("draft", 1), ("draft_reduced", 0))
    ]
    body = ((title, *(format(column[key], style) for column in columns)) for title, key, style in rows)
    return (
        "## Repetition\n\n"
        "Repetitive text is easy to draft. A passage counts as a loop if fewer than half of the 4-grams in "
        f"its last 64 tokens are different. Temperature 0 has {evaluation['prompts']} passages, temperature 1 "
        f"{evaluation['prompts'] * report['settings']['evaluation']['samples_per_prompt']}.\n\n"
        + table(("", "draft, temperature 0", "draft, temperature 1", "draft-reduced, temperature 0"), body)
    )


def wrong_readings(report: Report) -> str:
    titles = {
        "taps_plus_1": "taps one layer too high",
        "taps_minus_1": "taps one layer too low",
        "causal_block": "causal attention inside the block",
        f"rope_theta_{report['settings']['shape']['lost_rope_theta']:.0f}": "rope base lost",
        "mask_is_pad_token": "another mask token",
        "id_map_ignored": "`d2t` ignored",
    }
    evaluation = report["evaluation"]
    rows = []
    for key, title in titles.items():
        cells: list[str] = []
        for name in ("draft", "draft_reduced"):
            trial = evaluation[name]["wrong_readings"].get(key)
            cells += ["", ""] if trial is None else _trial_cells(trial)
        rows.append((title, *cells))
    return (
        "## Cost of misreading the files\n\n"
        "Each mistake loads and runs, and the text stays right. Only acceptance falls (greedy, the same prompts). "
        '"lost" is the lost share of accepted draft tokens per step, with its paired 95% interval.\n\n'
        + table(("", "draft", "lost", "draft-reduced", "lost"), rows)
    )


def _trial_cells(trial: Report) -> list[str]:
    low, high = trial["lost_interval_95"]
    return [
        f"{trial['acceptance_length']:.2f}",
        f"{trial['accepted_drafts_lost_percent']:.0f}% ({low:.0f} to {high:.0f})",
    ]
