"""The grammars of a runner's requests: their parsers, the tokenizer for these, and their matchers.

A matcher belongs to a request while the request holds a row. It follows the request's committed tokens, so a request
that is preempted, or that restarts after a failed step, gets a new matcher at the same position.

Steps with grammars are not captured and run one at a time: the mask of a row depends on the tokens before it.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.checkpoint.text.tokenizer import Tokenizer
from dflash_runtime.drafts.token_masks import Matcher, ParserTokenizer, TokenMasks
from dflash_runtime.errors import DFlashError, RequestError, UnsupportedError
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.grammar import Grammar
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams

MOST_PARSED = 64
"""The most grammars that stay parsed. A request with an older grammar parses it again when it starts."""


class Grammars:
    """The grammars of one runner. A runner without such requests does nothing but ask `is_used`.

    vocab_size  the number of the target's logits
    target_ids  the target's id of each id of the draft, or None if they are equal
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, device: torch.device, target_ids: Tensor | None
    ) -> None:
        self._tokenizer, self._vocab_size, self._device, self._target_ids = tokenizer, vocab_size, device, target_ids
        self._parsed: dict[Grammar, Any] = {}
        self._matchers: dict[Request, Matcher] = {}

    def prepare(self, params: SamplingParams) -> None:
        """Parse the grammar of a request that is about to be queued.

        Raises:
            RequestError: the grammar is malformed, or the request could never end.
            UnsupportedError: llguidance is not installed, or the target's tokenizer cannot be used with it.
        """
        if params.grammar is None:
            return
        check_grammar(params)
        self._parse(params.grammar)

    @property
    def is_used(self) -> bool:
        """Whether a request with a grammar was prepared."""
        return bool(self._parsed)

    def are_in(self, batch: Batch) -> bool:
        """Whether a request of a batch has a grammar."""
        return self.is_used and self.are_of((*batch.decode, *(chunk.request for chunk in batch.chunks)))

    @staticmethod
    def are_of(requests: Iterable[Request]) -> bool:
        """Whether one of the requests has a grammar."""
        return any(request.params.grammar is not None for request in requests)

    def masks_of(self, requests: Sequence[Request], num_rows: int) -> TokenMasks | None:
        """The masks of a step of these requests, padded to `num_rows`. None if none of them has a grammar."""
        if not (self.is_used and self.are_of(requests)):
            return None
        self._matchers = {request: item for request, item in self._matchers.items() if request.row is not None}
        matchers = [self._matcher_of(request) for request in requests]
        padding = [None] * (num_rows - len(matchers))
        return TokenMasks([*matchers, *padding], self._vocab_size, self._device, self._target_ids)

    def masks_along(self, params: SamplingParams, token_ids: Sequence[int]) -> TokenMasks:
        """The masks of the rows before each token of a whole answer, which the grammar must allow."""
        masks = TokenMasks([self._new_matcher(params)], self._vocab_size, self._device, None)
        for token in token_ids[:-1]:
            masks.take(torch.tensor([token]))
        return masks

    def dead_end(self, request: Request) -> DFlashError | None:
        """Return the error if a request's grammar allows no next token; else, or without a grammar, None."""
        if request.params.grammar is None:
            return None
        try:
            matcher = self._new_matcher(request.params)
            matcher.follow(request.output_token_ids)
            matcher.mask()
        except DFlashError as error:
            return error
        return None

    def _matcher_of(self, request: Request) -> Matcher | None:
        if request.params.grammar is None:
            return None
        if request not in self._matchers:
            self._matchers[request] = self._new_matcher(request.params)
        matcher = self._matchers[request]
        matcher.follow(request.output_token_ids)
        return matcher

    def _new_matcher(self, params: SamplingParams) -> Matcher:
        assert params.grammar is not None
        return Matcher(self._parser_tokenizer, self._parse(params.grammar), params.effective_stops)

    def _parse(self, grammar: Grammar) -> Any:
        """llguidance's matcher of a grammar, which becomes the last to be forgotten."""
        known = self._parsed.pop(grammar, None)
        self._parsed[grammar] = self._parser_tokenizer.parse(grammar) if known is None else known
        if len(self._parsed) > MOST_PARSED:
            del self._parsed[next(iter(self._parsed))]
        return self._parsed[grammar]

    @cached_property
    def _parser_tokenizer(self) -> ParserTokenizer:
        """The target's tokenizer in llguidance's form.

        Raises:
            UnsupportedError: llguidance is not installed, or cannot read the tokenizer.
        """
        if self._tokenizer is None:
            raise UnsupportedError(
                "a grammar needs the target's tokenizer, which its directory lacks",
                id="grammar-without-tokenizer", field="grammar", hint="name a target directory with tokenizer.json",
            )  # fmt: skip
        try:
            return ParserTokenizer.read(self._tokenizer.library_json, self._vocab_size)
        except ValueError as error:
            raise UnsupportedError(
                f"llguidance cannot read the target's tokenizer: {error}", id="grammar-tokenizer", field="grammar"
            ) from error


def check_grammar(params: SamplingParams) -> None:
    """Refuse a grammar that could never end an answer.

    Raises:
        RequestError: the request lacks a stop token, or ignores stop tokens.
    """
    if params.grammar is not None and not params.effective_stops:
        raise RequestError(
            "an answer with a grammar ends at a stop token, which this request lacks",
            id="grammar-without-stop", field="ignore_eos" if params.ignore_eos else "stop_token_ids",
            found=params.ignore_eos or (), expected="a stop token",
        )  # fmt: skip
