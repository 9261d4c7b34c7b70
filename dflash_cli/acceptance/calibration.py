"""How well a draft's confidence predicts acceptance, once a logistic regression has been fitted to it.

The regression is the one by which the runtime gives rows to requests (`device/acceptance_model.py`). Half of the
prompts fit it and the other half is predicted, then the halves change places. So no prompt is predicted by a fit that
has seen it. The expected calibration error (ECE) is the mean difference between predicted and accepted share over
NUM_BINS bins with equally many tokens. A token counts only after accepted tokens, as in `draft_confidence.py`. The
online fit of a row budget is replayed over the same steps, prompt after prompt, to compare it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal.shown import Table
from dflash_runtime.metrics import COUNT
from dflash_runtime.scheduling.request_output import RequestOutput

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dflash_runtime.device.acceptance_model import AcceptanceModel

TITLE = "predicted acceptance of held-out prompts"
NUM_BINS = 15
MOST_STEPS, CONVERGED = 300, 1e-5
"""The most steps of a fit, and the largest change of a parameter after which it ends."""


@dataclass(frozen=True, slots=True)
class PredictedBlock:
    """A verify step: the draft's confidences, the predictions of a fit to other prompts, and the accepted tokens.

    `likely` are conditional: each assumes that all tokens before it are accepted.
    """

    prompt: int
    confidences: tuple[float, ...]
    likely: tuple[float, ...]
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Tokens with similar predictions."""

    num_tokens: Annotated[int, COUNT]
    predicted: Annotated[float, "mean prediction"]
    accepted: Annotated[float, "share that the target accepted"]

    @property
    def gap(self) -> float:
        """By how much the prediction is too high."""
        return self.predicted - self.accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Predictions of a logistic regression on the draft's confidence, for prompts that did not fit it."""

    ece: Annotated[float, "expected calibration error of the predictions"]
    confidence_ece: Annotated[float, "the same of the draft's confidence as it is"]
    online_ece: Annotated[float, "the same of a fit that learns during the run, as a row budget's does"]
    num_tokens: Annotated[int, COUNT, "predicted tokens"]
    num_prompts: Annotated[int, COUNT]
    bins: Annotated[tuple[ReliabilityBin, ...], "from the lowest predictions to the highest, equally many tokens each"]
    weight: Annotated[float, "of the logit of the confidence, fitted to all prompts"]
    biases: Annotated[tuple[float, ...], "by position, fitted to all prompts"]

    @property
    def table(self) -> Table:
        """Columns and rows by bin."""
        rows = [
            (
                str(item.num_tokens),
                f"{item.predicted:.3f}",
                f"{item.accepted:.3f}",
                f"{item.gap:+.3f}",
            )
            for item in self.bins
        ]
        return ("tokens", "predicted", "accepted", "difference"), rows

    @property
    def line(self) -> str:
        """The expected calibration errors in words."""
        return (
            f"expected calibration error {self.ece:.3f} over {self.num_tokens} tokens of {self.num_prompts} prompts; "
            f"{self.confidence_ece:.3f} with the draft's confidence as it is; "
            f"{self.online_ece:.3f} with the online fit of a row budget"
        )


def predict_blocks(judged: Iterable[tuple[int, RequestOutput]]) -> tuple[PredictedBlock, ...]:
    """Return all verify steps with predictions, from prompts and answers to them.

    Empty without confidences, or with fewer than two prompts.
    """
    steps = [
        (prompt, tuple(0.5 if value is None else value for value in confidences), length - 1)
        for prompt, output in judged
        for length, confidences in zip(output.acceptance_lengths, output.draft_confidences, strict=False)
    ]
    prompts = sorted({prompt for prompt, *_ in steps})
    if len(prompts) < 2:
        return ()
    features, accepted, verified = observed([(own, count) for _, own, count in steps])
    half = {prompt: place % 2 == 1 for place, prompt in enumerate(prompts)}
    is_second = accepted.new_tensor([half[prompt] for prompt, *_ in steps]).bool()
    likely = features.clone()
    for held_out in (is_second, ~is_second):
        model = fit(features[~held_out], accepted[~held_out], verified[~held_out])
        likely[held_out] = model.probabilities(features[held_out])
    return tuple(
        PredictedBlock(prompt, own, tuple(values[: len(own)]), count)
        for (prompt, own, count), values in zip(steps, likely.tolist(), strict=True)
    )


