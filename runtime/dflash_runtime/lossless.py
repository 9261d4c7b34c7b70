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

from dflash_runtime.device.runner import Runner
from dflash_runtime.documents import HIDDEN, computed_key
from dflash_runtime.scheduling.request import RequestOutput, SamplingParams

TOLERANCE_NATS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""The largest regret that rounding explains, by the dtype of the run."""


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
        regrets = runner.regrets(output.prompt_token_ids, output.token_ids, params)
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
