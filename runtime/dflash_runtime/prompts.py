"""The prompts of a call, and the requests and refusals that they become."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from dflash_runtime.checkpoint.targets.rank_sizes import OPTION
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.engine import Engine
from dflash_runtime.errors import DFlashError, RequestError, UnsupportedError, UsageError
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams, check_ids
from dflash_runtime.transfers import HandoffPlan

Prompt = str | Sequence[int]
"""A prompt: text or token ids."""

UNORDERED = (bytes, bytearray, Mapping, Set)
"""Types that Python can iterate over, and that are neither a list of prompts nor a prompt."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Makes requests of prompts, for the engine of a pair."""

    pair: LoadedPair
    engine: Engine

    def read(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], handoffs: HandoffPlan | None
    ) -> tuple[list[Request], list[RequestOutput]]:
        """A request for each prompt that can be served, and an output for each other prompt. Queues nothing.

        Raises:
            UsageError: `handoffs` has another number of keys.
        """
        if handoffs is not None and len(handoffs.keys) != len(prompts):
            raise UsageError(
                field="handoffs",
                found=f"{len(handoffs.keys)} keys",
                expected=f"a key for each of {len(prompts)} prompts",
            )
        requests, refused = [], []
        for index, (prompt, item) in enumerate(zip(prompts, params, strict=True)):
            token_ids: tuple[int, ...] = ()
            try:
                if isinstance(prompt, UNORDERED):
                    found = type(prompt).__name__
                    raise RequestError(field="prompt", found=found, expected="a text or a sequence of token ids")
                if isinstance(prompt, str):
                    prompt, item = self._encode(prompt), item.with_stops(self._stop_token_ids)
                token_ids = check_ids(prompt)
                request = Request(index=index, prompt_token_ids=token_ids, params=item)
                self.engine.scheduler.check(request)
                self._check_grammar(request.params, handoffs)
                requests.append(request if handoffs is None else handoffs.apply(request))
            except DFlashError as error:
                refused.append(RequestOutput.refuse(index, token_ids, error, self.decode))
        return requests, refused

    @property
    def decode(self) -> Callable[[Sequence[int]], str] | None:
        """The function that turns token ids into text. None without a tokenizer."""
        return self.pair.tokenizer.decode if self.pair.tokenizer is not None else None

    def _check_grammar(self, params: SamplingParams, handoffs: HandoffPlan | None) -> None:
        """Compile the grammar of a request, if it has one.

        Raises:
            UnsupportedError: the pair or the call has what excludes a grammar, or see `Grammars.prepare`.
            RequestError: see `Grammars.prepare`.
        """
        if params.grammar is None:
            return
        excluded = {
            "hand-offs": handoffs is not None and handoffs.store is None,
            OPTION: self.pair.placement.ranks.size > 1,
            "--tree": self.pair.limits.num_tree_nodes > 0,
            "--drafting": self.pair.config.is_lookup,
            "a row budget": self.pair.config.row_budget,
        }
        if what := next((name for name, is_used in excluded.items() if is_used), None):
            raise UnsupportedError(
                f"a grammar does not go with {what}", id="grammar-excluded", field="grammar", hint=f"leave out {what}"
            )
        self.engine.runner.grammars.prepare(params)

    @property
    def _stop_token_ids(self) -> Sequence[int]:
        """The stop tokens of the target's configs and its tokenizer."""
        eos = self.pair.tokenizer.eos_token_id if self.pair.tokenizer is not None else None
        return self.pair.stop_token_ids if eos is None else (*self.pair.stop_token_ids, eos)

    def _encode(self, prompt: str) -> list[int]:
        """The token ids of a string.

        Raises:
            RequestError: the target lacks a tokenizer.
            CheckpointError: the tokenizer's files cannot be loaded.
        """
        if self.pair.tokenizer is None:
            raise RequestError(
                id="prompt-without-tokenizer", field="prompt", found=prompt,
                expected="token ids: the target lacks a tokenizer",
            )  # fmt: skip
        return self.pair.tokenizer.encode(prompt)


def listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts of one call.

    Raises:
        UsageError: `prompts` is one string or the token ids of one prompt instead of a list, or nothing like a list.
    """
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, (str, *UNORDERED))
    listed = list(prompts) if is_list else []
    if not is_list or (listed and all(map(_is_scalar, listed))):
        raise UsageError(
            id="prompts-not-a-list", field="prompts", found=prompts, expected="a list of prompts",
            hint="pass a list, even of one prompt: generate([prompt])",
        )  # fmt: skip
    return listed


def _is_scalar(item: object) -> bool:
    """Whether an item is an integer of any type, and not a row of a matrix, which may hold one number."""
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def params_of(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """The sampling parameters of each prompt.

    Raises:
        UsageError: there are neither one set of parameters nor one per prompt, or a value has another type.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence):
        raise UsageError(field="params", found=params, expected="SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise UsageError(
            id="other-number-of-params",
            field="params",
            found=len(params),
            expected=f"one SamplingParams, or a list of {len(prompts)}, one per prompt",
        )
    for item in params:
        if not isinstance(item, SamplingParams):
            raise UsageError(field="params", found=type(item).__name__, expected="SamplingParams")
    return params
