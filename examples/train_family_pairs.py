"""Train two small pairs beside the bundled pair: a draft with sliding windows, and a draft for a hybrid target.

Both learn an invented language (`tiny_pair/language.py`). The hybrid target is a Qwen3.5 with gated delta nets, whose
states start with slow decays. Its documents begin with values that they repeat later. Only its states carry these: the
one attention layer is the first, where a row knows no other token than its own, so it cannot find a key's value.

    python examples/train_family_pairs.py --output tests/data/pairs           # a few minutes on one GPU
    python examples/train_family_pairs.py --output pairs --scale 0.01         # a smoke run; learns nothing useful
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than training models of this size

import torch
from tiny_pair import bundle, delta
from tiny_pair.draft import Draft, Head, TextSet, train_draft
from tiny_pair.language import BEGIN, END, MASK, PAD, Language
from tiny_pair.settings import ContinuationRecipe, DraftRecipe, ModelShape, Settings, TargetRecipe
from tiny_pair.target import build_target, continuations, round_to_bf16, train_target
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

NUM_PROMPTS, PROMPT_LEN = 64, 48
SPECIAL = {"end": END, "mask": MASK, "pad": PAD}
DECAYS = (0.0005, 0.01)
"""Initial range of the decay rates of states. The state of 60 tokens back keeps more than a third of its size."""


@dataclass(frozen=True)
class Family:
    """One pair: its language, its sizes, and whether its target is a hybrid."""

    name: str
    settings: Settings
    is_hybrid: bool = False
    language: Language = field(default_factory=Language)


def families(scale: float) -> tuple[Family, ...]:
    """Both pairs, with numbers of steps scaled."""

    def steps(count: int) -> int:
        return max(4, round(count * scale))

    few = 1.0 if scale >= 1 else 0.02
    shape = ModelShape(
        hidden_size=96, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=512
    )
    draft = DraftRecipe(
        num_layers=3, intermediate_size=256, steps=steps(4000), batch_size=round(192 * few), anchors_per_sequence=16
    )
    settings = Settings(
        vocab_size=Language.vocab_size,
        target_layer_ids=(1, 3, 4),
        shape=shape,
        target=TargetRecipe(steps=steps(3000), batch_size=round(128 * few), sequence_length=128, eval_every=500),
        continuations=ContinuationRecipe(
            rounds=5, batch_size=round(4096 * few), prompt_lengths=(32, 48, 64), new_tokens=96
        ),
        draft=draft,
    )
    windowed = replace(settings, draft=replace(draft, windows=(12, 12, None)))
    language = Language(seed=1, num_keys=4)
    hybrid = replace(
        settings,
        target=replace(
            settings.target,
            steps=steps(3000),
            sequence_length=language.document_length - 1,
            document_length=language.document_length,
        ),
    )
    return Family("windowed", windowed), Family("hybrid", hybrid, is_hybrid=True, language=language)


def build_hybrid(settings: Settings) -> Qwen3_5ForCausalLM:
    """A new Qwen3.5 of one full and five gated delta layers, with slow decays."""
    delta.use_chunks()
    shape = settings.shape
    config = Qwen3_5TextConfig(
        vocab_size=settings.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=settings.target.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        layer_types=["full_attention", *["linear_attention"] * (settings.target.num_layers - 1)],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=24,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(*DECAYS).log_()
        model.model.embed_tokens.weight[:, COMMON] = 0.05
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                begin_as_recall(layer.linear_attn)
    return model


def begin_as_recall(delta_net: nn.Module) -> None:
    """Let a gated delta net begin by finding, for each token, the tokens that followed the same token before.

    Queries and keys get one projection. The convolution passes queries and values on, and delays keys by one token. The
    output projection undoes the projection of values, and the output's gate begins open.
    """
    parts = dict(delta_net.named_parameters())
    width = (len(parts["in_proj_qkv.weight"]) - len(parts["in_proj_z.weight"])) // 2
    projection, taps = parts["in_proj_qkv.weight"], parts["conv1d.weight"]  # rows: queries, keys, values
    nn.init.orthogonal_(projection[:width])
    projection[width : 2 * width] = projection[:width]
    nn.init.orthogonal_(projection[2 * width :])
    parts["out_proj.weight"].copy_(projection[2 * width :].t() * 0.2)
    taps.normal_(std=0.02)
    taps[:width, 0, -1] += 1
    taps[width : 2 * width, 0, -2] += 1
    taps[2 * width :, 0, -1] += 1
    parts["in_proj_z.weight"][:, COMMON] = 1.0


COMMON = 0
"""A dimension in which all embeddings begin with one value, so that a projection can add a constant."""


def mean_decays(model: PreTrainedModel) -> list[float]:
    """The share of a state that one token leaves, at the bias of its gate, on average per layer."""
    parts = dict(model.named_parameters())
    return [
        round(float(torch.exp(-rate.exp() * nn.functional.softplus(parts[name.replace("A_log", "dt_bias")])).mean()), 4)
        for name, rate in parts.items()
        if name.endswith("A_log")
    ]


def train(family: Family, device: torch.device, output: Path) -> dict[str, Any]:
    """Train and save one pair -> its report."""
    torch.manual_seed(family.settings.seed)
    settings, begin = family.settings, time.perf_counter()
    stream = family.language.stream(400_000 if settings.target.steps < 100 else 3_000_000).to(device)
    learned, held_out = stream[:-40_000], stream[-40_000:]
    target = build_hybrid(settings) if family.is_hybrid else build_target(settings, END, PAD)
    nn.Module.to(target, device)

    def report(step: int, note: str) -> None:
        if note:
            print(f"{family.name} {time.perf_counter() - begin:.0f} s, step {step}: {note}", flush=True)

    curve = train_target(target, learned, held_out, settings.target, report)
    target.requires_grad_(False)
    nn.Module.eval(target)
    round_to_bf16(target)
    folder = output / family.name
    bundle.save_target(target, folder / "target")
    draft, draft_curve = make_draft(settings, target, learned, device, report)
    bundle.save_native_draft(draft, settings, SPECIAL, folder / "draft")
    save_prompts(held_out, settings.target.document_length, folder / "prompts.jsonl")
    figures = {
        "settings": asdict(settings),
        "language": asdict(family.language),
        "target": curve,
        "draft": draft_curve,
        "mean_decays": mean_decays(target),
        "seconds": round(time.perf_counter() - begin),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }
    bundle.write_json(folder / "report.json", figures)
    for weights in folder.rglob("*.safetensors"):
        weights.chmod(0o644)
    return figures


def make_draft(
    settings: Settings, target: PreTrainedModel, stream: Tensor, device: torch.device, report: Any
) -> tuple[Draft, list[dict[str, float]]]:
    """A draft trained on the target's own text, rounded to its stored weights."""
    rows, lengths = [], []
    for ids, prompt_lengths in continuations(target, stream, settings):
        rows.append(ids.to(torch.int16))
        lengths.append(prompt_lengths)
    texts = TextSet(torch.cat(rows), torch.cat(lengths), settings.continuations.new_tokens)
    report(0, f"{len(texts)} texts")
    draft = Draft(settings, settings.draft, MASK).to(device)
    head = Head.full(dict(target.named_parameters())["model.embed_tokens.weight"].detach())
    curve = train_draft(draft, head, target, texts, settings, settings.draft, report)
    draft.requires_grad_(False)
    round_to_bf16(draft)
    return draft, curve


