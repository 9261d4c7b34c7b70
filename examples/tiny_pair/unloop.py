"""Train the target against loops.

A model of this size, decoded greedily, soon repeats one line forever. Any draft predicts a loop, so its acceptance
would mean little. The target therefore reads its own greedy text and learns that copying a long run of tokens is
unlikely (unlikelihood training, arXiv 1908.04319), together with more of the usual training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from .settings import UnloopRecipe
from .target import (
    Report,
    all_logits,
    generate,
    make_optimizer,
    maybe_compiled,
    next_token_loss,
    random_windows,
    set_learning_rate,
    training_precision,
)


def repeated(ids: Tensor, gram: int) -> Tensor:
    """Tokens that end a run of `gram` tokens that occurred before in the sequence: ids [B, T] -> bool [B, T]."""
    hashes = torch.zeros_like(ids)
    for back in range(gram):
        # int64 arithmetic wraps around, which a rolling hash requires.
        hashes = hashes * 1_000_003 + F.pad(ids, (gram - 1 - back, 0))[:, : ids.shape[1]] + 1
    same = hashes[:, :, None] == hashes[:, None, :]
    found = same.tril(-1).any(-1)
    found[:, : gram - 1] = False
    return found


def unlikelihood(model: Qwen3ForCausalLM, ids: Tensor, unwanted: Tensor) -> Tensor:
    """Mean over all tokens of -log(1 - p) of the unwanted tokens: ids [B, T], unwanted [B, T]."""
    logits = all_logits(model, ids[:, :-1]).float()
    chosen = logits.gather(-1, ids[:, 1:, None])[..., 0]
    probability = (chosen - logits.logsumexp(-1)).exp()
    penalty = -torch.log1p(-probability.clamp_max(1 - 1e-4))
    return (penalty * unwanted[:, 1:]).mean()


def own_text(model: Qwen3ForCausalLM, stream: Tensor, recipe: UnloopRecipe) -> tuple[Tensor, Tensor]:
    """New greedy text [B, T], and a mask of written tokens that are long copies."""
    prompts = random_windows(stream, recipe.texts, recipe.prompt_length)
    lengths = torch.full((recipe.texts,), recipe.prompt_length, device=stream.device)
    with training_precision(stream.device):
        ids = generate(model, prompts, lengths, recipe.new_tokens, 0.0)
    unwanted = torch.cat([repeated(part, recipe.gram) for part in ids.split(256)])
    unwanted[:, : recipe.prompt_length] = False
    return ids, unwanted


def copied_share(unwanted: Tensor, recipe: UnloopRecipe) -> float:
    """Share of the written tokens that are long copies."""
    return float(unwanted.sum()) / (len(unwanted) * recipe.new_tokens)


def copied_share_of_code(stream: Tensor, recipe: UnloopRecipe) -> float:
    """The same share in the training code."""
    windows = random_windows(stream, recipe.texts, recipe.prompt_length + recipe.new_tokens)
    unwanted = torch.cat([repeated(part, recipe.gram) for part in windows.split(256)])
    unwanted[:, : recipe.prompt_length] = False
    return copied_share(unwanted, recipe)


def unloop(
    model: Qwen3ForCausalLM, stream: Tensor, turning_points: Tensor, recipe: UnloopRecipe, report: Report
) -> list[dict[str, float]]:
    """Fine-tune in place -> the share of long copies in the greedy text before each refresh.

    Only tokens at turning points [V] are made unlikely. Leaving a loop within a word or before the end of a line would
    teach the model to write nonsense.
    """
    optimizer = make_optimizer(model, recipe.learning_rate, 0.0)
    data_loss = maybe_compiled(next_token_loss, stream.device)
    copy_loss = maybe_compiled(unlikelihood, stream.device)
    curve: list[dict[str, float]] = []
    for step in range(recipe.steps):
        if step % recipe.refresh_every == 0:
            texts, unwanted = own_text(model, stream, recipe)
            share = copied_share(unwanted, recipe)
            curve.append({"step": step, "copied_share": round(share, 4)})
            unwanted &= turning_points[texts]
            report(step, f"{share:.3f} of the text is copied")
        set_learning_rate(optimizer, step, recipe.steps, recipe.warmup_steps, recipe.learning_rate)
        picks = torch.randint(0, recipe.texts, (recipe.batch_size,), device=stream.device)
        windows = random_windows(stream, recipe.data_batch_size, recipe.data_length + 1)
        with training_precision(stream.device):
            loss = data_loss(model, windows) + recipe.weight * copy_loss(model, texts[picks], unwanted[picks])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    share = copied_share(own_text(model, stream, recipe)[1], recipe)
    curve.append({"step": recipe.steps, "copied_share": round(share, 4)})
    report(recipe.steps, f"{share:.3f} of the text is copied")
    return curve
