"""The target: a small Qwen3 trained on the token stream, its tapped features, and its own text.

Axis letters: B sequences, T positions, H hidden width, K tapped layers, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from .settings import Settings, TargetRecipe

Report = Callable[[int, str], None]
P = ParamSpec("P")
R = TypeVar("R")


def build_target(settings: Settings, end: int, pad: int) -> Qwen3ForCausalLM:
    """A newly initialised target with tied embeddings."""
    shape = settings.shape
    config = Qwen3Config(
        vocab_size=settings.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=settings.target.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    return Qwen3ForCausalLM(config)


def layer_outputs(model: PreTrainedModel, ids: Tensor, upto: int) -> list[Tensor]:
    """Embedding and outputs of layers 0..upto for whole sequences: ids [B, T] -> upto + 2 tensors [B, T, H].

    Layers of Qwen3 are called one by one, so that higher layers are not computed.
    """
    if not isinstance(model, Qwen3ForCausalLM):
        return list(model.model(ids, output_hidden_states=True, use_cache=False).hidden_states[: upto + 2])
    body = model.model
    hidden = body.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = body.rotary_emb(hidden, positions)
    outputs = [hidden]
    for layer in body.layers[: upto + 1]:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        outputs.append(hidden)
    return outputs


def tapped_features(model: PreTrainedModel, ids: Tensor, taps: Sequence[int]) -> Tensor:
    """Concatenated outputs of the tapped layers: ids [B, T] -> [B, T, K*H]. Tap -1 is the embedding."""
    outputs = layer_outputs(model, ids, max(taps))
    return torch.cat([outputs[tap + 1] for tap in taps], dim=-1)


def all_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Next-token logits at every position: ids [B, T] -> [B, T, V]."""
    if not isinstance(model, Qwen3ForCausalLM):
        written: Tensor = model(ids, use_cache=False).logits
        return written
    hidden = layer_outputs(model, ids, len(model.model.layers) - 1)[-1]
    logits: Tensor = model.lm_head(model.model.norm(hidden))
    return logits


