"""Sizes, step counts and seeds of a training run: the full recipe and a smoke run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ModelShape:
    """Sizes shared by target and drafts, which differ only in their number of layers."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    # Qwen3's base. A reader that loses the key uses 10000; the evaluation measures the damage.
    rope_theta: float = 1_000_000.0
    lost_rope_theta: float = 10_000.0


@dataclass(frozen=True)
class TargetRecipe:
    """Training of the target. One step reads `batch_size * sequence_length` tokens.

    Windows of the stream start at multiples of `document_length`. Training ends after `seconds` in any case.
    """

    num_layers: int = 6
    steps: int = 6000
    batch_size: int = 64
    sequence_length: int = 1024
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    eval_every: int = 500
    document_length: int = 1
    seconds: float | None = None


@dataclass(frozen=True)
class UnloopRecipe:
    """Training of the target against loops. `gram` is the length of a token run that should not be repeated."""

    steps: int = 200
    refresh_every: int = 25
    texts: int = 2048
    prompt_length: int = 64
    new_tokens: int = 160
    gram: int = 16
    batch_size: int = 256
    data_batch_size: int = 64
    data_length: int = 1024
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight: float = 0.6


@dataclass(frozen=True)
class ContinuationRecipe:
    """Generation of the target's own text, the training data of the drafts."""

    rounds: int = 28
    batch_size: int = 8192
    prompt_lengths: tuple[int, ...] = (48, 80, 112, 160)
    # Mostly greedy, because greedy decoding is the common use. Sampled text adds text without loops.
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.8, 0.0, 1.0)
    new_tokens: int = 160

    @property
    def sequence_length(self) -> int:
        return max(self.prompt_lengths) + self.new_tokens


@dataclass(frozen=True)
class SelectorShape:
    """Sizes of the parts that DFlash 2 adds to DFlash, and the share of the selector's loss."""

    kernel_size: int = 2
    group_size: int = 16
    rank: int = 64
    top_k: int = 16
    loss_share: float = 1.0


@dataclass(frozen=True)
class MarkovShape:
    """Sizes of the parts that DSpark adds to DFlash."""

    rank: int = 64


@dataclass(frozen=True)
class DraftRecipe:
    """Architecture and training of one draft. `draft_vocab_size` None means the target's vocabulary and head.

    `windows` has the attention window of each layer; without it, no layer has one. `selector` and `markov` are for the
    relatives of DFlash that have these parts. Training ends after `seconds` in any case.
    """

    num_layers: int = 3
    intermediate_size: int = 640
    draft_vocab_size: int | None = None
    steps: int = 5500
    batch_size: int = 256
    anchors_per_sequence: int = 24
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.05
    loss_decay: float = 4.0
    windows: tuple[int | None, ...] | None = None
    selector: SelectorShape = field(default_factory=SelectorShape)
    markov: MarkovShape = field(default_factory=MarkovShape)
    seconds: float | None = None


@dataclass(frozen=True)
class EvaluationRecipe:
    """Evaluation on held-out prompts."""

    prompts_per_source: int = 16
    min_prompt_tokens: int = 40
    max_prompt_tokens: int = 120
    new_tokens: int = 128
    samples_per_prompt: int = 4
    batch_size: int = 16


@dataclass(frozen=True)
class Settings:
    """All settings of one run."""

    seed: int = 0
    vocab_size: int = 2048
    block_size: int = 8
    # Tapped layers, counted from 0. Never the last layer, and the lowest ones are not adjacent.
    target_layer_ids: tuple[int, ...] = (0, 2, 3, 4)
    max_source_bytes: int | None = None
    tokenizer_bytes: int = 40_000_000
    held_out_share: float = 0.03
    shape: ModelShape = field(default_factory=ModelShape)
    target: TargetRecipe = field(default_factory=TargetRecipe)
    unloop: UnloopRecipe = field(default_factory=UnloopRecipe)
    continuations: ContinuationRecipe = field(default_factory=ContinuationRecipe)
    draft: DraftRecipe = field(default_factory=DraftRecipe)
    reduced: DraftRecipe = field(
        default_factory=lambda: DraftRecipe(num_layers=2, intermediate_size=512, draft_vocab_size=1024, steps=2500)
    )
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens per block: one fewer than its rows, because the anchor is the first row."""
        return self.block_size - 1


def quick_settings(seed: int) -> Settings:
    """Settings of a smoke run of about a minute on a CPU. Every stage runs; the models learn little."""
    draft = DraftRecipe(steps=20, batch_size=4, anchors_per_sequence=4, warmup_steps=5)
    return Settings(
        seed=seed,
        vocab_size=768,
        max_source_bytes=1_500_000,
        tokenizer_bytes=1_000_000,
        target=TargetRecipe(steps=40, batch_size=4, sequence_length=128, warmup_steps=5, eval_every=20),
        unloop=UnloopRecipe(
            steps=4,
            refresh_every=2,
            texts=8,
            prompt_length=24,
            new_tokens=40,
            batch_size=4,
            data_batch_size=4,
            data_length=128,
            warmup_steps=1,
        ),
        continuations=ContinuationRecipe(rounds=2, batch_size=16, prompt_lengths=(24, 32), new_tokens=32),
        draft=draft,
        reduced=replace(draft, num_layers=2, draft_vocab_size=256),
        evaluation=EvaluationRecipe(prompts_per_source=2, new_tokens=32, samples_per_prompt=1),
    )
