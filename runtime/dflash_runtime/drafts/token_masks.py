"""The position of answers in their grammars, and the masks of one step, for draft tokens and for the target's rows.

Row i of a block is verified after i draft tokens. So the mask of row i is also the mask of draft token i + 1. The masks
of a row exist as soon as the draft tokens before it are chosen, and the host must know these: each row waits for the
device.

Axis letters: R requests, W verified rows, V vocabulary of the target, V' of the draft, B bytes of one bit per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dflash_runtime.errors import DFlashError
from dflash_runtime.scheduling.grammar import Grammar, import_llguidance

Bits = np.ndarray[Any, np.dtype[np.uint8]]
"""One bit per token of the target, [B] uint8. The lowest bit of a byte is its first token."""

END = "<|end of the grammar|>"


@dataclass(frozen=True, slots=True)
class ParserTokenizer:
    """A target's tokenizer in llguidance's form.

    llguidance wants one token that ends a text. The stop tokens differ by request and may be text elsewhere, so the
    tokenizer gets a token of its own for this, which no answer has.
    """

    parser: Any
    end_id: int
    vocab_size: int  # of the target's logits

    @classmethod
    def read(cls, library_json: str, vocab_size: int) -> Self:
        """Read a tokenizer as the tokenizers library writes it.

        Raises:
            ValueError: llguidance cannot read it.
        """
        from tokenizers import Tokenizer

        library = Tokenizer.from_str(library_json)
        library.add_special_tokens([END])
        end_id = library.token_to_id(END)
        assert end_id is not None
        parser = import_llguidance().LLTokenizer(
            library.to_str(), n_vocab=max(vocab_size, end_id + 1), eos_token=end_id
        )
        return cls(parser, end_id, vocab_size)

    def parse(self, grammar: Grammar) -> Any:
        """Return llguidance's matcher of a grammar. `Matcher` copies it for each answer.

        Raises:
            RequestError: see `Grammar.compiled`.
        """
        return import_llguidance().LLMatcher(self.parser, grammar.compiled(), log_level=0)


class Matcher:
    """The position of one answer in its grammar: after its committed tokens and, within a step, its draft tokens.

    A stop token is not a part of the text: it is allowed where the text may end, and nothing follows it.

    `parsed` is from `ParserTokenizer.parse`.
    """

    def __init__(self, tokenizer: ParserTokenizer, parsed: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._parsed, self._stop_ids = tokenizer, parsed, list(stop_ids)
        self._begin()

    def _begin(self) -> None:
        self._matcher = self._parsed.deep_copy()
        self._num_committed = 0
        self._num_drafted = 0
        self.has_ended = False

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go to the end of an answer's committed tokens, which begin with the tokens of earlier calls.

        Raises:
            DFlashError: the grammar has no such text, or is too complex to parse it.
        """
        self.forget_drafts()
        new = list(token_ids[self._num_committed :])
        if new and new[-1] in self._stop_ids:
            self.has_ended = True
            new.pop()
        if not self._matcher.consume_tokens(new):
            raise self._failure(self._matcher.get_error())
        self._num_committed = len(token_ids)

    def forget_drafts(self) -> None:
        """Go back to the end of the committed tokens, or to the beginning if the draft tokens met a dead end."""
        if self._num_drafted and self._matcher.is_error():  # such a matcher stays where it is
            self._begin()
        elif self._num_drafted:
            self._matcher.rollback(self._num_drafted)
        self._num_drafted, self.has_ended = 0, False

    def try_draft(self, token_id: int) -> bool:
        """Go past a draft token if the grammar allows it, as it does anything after a stop. Returns whether it does."""
        if self.has_ended:
            return True
        if token_id in self._stop_ids:
            self.has_ended = bool(self._matcher.is_accepting())
            return self.has_ended
        is_allowed = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        self._num_drafted += is_allowed
        return is_allowed

    def mask(self) -> Bits | None:
        """The tokens that may come next, one bit each [B]. None after a stop token, when nothing matters any more.

        Raises:
            DFlashError: no token may come next, because the vocabulary lacks a token that the grammar needs here.
        """
        if self.has_ended:
            return None
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = bits[: self._tokenizer.vocab_size]
        allowed[self._tokenizer.end_id : self._tokenizer.end_id + 1] = 0
        allowed[self._stop_ids] = self._matcher.is_accepting()
        if self._matcher.is_error() or not allowed.any():
            raise self._failure(self._matcher.get_error() or "the vocabulary lacks a token that could come next")
        return np.packbits(allowed, bitorder="little")

    def _failure(self, reason: str) -> DFlashError:
        text = (reason.splitlines() or ["unknown"])[0]
        return DFlashError(f"the answer cannot follow its grammar: {text}", id="grammar-failed")


