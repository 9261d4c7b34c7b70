"""Train the bundled pair: a small Qwen3 that writes Python, and two DFlash drafts for it.

The target learns from Python sources found on this machine: the standard library, torch, transformers and numpy. The
drafts learn from the target's own continuations. Acceptance is then measured on held-out modules, also for wrong
readings of the checkpoints. Everything is written as checkpoints that other tools can load.

    python examples/train_tiny_pair.py --output tiny            # minutes on one GPU, many hours on a CPU
    python examples/train_tiny_pair.py --output tiny --quick    # about a minute on a CPU; learns nothing useful

Further drafts for the bundled target learn from one file of its texts, from the weights of the bundled draft:

    python examples/train_tiny_pair.py --further texts --texts texts.pt
    python examples/train_tiny_pair.py --further dflash2 --texts texts.pt --steps 4000 --output draft-dflash2
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from tiny_pair import bundle, card, further
from tiny_pair.data import Corpus, Prompt, copied_share, cut_prompts, load_corpus, telling_lines
from tiny_pair.draft import Draft, Head, TextSet, train_draft
from tiny_pair.evaluate import Figures, Judge, Passage, repetition, summary, write_passages
from tiny_pair.settings import DraftRecipe, Settings, quick_settings
from tiny_pair.target import (
    Report,
    build_target,
    continuations,
    fixed_windows,
    held_out_loss,
    round_to_bf16,
    train_target,
)
from tiny_pair.text import END, MASK, PAD, save_tokenizer, token_id, token_stream, train_tokenizer, turning_points
from tiny_pair.unloop import copied_share_of_code, unloop
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

SAMPLE = "def fibonacci(n):"


class Stages:
    """One progress bar per stage, and the seconds of each stage."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Report]:
        task = self.progress.add_task(name, total=total, note="")
        begin = time.perf_counter()
        yield lambda done, note: self._update(task, done, note)
        self.seconds[name] = round(time.perf_counter() - begin, 1)
        self.progress.update(task, completed=total)

    def _update(self, task: TaskID, done: int, note: str) -> None:
        self.progress.update(task, completed=done)
        if note:
            self.progress.update(task, note=note)
            if not self.progress.console.is_terminal:
                self.progress.console.print(f"{self.progress.tasks[task].description}: step {done}, {note}")


