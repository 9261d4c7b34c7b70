"""Sizes, step counts and seeds of one training run, for the full recipe and for a smoke run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ModelShape:
    """The transformer body that target and drafts share; only the number of layers differs."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    # Qwen3's base. A reader that loses the key falls back to 10000, which the evaluation shows to hurt.
    rope_theta: float = 1_000_000.0
    lost_rope_theta: float = 10_000.0


@dataclass(frozen=True)
class TargetRecipe:
    """How the target is trained; one step sees `batch_size * sequence_length` tokens."""

    num_layers: int = 6
    steps: int = 6000
    batch_size: int = 64
    sequence_length: int = 1024
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    eval_every: int = 500


@dataclass(frozen=True)
class UnloopRecipe:
    """How the target is taught to loop less; `gram` is the length of a run of tokens that should not come twice."""

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
    """How the target's own text is generated, which is what the drafts learn from."""

    rounds: int = 28
    batch_size: int = 8192
    prompt_lengths: tuple[int, ...] = (48, 80, 112, 160)
    # Mostly greedy, since greedy decoding is the common use; the sampled share adds text without loops.
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.8, 0.0, 1.0)
    new_tokens: int = 160

    @property
    def sequence_length(self) -> int:
        return max(self.prompt_lengths) + self.new_tokens


@dataclass(frozen=True)
class DraftRecipe:
    """How one draft is built and trained; `draft_vocab_size` of None means the target's vocabulary and head."""

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


@dataclass(frozen=True)
class EvaluationRecipe:
    """What is measured on the held-out prompts."""

    prompts_per_source: int = 16
    min_prompt_tokens: int = 40
    max_prompt_tokens: int = 120
    new_tokens: int = 128
    samples_per_prompt: int = 4
    batch_size: int = 16


@dataclass(frozen=True)
class Settings:
    """One whole run."""

    seed: int = 0
    vocab_size: int = 2048
    block_size: int = 8
    # 0-based layers whose output the drafts read. Never the last layer, and not adjacent to each other at the bottom.
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
        """The anchor is the first row of a block, so a block proposes one token fewer than it has rows."""
        return self.block_size - 1


def quick_settings(seed: int) -> Settings:
    """A run of about a minute on a CPU: every stage runs, nothing is learned well."""
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