class TokenMasks:
    """The masks of one step. Draft tokens are chosen from left to right: `allow`, a choice, `take`, and so on.

    matchers    the position of each request in its grammar, or None for a request without one
    target_ids  the target's id of each id of the draft [V'], or None if they are equal
    """

    def __init__(
        self, matchers: Sequence[Matcher | None], vocab_size: int, device: torch.device, target_ids: Tensor | None
    ) -> None:
        self._matchers, self._vocab_size, self._device, self._target_ids = matchers, vocab_size, device, target_ids
        self._is_open = [matcher is not None for matcher in matchers]  # False after a forbidden token or a dead end
        self._rows: list[Tensor] = []  # the mask of each row so far, [R, V] bool
        self._add_row([None if matcher is None else matcher.mask() for matcher in matchers])

    def allow(self, logits: Tensor) -> Tensor:
        """Return draft logits [R, V'] of the next position with minus infinity for every forbidden token.

        If every id of the draft is forbidden, the request's row stays as it is. The target then rejects the choice.
        """
        allowed = self._rows[-1] if self._target_ids is None else self._rows[-1][:, self._target_ids]
        return logits.masked_fill(~(allowed | ~allowed.any(-1, keepdim=True)), -torch.inf)

    def take(self, draft_ids: Tensor) -> None:
        """Put the choices [R] of the draft, ids of the draft, at the next position. Waits for the device."""
        ids = draft_ids if self._target_ids is None else self._target_ids[draft_ids]
        self._add_row([self._mask_after(place, token) for place, token in enumerate(ids.tolist())])

    def limit(self, logits: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return the target's logits [R * W, V] with minus infinity for every token that a row's grammar forbids.

        Rows after a forbidden draft token or a stop token are not masked: their tokens are never committed. In a row
        at a dead end of the grammar, no logit is finite. `rows` chooses among the W rows.
        """
        allowed = torch.stack(self._rows[rows], dim=1)
        return logits.masked_fill(~allowed.flatten(0, 1), -torch.inf)

    def _mask_after(self, place: int, token: int) -> Bits | None:
        """The mask after one more draft token of a request, or None if nothing is masked any more.

        A draft token may lead to a dead end, in which nothing is allowed. It ends the answer only if it is accepted.
        """
        matcher = self._matchers[place]
        if matcher is None or not self._is_open[place]:
            return None
        self._is_open[place] = matcher.try_draft(token)
        try:
            return matcher.mask() if self._is_open[place] else None
        except DFlashError:
            self._is_open[place] = False
            return np.zeros(-(-self._vocab_size // 8), np.uint8)

    def _add_row(self, masks: Sequence[Bits | None]) -> None:
        """Send the masks of a row. None allows everything."""
        packed = np.full((len(masks), -(-self._vocab_size // 8)), 255, dtype=np.uint8)
        for place, mask in enumerate(masks):
            if mask is not None:
                packed[place] = mask
        sent = torch.from_numpy(packed).to(self._device)
        bits = (sent[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=self._device)) & 1
        self._rows.append(bits.flatten(1).bool()[:, : self._vocab_size])
