"""Check that greedy output equals plain decoding, token by token.

The target reads prompt and output in one forward (teacher forcing), and each token is compared with the target's best
choice at its position. The regret is the difference of their log probabilities in nats. Rounding depends on the shape
of a batch, so a small regret is a near-tie and a large one is a bug. Source of the idea:
pegainfer-project/pegainfer#507.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dflash_runtime.device.runner import Runner
from dflash_runtime.device.storage.kv import PagedAttention
from dflash_runtime.device.storage.recurrent import recall_alone
from dflash_runtime.documents import HIDDEN, computed_key
from dflash_runtime.drafts.token_masks import TokenMasks
from dflash_runtime.models.placement import as_current
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams

TOLERANCE_NATS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""The largest regret that rounding explains, by the dtype of the run."""

REGRET_ROWS = 256
"""Rows whose logits are computed at a time. The logits of a whole text may not fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless:
    """The verdict on a set of outputs. `worst` names the token with the largest regret."""

    num_tokens: int
    num_near_ties: int
    num_wrong: int
    largest_regret_nats: float
    tolerance_nats: float
    worst: Annotated[str, HIDDEN] = ""

    @property
    @computed_key
    def is_lossless(self) -> bool:
        """Whether no token is wrong."""
        return self.num_wrong == 0

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        exact = self.num_tokens - self.num_near_ties - self.num_wrong
        return (
            f"lossless check: {exact} of {self.num_tokens} tokens are the target's best choice, {self.num_near_ties} "
            f"near-ties, {self.num_wrong} wrong; largest gap to the best choice {self.largest_regret_nats:.2g} nat "
            f"(tolerance {self.tolerance_nats:g})"
        )


def check_lossless(
    runner: Runner, outputs: Sequence[RequestOutput], dtype: torch.dtype, params: SamplingParams | None = None
) -> Lossless:
    """Compute the regret of every token of greedy outputs, under the grammar of `params` -> the verdict."""
    tolerance = TOLERANCE_NATS[dtype]
    num_ties = num_wrong = num_tokens = 0
    largest, worst = 0.0, ""
    for output in outputs:
        regrets = find_regrets(runner, output.prompt_token_ids, output.token_ids, params)
        num_tokens += len(regrets)
        num_ties += sum(0 < regret <= tolerance for regret in regrets)
        num_wrong += sum(regret > tolerance for regret in regrets)
        if regrets and max(regrets) > largest:
            largest = max(regrets)
            worst = (
                f"prompt {output.index + 1}, token {regrets.index(largest) + 1} of the answer is {largest:.3g} nat "
                "less likely than the best"
            )
    return Lossless(
        num_tokens=num_tokens,
        num_near_ties=num_ties,
        num_wrong=num_wrong,
        largest_regret_nats=largest,
        tolerance_nats=tolerance,
        worst=worst,
    )


@torch.inference_mode()
def find_regrets(
    runner: Runner, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams | None = None
) -> list[float]:
    """For each output token, how many nats more likely the target's best choice is, by the grammar of `params`.

    Runs one forward over the text. Uses no pages, does not change the state, and waits for the device.
    """
    target, device = runner.target, runner.device
    with as_current(device):
        text = torch.tensor([*prompt_ids, *output_ids], device=device)
        positions = torch.arange(len(text) - 1, device=device)
        memory = recall_alone(target.config.recurrence, len(positions), runner.placement)
        attend = PagedAttention.of_text(runner.kernels, runner.target_kv, len(positions), target.config.windows, memory)
        hidden, _ = target(text[:-1], positions, attend, ())
        rows, said = hidden[len(prompt_ids) - 1 :], text[len(prompt_ids) :]
        masks = runner.grammars.masks_along(params, output_ids) if params is not None and params.grammar else None
        parts = [slice(start, start + REGRET_ROWS) for start in range(0, len(said), REGRET_ROWS)]
        found = [_regrets_of(runner.target, rows[part], said[part], masks, part).tolist() for part in parts]
        return [float(value) for part in found for value in part]


def _regrets_of(target: Target, hidden: Tensor, token_ids: Tensor, masks: TokenMasks | None, part: slice) -> Tensor:
    """The regrets [T] of tokens [T], from the hidden states [T, hidden] of the rows before them."""
    logits = target.head(hidden)
    if masks is not None:
        logits = masks.limit(logits, part)
    log_probs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return log_probs.max(-1).values - log_probs.gather(-1, token_ids[:, None])[:, 0]