@dataclass(frozen=True)
class Prepared:
    """The corpus as tokens on the training device, and the held-out prompts."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor
    prompts: list[Prompt]
    special: dict[str, int]
    figures: Figures


def main() -> None:
    """Run every stage and write the bundle."""
    arguments = parse_arguments()
    settings = quick_settings(arguments.seed) if arguments.quick else Settings(seed=arguments.seed)
    settings = scaled(settings, arguments.scale)
    device = torch.device(arguments.device)
    torch.manual_seed(settings.seed)
    if arguments.further:
        further.main(arguments, settings)
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        report = run(settings, device, arguments.output, Stages(progress))
    console.print(f"bundle of {report['bundle_bytes']} bytes in {arguments.output}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the bundle or the draft", default=Path("tiny"))
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for every number of steps (default: 1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    further.add_arguments(parser)
    return parser.parse_args()


def scaled(settings: Settings, scale: float) -> Settings:
    """The same recipe with longer or shorter training."""
    return replace(
        settings,
        target=replace(settings.target, steps=max(1, round(settings.target.steps * scale))),
        unloop=replace(settings.unloop, steps=max(1, round(settings.unloop.steps * scale))),
        continuations=replace(settings.continuations, rounds=max(1, round(settings.continuations.rounds * scale))),
        draft=replace(settings.draft, steps=max(1, round(settings.draft.steps * scale))),
        reduced=replace(settings.reduced, steps=max(1, round(settings.reduced.steps * scale))),
    )


def run(settings: Settings, device: torch.device, output: Path, stages: Stages) -> Figures:
    """Run all stages from sources on disk to a bundle on disk -> the report."""
    with stages.stage("data and tokenizer", 4) as report:
        prepared = prepare(settings, device, report)
    target, target_figures = make_target(settings, prepared, stages)
    texts, counts = write_texts(settings, target, prepared, stages)
    embedding = target.model.embed_tokens.weight.detach()
    full_head = Head.full(embedding)
    size = settings.reduced.draft_vocab_size or settings.vocab_size
    reduced_head = Head.most_frequent(embedding, counts, size, [prepared.special["end"]])
    full, full_curve = make_draft(settings, settings.draft, full_head, target, texts, prepared, stages, "draft")
    reduced, reduced_curve = make_draft(
        settings, settings.reduced, reduced_head, target, texts, prepared, stages, "reduced draft"
    )
    judges = {
        "draft": Judge(full, full_head, target, settings),
        "draft_reduced": Judge(reduced, reduced_head, target, settings),
    }
    coverage = float(counts[reduced_head.token_ids].sum() / counts.sum())
    with stages.stage("evaluation", 3) as report:
        acceptance = evaluate(judges, prepared, report)
    save(settings, prepared, target, full, reduced, reduced_head, output)
    figures: Figures = {
        "settings": asdict(settings),
        "environment": environment(device),
        "data": prepared.figures,
        "target": target_figures,
        "drafts": {
            "draft": {"parameters": parameter_count(full), "curve": full_curve},
            "draft_reduced": {
                "parameters": parameter_count(reduced) + reduced_head.weight.numel(),
                "curve": reduced_curve,
                "coverage_of_target_text": round(coverage, 4),
            },
            "training_sequences": len(texts),
        },
        "evaluation": acceptance,
        "sample": {"prompt": SAMPLE, "continuation": sample(target, prepared)},
        "seconds": stages.seconds,
    }
    write_report(figures, output)
    return figures


def prepare(settings: Settings, device: torch.device, report: Report) -> Prepared:
    """Collect, split and tokenize the sources, and cut the prompts."""
    corpus = load_corpus(settings)
    report(1, f"{len(corpus.train)} training files")
    tokenizer = train_tokenizer(corpus.train, settings)
    report(2, "tokenizer trained")
    train, train_counts = token_stream(tokenizer, corpus.train)
    held_out, held_out_counts = token_stream(tokenizer, corpus.held_out)
    report(3, f"{train.numel()} training tokens")
    known = telling_lines(corpus.train)
    prompts = cut_prompts(corpus, tokenizer, known, settings.evaluation)
    report(4, f"{len(prompts)} prompts")
    special = {"end": END, "mask": MASK, "pad": PAD}
    figures = [
        {
            "source": source.name,
            "version": source.version,
            "licence": source.licence,
            "train_files": sum(module.source == source.name for module in corpus.train),
            "held_out_files": sum(module.source == source.name for module in corpus.held_out),
            "train_tokens": train_counts.get(source.name, 0),
            "held_out_tokens": held_out_counts.get(source.name, 0),
            "held_out_lines_also_in_training": round(
                copied_share((one.text for one in corpus.held_out if one.source == source.name), known), 4
            ),
        }
        for source in corpus.sources
    ]
    text_bytes = sum(len(module.text.encode()) for module in corpus.held_out)
    return Prepared(
        corpus,
        tokenizer,
        train.to(device),
        held_out.to(device),
        prompts,
        {name: token_id(tokenizer, token) for name, token in special.items()},
        {"sources": figures, "held_out_bytes_per_token": round(text_bytes / held_out.numel(), 3)},
    )


def make_target(settings: Settings, prepared: Prepared, stages: Stages) -> tuple[Qwen3ForCausalLM, Figures]:
    """Train the target and round it to its stored weights, so that the drafts learn from these."""
    recipe = settings.target
    target = build_target(settings, prepared.special["end"], prepared.special["pad"])
    nn.Module.to(target, prepared.train.device)
    with stages.stage("target", recipe.steps) as report:
        curve = train_target(target, prepared.train, prepared.held_out, recipe, report)
    windows = fixed_windows(prepared.held_out, recipe.sequence_length + 1, 256)
    before = held_out_loss(target, windows, 8)
    with stages.stage("unlooping", settings.unloop.steps) as report:
        turns = turning_points(prepared.tokenizer).to(prepared.train.device)
        copied = unloop(target, prepared.train, turns, settings.unloop, report)
    target.requires_grad_(False)
    target.eval()
    round_to_bf16(target)
    loss = held_out_loss(target, windows, 8)
    figures: Figures = {
        "parameters": parameter_count(target),
        "held_out_loss_nats_per_token": round(loss, 4),
        "held_out_loss_before_unlooping": round(before, 4),
        "unlooping": copied,
        "copied_share_of_code": round(copied_share_of_code(prepared.train, settings.unloop), 4),
        "training_tokens_seen": recipe.steps * recipe.batch_size * recipe.sequence_length,
        "curve": curve,
    }
    return target, figures


def write_texts(
    settings: Settings, target: Qwen3ForCausalLM, prepared: Prepared, stages: Stages
) -> tuple[TextSet, Tensor]:
    """The target's continuations of training text, and the count of each written id."""
    recipe = settings.continuations
    # bf16 halves the time on a GPU. The drafts are measured on fp32 text of other prompts.
    writer = nn.Module.to(copy.deepcopy(target), torch.bfloat16) if prepared.train.is_cuda else target
    rows: list[Tensor] = []
    lengths: list[Tensor] = []
    counts = torch.zeros(settings.vocab_size, dtype=torch.int64, device=prepared.train.device)
    with stages.stage("continuations", recipe.rounds) as report:
        for number, (ids, prompt_lengths) in enumerate(continuations(writer, prepared.train, settings), 1):
            start = int(prompt_lengths[0])
            written = ids[:, start : start + recipe.new_tokens]
            counts += torch.bincount(written.flatten(), minlength=settings.vocab_size)
            rows.append(ids.to(torch.int16))
            lengths.append(prompt_lengths)
            report(number, "")
    return TextSet(torch.cat(rows), torch.cat(lengths), recipe.new_tokens), counts


