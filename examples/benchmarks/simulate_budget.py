"""Simulate a row budget without a GPU: the online fit and the choice of rows, with drawn blocks and stated step times.

    python3 examples/benchmarks/simulate_budget.py [--batches 8,32,64] [--steps 160] [--seeds 3]

Requests, acceptance and features come from `row_budget.py`; predictions, refits and choices from the runtime.
The milliseconds of a step by its mean width were measured on an H200 with the shape of Qwen3-8B. The host knows the
predictions of the step before the last one. The table compares tokens per second with whole blocks and with the best
fixed width. Tokens of a fixed width are exact expectations, so even equal choices differ from 1 by the noise of the
draws.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.acceptance_model import OnlineAcceptance
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.row_budget import BestBudget, give_rows
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.width import StepTimes
from timing.arguments import counts
from timing.forced_kinds import Feature, KindTables
from timing.report import table
from timing.shapes import BLOCK

MS = {
    8: {1: 4.4, 2: 5.4, 4: 5.6, 6: 5.9, 8: 6.9, 12: 7.2, BLOCK: 7.6},
    32: {1: 5.3, 2: 7.4, 4: 8.2, 6: 11.8, 8: 13.4, 12: 16.1, BLOCK: 19.1},
    64: {1: 6.4, 2: 9.0, 4: 14.2, 6: 19.9, 8: 23.0, 12: 29.5, BLOCK: 35.4},
}
"""Milliseconds of a step by batch size and mean width."""

KINDS = ((12.0, 1.3), (4.0,))
"""Mean tokens per step of the kinds of requests."""

FEATURES: tuple[Feature, ...] = ("perfect", "measured", "uninformative")
FAR = 20_000
"""Tokens that a request has left. A drawn block depends on them."""


def rate_of_width(means: tuple[float, ...], batch: int, width: int) -> float:
    """Expected tokens per second if all blocks have this width."""
    accepted = KindTables.draw(means, BLOCK - 1, "uninformative").accepted.clamp(max=width - 1)
    return 1000 * batch * (1 + float(accepted.double().mean())) / MS[batch][width]


def simulate(tables: KindTables, batch: int, warm: int, steps: int, seed: int) -> tuple[float, float]:
    """Tokens per second after `warm` steps, and the mean width of a step."""
    generator = torch.Generator().manual_seed(seed)
    left = FAR + torch.randint(0, 1000, (batch,), generator=generator)
    rows, most = torch.arange(batch), torch.full((batch,), BLOCK - 1)
    online, budget = OnlineAcceptance(BLOCK - 1, torch.device("cpu"), REFERENCE), BestBudget(StepTimes(MS))
    requests = [Request(index=row, prompt_token_ids=(1,), params=SamplingParams()) for row in range(batch)]
    known: list[list[list[float]]] = []
    tokens, ms, widths = 0, 0.0, 0
    for step in range(warm + steps):
        width = budget.choose(requests, BLOCK) or BLOCK
        accepted, confidences = tables.blocks(rows, left)
        odds = online.predict(confidences, most)
        verified = torch.tensor(give_rows(odds.survivals.tolist(), batch * width)) - 1
        taken = torch.minimum(accepted, verified)
        online.observe(odds.features, taken, verified)
        online.count_step()
        left = left - taken - 1
        known.append(odds.likely.tolist())
        if step:
            for request, likely in zip(requests, known.pop(0), strict=True):
                request.likely = tuple(likely)
        if step >= warm:
            tokens, ms, widths = tokens + int(taken.sum()) + batch, ms + MS[batch][width], widths + width
    return 1000 * tokens / ms, widths / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=counts, default="8,32,64")
    parser.add_argument("--warm", type=int, default=100, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    found = []
    for means in KINDS:
        for batch in given.batches:
            rates = {width: rate_of_width(means, batch, width) for width in MS[batch]}
            for feature in FEATURES:
                tables = KindTables.draw(means, BLOCK - 1, feature)
                runs = [simulate(tables, batch, given.warm, given.steps, seed) for seed in range(given.seeds)]
                rate = statistics.fmean(own for own, _ in runs)
                found.append([
                    " and ".join(f"{mean:g}" for mean in means), batch, feature, rate, rate / rates[BLOCK],
                    rate / max(rates.values()), statistics.fmean(width for _, width in runs),
                    max(rates, key=lambda width: rates[width]),
                ])  # fmt: skip
    headings = ("requests", "batch", "feature", "tokens/s", "x whole", "x best width", "rows", "best width")
    print(table(headings, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
