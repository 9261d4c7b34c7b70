"""Train further drafts for a bundled target: the same text for every kind, from the weights of the bundled draft.

A kind that adds parts to DFlash begins as the bundled draft does, because the new parts begin without effect. To tell
the gain of a kind from the gain of longer training, train the kind `dflash` on the same text for the same steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from . import bundle
from .data import Corpus, load_corpus
from .dflash2 import DFlash2Draft
from .draft import Draft, Head, TextSet, block_labels, draft_loss
from .dspark import DSparkDraft
from .settings import DraftRecipe, Settings
from .target import (
    Pace,
    Report,
    continuations,
    layer_outputs,
    make_optimizer,
    maybe_compiled,
    round_to_bf16,
    set_learning_rate,
    training_precision,
)
from .text import END, MASK, PAD, token_id, token_stream

KINDS: dict[str, type[Draft]] = {kind.kind: kind for kind in (Draft, DFlash2Draft, DSparkDraft)}
NUM_TRIAL_TEXTS = 2048


@dataclass(frozen=True)
class Bundle:
    """The target of a bundle, its tokenizer, and its DFlash draft's tensors."""

    folder: Path
    target: Qwen3ForCausalLM
    tokenizer: Tokenizer
    draft: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> Bundle:
        target = Qwen3ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
        target.requires_grad_(False)
        nn.Module.to(nn.Module.eval(target), device)
        tensors = load_file(folder / "draft" / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
        return cls(folder, target, tokenizer, {name: item.float() for name, item in tensors.items()})

    def special(self) -> dict[str, int]:
        """Ids of the special tokens that a draft's config names."""
        named = {"end": END, "mask": MASK, "pad": PAD}
        return {name: token_id(self.tokenizer, token) for name, token in named.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of further drafts."""
    parser.add_argument(
        "--further", choices=("texts", "report", *KINDS), help="write texts, train a draft of a kind, or measure all"
    )
    parser.add_argument("--bundle", type=Path, default=Path("dflash_cli/tiny"), help="bundle to train a draft for")
    parser.add_argument("--texts", type=Path, help="file of texts of a further draft")
    parser.add_argument("--steps", type=int, help="steps of a further draft")
    parser.add_argument("--seconds", type=float, help="end the work on a further draft after these seconds")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="highest rate of a further draft")


def main(given: argparse.Namespace, settings: Settings) -> None:
    """Write the texts of further drafts, or train one."""
    begin = time.perf_counter()

    def report(step: int, note: str) -> None:
        print(f"{given.further} {time.perf_counter() - begin:.0f} s, step {step}: {note}", flush=True)

    found = Bundle.read(given.bundle, torch.device(given.device))
    settings = replace(settings, vocab_size=found.target.config.vocab_size)
    if given.further == "texts":
        listed = json.loads((given.bundle / "heldout.json").read_text())["sha256"]
        write_texts(found, settings, listed, given.texts, report, given.seconds)
        return
    if given.further == "report":
        from .further_report import write_report

        print(json.dumps(write_report(found, settings, given.output), indent=2))
        return
    recipe = replace(
        settings.draft,
        learning_rate=given.learning_rate,
        steps=given.steps or settings.draft.steps,
        seconds=given.seconds,
    )
    train_further(given.further, found, settings, recipe, given.texts, given.output, report)


def training_corpus(settings: Settings, known: dict[str, str]) -> Corpus:
    """The sources without the bundle's held-out files, given as path -> sha256."""
    corpus = load_corpus(settings)
    hashes = set(known.values())
    kept = [module for module in corpus.train if module.path not in known and module.sha256 not in hashes]
    return replace(corpus, train=tuple(kept))


def write_texts(
    found: Bundle,
    settings: Settings,
    known: dict[str, str],
    path: Path,
    report: Report,
    seconds: float | None = None,
) -> None:
    """Save the target's continuations of training text. Writing ends with the round that is running after `seconds`."""
    device = found.target.device
    stream, _ = token_stream(found.tokenizer, training_corpus(settings, known).train)
    report(0, f"{stream.numel()} tokens")
    stream = stream.to(device)
    writer = found.target
    if device.type == "cuda":
        writer = nn.Module.to(copy.deepcopy(found.target), torch.bfloat16)
    rows, lengths = [], []
    begin = time.perf_counter()
    for number, (ids, prompt_lengths) in enumerate(continuations(writer, stream, settings), 1):
        rows.append(ids.to(torch.int16).cpu())
        lengths.append(prompt_lengths.cpu())
        report(number, f"{sum(map(len, rows))} texts")
        if seconds is not None and time.perf_counter() - begin > seconds:
            break
    part = path.with_suffix(".part")
    torch.save({"ids": torch.cat(rows), "lengths": torch.cat(lengths)}, part)
    part.rename(path)


def read_texts(path: Path, settings: Settings, device: torch.device) -> tuple[TextSet, TextSet]:
    """The texts to learn from, and the texts of the trial that chooses the best weights."""
    found = torch.load(path, weights_only=True)
    ids, lengths = found["ids"].to(device), found["lengths"].to(device)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(device)
    ids, lengths = ids[order], lengths[order]
    count = min(NUM_TRIAL_TEXTS, len(ids) // 4)
    new_tokens = settings.continuations.new_tokens
    return TextSet(ids[count:], lengths[count:], new_tokens), TextSet(ids[:count], lengths[:count], new_tokens)


def begin_draft(kind: str, settings: Settings, recipe: DraftRecipe, found: Bundle) -> Draft:
    """A draft of a kind with the weights of the bundled DFlash draft."""
    draft = KINDS[kind](settings, recipe, found.special()["mask"])
    draft.load_state_dict({**draft.state_dict(), **found.draft})
    return draft.to(found.target.device)


@dataclass
class Trainer:
    """The training of one draft. `best` has the weights with the highest acceptance in the trial."""

    draft: Draft
    found: Bundle
    settings: Settings
    recipe: DraftRecipe
    learn: TextSet
    trial: TextSet
    save: Callable[[Draft, list[dict[str, float]]], None]
    eval_every: int = 250

    def __post_init__(self) -> None:
        device = self.learn.ids.device
        self.head = Head.full(self.found.target.model.embed_tokens.weight.detach())
        self.measure = maybe_compiled(draft_loss, device)
        self.read = maybe_compiled(target_rows, device)
        # Shapes of the trial are the shapes of a step, so that nothing is compiled twice.
        count = self.recipe.anchors_per_sequence
        self.trial_anchors = self.trial.random_anchors(count, self.draft.num_draft_tokens + 1)
        self.best = -1.0
        self.curve: list[dict[str, float]] = []

    def loss(self, texts: TextSet, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and mean number of correct leading draft tokens."""
        labels = block_labels(texts.ids, anchors, self.draft.num_draft_tokens + 1)
        with training_precision(texts.ids.device):
            with torch.no_grad():
                features, rows = self.read(self.found.target, texts.ids, self.settings.target_layer_ids)
                targets = None
                if self.draft.kind == "dspark":
                    picked = anchors[..., None] + torch.arange(labels.shape[-1], device=anchors.device)
                    picked = picked.flatten(1)[..., None].expand(-1, -1, rows.shape[-1])
                    targets = (rows.gather(1, picked) @ self.head.weight.t()).unflatten(1, labels.shape[1:])
            return self.measure(
                self.draft, self.head.weight, self.head.weight, features, texts.ids, anchors, labels,
                self.recipe.loss_decay, targets,
            )  # fmt: skip

    def run(self, report: Report) -> None:
        """Train, and save the best weights whenever a trial finds better ones."""
        optimizer = make_optimizer(self.draft, self.recipe.learning_rate, self.recipe.weight_decay)
        count, step = Pace(self.recipe.steps, self.recipe.seconds).clock(), 0
        self.judge(0, report)
        while (reached := count(step)) < self.recipe.steps:
            set_learning_rate(
                optimizer, reached, self.recipe.steps, self.recipe.warmup_steps, self.recipe.learning_rate
            )
            batch = self.learn.batch(self.recipe.batch_size)
            anchors = batch.random_anchors(self.recipe.anchors_per_sequence, self.draft.num_draft_tokens + 1)
            loss, _ = self.loss(batch, anchors)
            loss.backward()
            nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % self.eval_every == 0:
                self.judge(step, report)
        self.judge(step, report)

    @torch.no_grad()
    def judge(self, step: int, report: Report) -> None:
        """Measure acceptance on the trial's texts."""
        losses, rights = [], []
        for first in range(0, len(self.trial), self.recipe.batch_size):
            part = slice(first, first + self.recipe.batch_size)
            texts = replace(self.trial, ids=self.trial.ids[part].long(), prompt_lengths=self.trial.prompt_lengths[part])
            loss, right = self.loss(texts, self.trial_anchors[part])
            losses.append(float(loss))
            rights.append(float(right))
        accepted = sum(rights) / len(rights)
        self.curve.append({"step": step, "loss": round(sum(losses) / len(losses), 4), "accepted": round(accepted, 4)})
        report(step, f"loss {self.curve[-1]['loss']:.3f}, {accepted:.3f} accepted")
        if accepted > self.best:
            self.best = accepted
            stored = copy.deepcopy(self.draft)
            round_to_bf16(stored)
            self.save(stored, self.curve)


def target_rows(model: Qwen3ForCausalLM, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Features [B, T, K*H] of the tapped layers, and rows [B, T, H] before the head, for ids [B, T]."""
    outputs = layer_outputs(model, ids, len(model.model.layers) - 1)
    return torch.cat([outputs[tap + 1] for tap in taps], dim=-1), model.model.norm(outputs[-1])


def train_further(
    kind: str, found: Bundle, settings: Settings, recipe: DraftRecipe, texts: Path, output: Path, report: Report
) -> None:
    """Train one draft of a kind -> a checkpoint with `training.json` in the folder `output`."""
    begin = time.perf_counter()
    learn, trial = read_texts(texts, settings, found.target.device)
    draft = begin_draft(kind, settings, recipe, found)
    special = found.special()

    def save(stored: Draft, curve: list[dict[str, float]]) -> None:
        bundle.save_native_draft(stored, settings, special, output)
        figures = {
            "kind": kind,
            "recipe": asdict(recipe),
            "parameters": sum(parameter.numel() for parameter in stored.parameters()),
            "texts": len(learn),
            "curve": curve,
            "seconds": round(time.perf_counter() - begin),
        }
        bundle.write_json(output / "training.json", figures)

    Trainer(draft, found, settings, recipe, learn, trial, save).run(report)
