"""Reasons why the best reading may improve acceptance without being right.

Training has minimised the loss under the right reading. So the right reading has the lowest loss by a margin, no other
change on top of it lowers the loss much, and neither does a step of training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from dflash_cli.diagnosis.alternatives import AlternativeReading
from dflash_cli.diagnosis.reading_results import SAME_LOSS, ReadingResult, combine, is_alike
from dflash_cli.diagnosis.run_settings import ExpectedFigure, Score
from dflash_cli.diagnosis.same_part import scales_on_top

RESTORED = 0.85
"""Share of the expected draft tokens from which a draft counts as restored."""

FURTHER = 0.1
"""Share that another change may still save on top of the right reading, of its loss and of its gain. Training was not
perfect."""

ELSEWHERE = 0.25
"""Share of the gain that no other reading may save on top, however little that is of the loss of a weak draft."""

WEAKER = 1.05
"""In parts that only one family has, the ratio for halves of exchanges, and for readings that weaken or leave out the
part that the best reading puts in order. Drafts hardly miss such parts, and no order of noise lowers the loss."""

MARGIN, RATIO = 0.15, 1.2
"""Another reading rivals the best one if its loss is higher by less than MARGIN of the gain and by less than RATIO."""

HALF_GAIN = 0.2
"""One half of an exchange explains as much as the exchange if it gains all but this share of the exchange's gain."""

MARGIN_OF_SCALE, TRAINABLE_OF_SCALE = 0.2, 0.025
"""The same as MARGIN and TRAINABLE if the best reading scales a part: many scales make up for a part of any fault."""

SAME_PART = 0.8
"""Another kind of reading of the same part is a rival from this share of the gain in tokens, and so is a shorter block.
"""

MAY_GAIN = 0.4
"""Share of the gain at few anchors from which a shorter block is compared at many."""

GAIN_OF_SCALE = 1 / 3
"""The gain of a scale as a share of the accepted draft tokens. Smaller values of damaged parts gain up to a
fifth. Larger values of a draft after short training gain up to a quarter."""

TRAINABLE, MIN_SAVED = 0.04, 0.03
"""Share of the loss, and nats, that one step of training may save under the right reading.

Sound drafts of the three families save up to 0.01, drafts that lost half of their accepted tokens 0.06 to 0.5. Texts
unlike the training data also leave something to learn, so such a draft may get no cause.
"""