def find_calibration(blocks: Sequence[PredictedBlock]) -> Calibration | None:
    """Return the calibration of predictions; None without any."""
    if not blocks:
        return None
    import numpy as np

    steps = observed([(block.confidences, block.num_accepted) for block in blocks])
    judged = [
        (*values, place < block.num_accepted)
        for block, online in zip(blocks, predict_online(*steps).tolist(), strict=True)
        for place, values in enumerate(zip(block.likely, block.confidences, online, strict=False))
        if place <= block.num_accepted
    ]
    likely, confidences, online, labels = (np.array(column) for column in zip(*judged, strict=True))
    bins = bin_by_mass(likely, labels)
    weight, biases = fit(*steps)
    return Calibration(
        ece=expected_error(bins),
        confidence_ece=expected_error(bin_by_mass(confidences, labels)),
        online_ece=expected_error(bin_by_mass(online, labels)),
        num_tokens=len(labels),
        num_prompts=len({block.prompt for block in blocks}),
        bins=tuple(bins),
        weight=float(weight),
        biases=tuple(biases.tolist()),
    )


def observed(steps: Sequence[tuple[Sequence[float], int]]) -> "tuple[Tensor, Tensor, Tensor]":
    """Return features [S, K], accepted and verified counts [S], from confidences and accepted counts of S steps."""
    import torch

    from dflash_kernels.steps.draft_odds import features_of

    most = max(len(own) for own, _ in steps)
    padded = torch.tensor([[*own, *[0.5] * (most - len(own))] for own, _ in steps], dtype=torch.float64)
    accepted, verified = torch.tensor([(count, len(own)) for own, count in steps]).unbind(1)
    return features_of(padded), accepted, verified


def fit(features: "Tensor", num_accepted: "Tensor", num_verified: "Tensor") -> "AcceptanceModel":
    """Return the model that refits by all observations converge to: features [R, K], counts [R]."""
    from dflash_runtime.device.acceptance_model import AcceptanceModel

    model = AcceptanceModel.first(features.shape[1])
    for _ in range(MOST_STEPS):
        last, model = model, model.stepped(model.sums_of(features, num_accepted, num_verified))
        if max(float((new - old).abs().max()) for new, old in zip(model, last, strict=True)) < CONVERGED:
            break
    return model


def predict_online(features: "Tensor", num_accepted: "Tensor", num_verified: "Tensor") -> "Tensor":
    """Return the predictions [S, K] of the runtime's online fit, which sees step after step: see `fit`.

    Each step is predicted by the steps before the last refit, and the first steps by no others. The fit of an engine
    gets the steps of all its requests, so it learns from more tokens between two refits.
    """
    import torch

    from dflash_runtime.device.acceptance_model import AcceptanceModel, is_refit_due

    model, found = AcceptanceModel.first(features.shape[1]), []
    ends = [step for step in range(1, len(features)) if is_refit_due(step)]
    for part in zip(*(values.tensor_split(ends) for values in (features, num_accepted, num_verified)), strict=True):
        found.append(model.probabilities(part[0]))
        model = model.stepped(model.sums_of(*part))
    return torch.cat(found)


def bin_by_mass(likely: "np.ndarray", labels: "np.ndarray") -> list[ReliabilityBin]:
    """Return up to NUM_BINS bins of equally many predictions, in order: predictions [N], labels [N]."""
    import numpy as np

    order = np.argsort(likely, kind="stable")
    return [
        ReliabilityBin(num_tokens=len(part), predicted=float(likely[part].mean()), accepted=float(labels[part].mean()))
        for part in np.array_split(order, NUM_BINS)
        if len(part)
    ]


def expected_error(bins: Sequence[ReliabilityBin]) -> float:
    """Return the mean difference between predicted and accepted share, weighted by tokens."""
    total = sum(item.num_tokens for item in bins)
    return sum(item.num_tokens * abs(item.gap) for item in bins) / total