def save_prompts(held_out: Tensor, every: int, path: Path) -> None:
    """Rows of token ids from held-out text, each from another part of it.

    Documents begin at multiples of `every`. If there are any, a prompt is the beginning of one that states values.
    """
    places = torch.arange(0, len(held_out) - PROMPT_LEN + 1, every)
    if every > 1:
        places = places[held_out.cpu()[places] == BEGIN]
    starts = places[torch.linspace(0, len(places) - 1, NUM_PROMPTS).long()].tolist()
    rows = [{"prompt_token_ids": held_out[start : start + PROMPT_LEN].tolist()} for start in starts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Train the chosen pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the pairs")
    parser.add_argument("--only", default="", help="train only this pair")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for every number of steps (default: 1)")
    parser.add_argument("--seconds", type=float, help="end the training of each target and draft after these seconds")
    parser.add_argument("--language", type=json.loads, default={}, help="changes of the languages, as a JSON object")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    for family in families(given.scale):
        if given.only in family.name:
            settings = replace(
                family.settings,
                target=replace(family.settings.target, seconds=given.seconds),
                draft=replace(family.settings.draft, seconds=given.seconds),
            )
            language = replace(family.language, **given.language)
            family = replace(family, settings=settings, language=language)
            train(family, torch.device(given.device), given.output)


if __name__ == "__main__":
    main()