@dataclass(frozen=True, slots=True)
class ReadingCase:
    """The best reading, and the means to doubt it.

    own, few     scores of the config's own reading, at many anchors and at few
    screened     all readings, the lowest loss first; `on_top` of them are tried on top of the best one
    score        the score of a reading, at few anchors or at many
    train        the share of the loss that a step of training saves; None if memory does not suffice
    same_parts   other kinds of readings of the parts that the best one changes
    """

    best: ReadingResult
    reading: AlternativeReading
    own: Score
    few: Score
    screened: Sequence[ReadingResult]
    on_top: int
    score: Callable[[AlternativeReading, bool], Score]
    train: Callable[[AlternativeReading], float | None]
    expected: ExpectedFigure | None = None
    same_parts: Sequence[ReadingResult] = ()

    def doubt(self) -> str | None:
        """Why the best reading may not be right; None without a reason. The cheapest reasons come first."""
        checks = (self._of_figures, self._of_rivals, self._of_blocks, self._of_halves, self._of_more, self._of_training)
        return next((found for check in checks if (found := check()) is not None), None)

    def _of_figures(self) -> str | None:
        best = self.best
        if found := falls_short(best, self.expected):
            return found
        if best.alternative.is_scale and best.difference < GAIN_OF_SCALE * (best.own_len - 1):
            return "a scale that gains so little may make up for other damage"
        if best.score.accepted - 1 < RESTORED * (best.score.expected - 1):
            return f"the draft's own probabilities still expect {best.score.expected:.2f} tokens per step"
        return None

    def _of_rivals(self) -> str | None:
        likely = (self._at_many_anchors(item) for item in self.screened if self._rivals(item))
        rival = next((item for item in chain(likely, self.same_parts) if self._rivals(item)), None)
        return None if rival is None else f"{rival.reading} gains as much"

    def _of_blocks(self) -> str | None:
        """A shorter block also undoes what harms the later rows of a block, such as attention to rows too many.

        Its loss does not compare with the loss of other readings, so accepted tokens decide.
        """
        gain = self.best.score.accepted - self.own.accepted
        for item in self.screened:
            if item.factor != "block" or self.best.factor == "block":
                continue
            if item.score.accepted - self.few.accepted < MAY_GAIN * gain:
                continue
            if self.score(item.alternative, True).accepted - self.own.accepted >= SAME_PART * gain:
                return f"{item.reading} gains as much"
        return None

    def _at_many_anchors(self, item: ReadingResult) -> ReadingResult:
        """The reading with its loss at the anchors of the best reading. Losses at other anchors do not compare."""
        return replace(item, score=self.score(item.alternative, True))

    def _rivals(self, item: ReadingResult) -> bool:
        """Whether another cause lowers the loss about as much as the best reading."""
        best = self.best
        more = item.score.loss - best.score.loss
        if item.alternative.is_free or is_alike(item, best) or abs(more) < SAME_LOSS:
            return False
        # Scaling the layers' additions is nearly the same as dividing embeddings by the factor.
        if best.factor == "embedding" and item.alternative.is_scale:
            return False
        is_contested = item in self.same_parts
        if is_contested and item.difference >= SAME_PART * best.difference:
            return True
        ratio = WEAKER if self._weakens(item.alternative) else RATIO
        margin = MARGIN_OF_SCALE if best.alternative.is_scale or is_contested else MARGIN
        return more < margin * (self.own.loss - best.score.loss) and item.score.loss < ratio * best.score.loss

    def _weakens(self, other: AlternativeReading) -> bool:
        """Whether another reading only weakens or leaves out the part of a family that the best one puts in order."""
        best = self.best.alternative
        if best.factor == "weights" or best.factor != other.factor or is_weaker(best) or not is_weaker(other):
            return False
        return all((part, layer) in best.touches or (part, None) in best.touches for part, layer in other.touches)

    def _of_halves(self) -> str | None:
        reading = self.best.alternative
        best = self.best.score.loss
        limit = min(
            (RATIO if reading.factor == "weights" else WEAKER) * best, best + HALF_GAIN * (self.own.loss - best)
        )
        has_rival = any(self.score(replace(reading, rewrite=half), True).loss <= limit for half in reading.halves)
        return "one half of the exchange gains as much" if has_rival else None

    def _of_more(self) -> str | None:
        """Another exchange of the same kind, in other layers, is tried on top as well."""
        scales = (
            (item.name, combine(self.best.alternative, item, self.reading))
            for item in scales_on_top(self.best.alternative)
        )
        tried = chain(((item.reading, both) for item, both in self._on_top()), scales)
        found = next((name for name, both in tried if both is not None and self._saves(both)), None)
        return None if found is None else f"{found} on top of it gains more"

    def further(self) -> AlternativeReading | None:
        """The best reading together with the reading that saves most on top of it, if the saving is large.

        Only readings that put something in order are taken together: many scales make up for a part of any fault.
        """
        if is_weaker(self.best.alternative):
            return None
        tried = [
            (self.score(both, False).loss, both, item.alternative)
            for item, both in self._on_top()
            if not is_weaker(item.alternative)
        ]
        found = min(tried, key=lambda item: item[0], default=None)
        return _together(self.best.alternative, found[2], found[1]) if found and found[0] < self._most() else None

    def _on_top(self) -> Iterator[tuple[ReadingResult, AlternativeReading]]:
        best, touched = self.best, self.best.alternative.touches
        others = [item for item in self.screened if not (is_alike(item, best) and item.alternative.touches == touched)]
        others = [item for item in others if not item.alternative.is_free]
        for item in others[: self.on_top]:
            both = combine(best.alternative, item.alternative, self.reading)
            if both is not None:
                yield item, both

    def _saves(self, both: AlternativeReading) -> bool:
        return self.score(both, False).loss < self._most()

    def _most(self) -> float:
        """The loss below which a reading on top of the best one saves much."""
        before = self.score(self.best.alternative, False).loss
        gain = self.few.loss - before
        return before - max(FURTHER * gain, min(FURTHER * before, ELSEWHERE * gain))

    def _of_training(self) -> str | None:
        gain = self.train(self.best.alternative)
        if gain is None:
            return "memory does not suffice to check whether a step of training would gain more"
        most = TRAINABLE_OF_SCALE if self.best.alternative.is_scale else TRAINABLE
        if gain <= most or gain * self.best.score.loss <= MIN_SAVED:
            return None
        return f"a step of training on top of it saves another {gain:.0%} of the loss"


def _together(first: AlternativeReading, second: AlternativeReading, both: AlternativeReading) -> AlternativeReading:
    """Return `both` under the names of both readings. The halves of one exchange are not halves of both."""
    causes = dict.fromkeys((first.cause, second.cause))
    touches = first.touches | second.touches
    name = f"{first.name}, and {second.name}"
    return replace(both, name=name, cause="; ".join(causes), touches=touches, equal=(), halves=(), shift=0.0)


def is_weaker(reading: AlternativeReading) -> bool:
    """Whether a reading leaves out a part, or multiplies it by a factor."""
    return reading.is_neutral or reading.is_scale


def falls_short(best: ReadingResult, expected: ExpectedFigure | None) -> str | None:
    """The doubt that a reading does not restore the expected figure."""
    if expected is None or best.acceptance_len - 1 >= RESTORED * (expected.value - 1):
        return None
    return f"it does not restore the expected {expected.value:.2f} tokens per step"
