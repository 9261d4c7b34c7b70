"""A runner for many drafts of one target: texts and the target's outputs are made once and kept in this process."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.diagnosis.reading_runner import ReadingRunner
from dflash_cli.diagnosis.reading_screen import KnownTexts
from dflash_runtime.checkpoint.pair import TargetSource, check_pair
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.drafts.draft import load_draft_weights
from dflash_runtime.scheduling.request_output import RequestOutput

Prompts = tuple[tuple[int, ...], ...]


class SharedRunner(ReadingRunner):
    """A `ReadingRunner` whose target was loaded with `sound`, the draft before its fault."""

    sound: ClassVar[DraftCheckpoint]
    given: ClassVar[Sequence[list[int]]] = ()
    """Prompts to take instead of made ones."""
    _loaded: ClassVar[dict[str, Any]] = {}

    def __init__(self, draft: DraftCheckpoint, target: TargetSource, *arguments: Any, **named: Any) -> None:
        kept = self._loaded.setdefault(str(target.checkpoint.path), {})
        if not kept:
            kept.update(base=ReadingRunner(self.sound, target, *arguments, **named), made={}, written={}, read={})
        base = kept["base"]
        self._kept, self._effort, self.text_len = kept, base._effort, base.text_len
        draft.check_runnable()
        check_pair(draft, target)
        pair = base._pair
        weights = load_draft_weights(draft, pair.placement)
        limits = replace(pair.limits, num_draft_tokens=draft.config.num_draft_tokens)
        self._pair = replace(pair, draft_weights=weights, limits=limits).with_draft(draft.config)

    def make_prompts(self, numbers: range, given: Sequence[Sequence[int]] = ()) -> list[list[int]]:
        if self.given:
            return [list(self.given[number]) for number in numbers]
        made: dict[range, list[list[int]]] = self._kept["made"]
        return made.setdefault(numbers, made.get(numbers) or self._kept["base"].make_prompts(numbers, given))

    def run(self, pair: LoadedPair, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
        key, written = _key(prompts), self._kept["written"]
        if key not in written:
            base = self._kept["base"]
            written[key] = base.run(base._pair, prompts)
        found: list[RequestOutput] = written[key]
        return found

    def read(self, outputs: Sequence[RequestOutput], taps: Collection[int]) -> KnownTexts:
        key, read = _key([output.prompt_token_ids for output in outputs]), self._kept["read"]
        if key not in read:
            read[key] = KnownTexts(self._pair, outputs, range(self.target_config.num_layers))
        found: KnownTexts = read[key]
        return found


def _key(prompts: Sequence[Sequence[int]]) -> Prompts:
    return tuple(map(tuple, prompts))