def next_token_loss(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Mean cross-entropy of every token given the earlier ones, for a window [B, T + 1]."""
    logits = all_logits(model, window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten().long())


def random_windows(stream: Tensor, batch: int, length: int, every: int = 1) -> Tensor:
    """Random windows of the stream that start at multiples of `every`: stream [T] -> [batch, length]."""
    choices = (stream.numel() - length - 1) // every + 1
    starts = torch.randint(0, choices, (batch, 1), device=stream.device) * every
    return stream[starts + torch.arange(length, device=stream.device)].long()


def fixed_windows(stream: Tensor, length: int, limit: int) -> Tensor:
    """At most `limit` equal windows, spread evenly over the stream: [T] -> [<=limit, length]."""
    whole = stream[: stream.numel() // length * length].view(-1, length)
    picks = torch.linspace(0, len(whole) - 1, min(limit, len(whole))).long()
    return whole[picks.to(whole.device)].long()


def make_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, but not for norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


@dataclass(frozen=True)
class Pace:
    """Steps of a training, and the seconds after which it ends in any case."""

    steps: int
    seconds: float | None = None

    def clock(self) -> Callable[[int], int]:
        """A function from the number of done steps to the number that counts. The clock starts here.

        If the seconds pass faster than the steps, the seconds count, so that the learning rate still falls to its end.
        """
        begin = time.perf_counter()

        def count(step: int) -> int:
            passed = (time.perf_counter() - begin) / self.seconds if self.seconds else 0.0
            return max(step, min(self.steps, math.ceil(passed * self.steps)))

        return count


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, warmup: int, peak: float) -> None:
    """Set the learning rate: linear warm-up, then a cosine down to a hundredth of the peak."""
    if step < warmup:
        scale = (step + 1) / warmup
    else:
        scale = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    for group in optimizer.param_groups:
        group["lr"] = peak * scale


def training_precision(device: torch.device) -> torch.autocast:
    """Autocast for bf16 products on a GPU; plain fp32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def maybe_compiled(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Compile the function on a GPU, which more than halves the time of these narrow layers."""
    return torch.compile(function) if device.type == "cuda" else function


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, windows: Tensor, batch_size: int) -> float:
    """Mean loss over fixed windows [B, T + 1]."""
    losses = [next_token_loss(model, batch) * len(batch) for batch in windows.split(batch_size)]
    return float(torch.stack(losses).sum()) / len(windows)


def train_target(
    model: PreTrainedModel, stream: Tensor, held_out: Tensor, recipe: TargetRecipe, report: Report
) -> list[dict[str, float]]:
    """Train in place and keep the weights with the lowest held-out loss -> the loss curve."""
    optimizer = make_optimizer(model, recipe.learning_rate, recipe.weight_decay)
    step_loss = maybe_compiled(next_token_loss, stream.device)
    windows = fixed_windows(held_out, recipe.sequence_length + 1, 256)
    curve: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    count, step = Pace(recipe.steps, recipe.seconds).clock(), -1
    while (reached := count(step + 1)) < recipe.steps:
        step += 1
        set_learning_rate(optimizer, reached, recipe.steps, recipe.warmup_steps, recipe.learning_rate)
        batch = random_windows(stream, recipe.batch_size, recipe.sequence_length + 1, recipe.document_length)
        with training_precision(stream.device):
            loss = step_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % recipe.eval_every == 0 or count(step + 1) >= recipe.steps:
            with training_precision(stream.device):
                score = held_out_loss(model, windows, recipe.batch_size)
            if not curve or score < min(point["held_out_loss"] for point in curve):
                best = {name: value.clone() for name, value in model.state_dict().items()}
            curve.append(
                {"step": step + 1, "train_loss": round(float(loss.detach()), 4), "held_out_loss": round(score, 4)}
            )
            report(step + 1, f"held-out loss {score:.3f}")
        elif step % 20 == 0:
            report(step + 1, "")
    model.load_state_dict(best)
    return curve


def round_to_bf16(model: nn.Module) -> None:
    """Round the weights to their stored values. Computing stays in fp32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def pick_tokens(logits: Tensor, temperature: float) -> Tensor:
    """Choose tokens, greedily at temperature 0, else by sampling: logits [B, V] -> ids [B]."""
    if temperature == 0.0:
        return logits.argmax(-1)
    # The maximum after adding Gumbel noise is a sample of the softmax.
    uniform = torch.rand(logits.shape, device=logits.device).clamp_min(1e-20)
    return (logits.float() / temperature - (-uniform.log()).clamp_min(1e-20).log()).argmax(-1)


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: Tensor, lengths: Tensor, new_tokens: int, temperature: float) -> Tensor:
    """Continue prompts of different lengths in one batch, without padding in front.

    All rows advance one position per step. A row within its prompt takes the prompt's token instead of the model's.
    Prompts [B, P] are padded on the right. Returns ids [B, P + new_tokens]; row i is valid up to
    lengths[i] + new_tokens.
    """
    longest = prompts.shape[1]
    ids = F.pad(prompts, (0, new_tokens))
    cache = DynamicCache(config=model.config)
    done = int(lengths.min())
    fresh = ids[:, :done]
    for position in range(done, longest + new_tokens):
        logits = model(fresh, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        chosen = pick_tokens(logits, temperature)
        if position < longest:
            chosen = torch.where(lengths > position, ids[:, position], chosen)
        ids[:, position] = chosen
        fresh = chosen[:, None]
    return ids


def continuations(model: PreTrainedModel, stream: Tensor, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's own text after random windows of the training stream.

    Yields (ids [B, T], prompt lengths [B]) per round, padded on the right to the longest sequence.
    """
    recipe = settings.continuations
    for number in range(recipe.rounds):
        length = recipe.prompt_lengths[number % len(recipe.prompt_lengths)]
        temperature = recipe.temperatures[number % len(recipe.temperatures)]
        prompts = random_windows(stream, recipe.batch_size, length, settings.target.document_length)
        lengths = torch.full((recipe.batch_size,), length, device=stream.device)
        ids = generate(model, prompts, lengths, recipe.new_tokens, temperature)
        yield F.pad(ids, (0, recipe.sequence_length - ids.shape[1])), lengths