def make_draft(
    settings: Settings,
    recipe: DraftRecipe,
    head: Head,
    target: Qwen3ForCausalLM,
    texts: TextSet,
    prepared: Prepared,
    stages: Stages,
    name: str,
) -> tuple[Draft, list[dict[str, float]]]:
    """Train one draft and round it to its stored weights."""
    draft = Draft(settings, recipe, prepared.special["mask"]).to(texts.ids.device)
    with stages.stage(name, recipe.steps) as report:
        curve = train_draft(draft, head, target, texts, settings, recipe, report)
    draft.requires_grad_(False)
    round_to_bf16(draft)
    return draft, curve


def evaluate(judges: dict[str, Judge], prepared: Prepared, report: Report) -> Figures:
    """Measure both drafts on held-out prompts, greedy and sampled, and wrong readings greedily."""
    judge = judges["draft"]
    recipe = judge.settings.evaluation
    end, pad = prepared.special["end"], prepared.special["pad"]
    greedy = write_passages(judge.target, prepared.prompts, recipe.new_tokens, 0.0, end)
    report(1, "greedy text written")
    repeated = [prompt for prompt in prepared.prompts for _ in range(recipe.samples_per_prompt)]
    sampled = write_passages(judge.target, repeated, recipe.new_tokens, 1.0, end)
    report(2, "sampled text written")
    figures: Figures = {"new_tokens": recipe.new_tokens, "prompts": len(prepared.prompts)}
    for name, one in judges.items():
        figures[name] = measure(one, greedy, sampled, pad)
    report(3, "")
    return figures


def measure(judge: Judge, greedy: Sequence[Passage], sampled: Sequence[Passage], pad: int) -> Figures:
    """All numbers of one draft."""
    num_draft_tokens, block_size = judge.settings.num_draft_tokens, judge.settings.block_size
    greedy_steps = judge.steps(greedy)
    sampled_steps = judge.steps(sampled)
    return {
        "temperature_0": summary(greedy_steps, num_draft_tokens),
        "temperature_1": summary(sampled_steps, num_draft_tokens),
        "repetition_temperature_0": repetition(greedy, greedy_steps, block_size),
        "repetition_temperature_1": repetition(sampled, sampled_steps, block_size),
        "wrong_readings": judge.wrong_readings(greedy, pad),
    }


def sample(target: Qwen3ForCausalLM, prepared: Prepared) -> str:
    """The greedy continuation of a well-known prompt."""
    ids = tuple(prepared.tokenizer.encode(SAMPLE).ids)
    passage = write_passages(target, [Prompt("sample", "sample", "", SAMPLE, ids)], 96, 0.0, prepared.special["end"])[0]
    return str(prepared.tokenizer.decode(list(passage.token_ids[passage.start :])))


def save(
    settings: Settings,
    prepared: Prepared,
    target: Qwen3ForCausalLM,
    full: Draft,
    reduced: Draft,
    reduced_head: Head,
    output: Path,
) -> None:
    """Write checkpoints, prompts and the list of held-out files."""
    bundle.save_target(target, output / "target")
    save_tokenizer(prepared.tokenizer, output / "target", settings)
    bundle.save_native_draft(full, settings, prepared.special, output / "draft")
    bundle.save_speculators_draft(reduced, reduced_head, settings, prepared.special, output / "draft-reduced")
    bundle.save_prompts(prepared.prompts, output / "prompts.jsonl")
    for weights in output.rglob("*.safetensors"):
        weights.chmod(0o644)  # some releases make them readable by the owner only
    files = sorted(prepared.corpus.held_out, key=lambda module: module.path)
    bundle.write_json(
        output / "heldout.json",
        {
            "rule": "groups in order of the sha256 of their path until they hold the share of the source's bytes; "
            "a model's package in transformers is one group",
            "share": settings.held_out_share,
            "files_by_source": dict(Counter(module.source for module in files)),
            "sha256": {module.path: module.sha256 for module in files},
        },
    )


def write_report(figures: Figures, output: Path) -> None:
    """Write the report and the model card."""
    figures["bundle_bytes"] = bundle.folder_bytes(output)
    bundle.write_json(output / "report.json", figures)
    (output / "README.md").write_text(card.model_card(json.loads(json.dumps(figures))))


def parameter_count(model: nn.Module) -> int:
    """Number of parameters. Tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def environment(device: torch.device) -> dict[str, str]:
    """Device and versions of the run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"device": name, "python": platform.python_version(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
