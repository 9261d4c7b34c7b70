"""Options of sampling and drafting, as bases of request classes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from dflash_cli.terminal.options import refuse_beside, values_of
from dflash_cli.terminal.parameters import DRAFTING, ESSENTIALS, MEASURING, SAMPLING, Option
from dflash_cli.terminal.requests import Request

if TYPE_CHECKING:
    from dflash_runtime.scheduling.grammar import Grammar
    from dflash_runtime.scheduling.sampling_params import SamplingParams


LookupName = Literal["ngram", "suffix"]
"""The lookups: ways to draft from a request's own text. Each is a file of the runtime's `drafts`."""

LOOKUP_NAMES: tuple[LookupName, ...] = get_args(LookupName)


@dataclass(frozen=True, kw_only=True)
class LookupOptions(Request):
    """Whether a draft model drafts, or a lookup."""

    drafting: Annotated[
        Literal["model", "ngram", "suffix"],
        Option(
            group=DRAFTING,
            help="Draft with the draft model, or look up each request's own text. ngram: the tokens after an earlier "
            "run of the same tokens. suffix: the most frequent continuation.",
        ),
    ] = "model"  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.drafting != "model":
            refuse_beside(self, OF_A_DRAFT, f"--drafting {self.drafting}, which drafts from the text alone")


OF_A_DRAFT = ("draft", "causality", "layout", "draft_sampling", "mode", "disaggregated", "calibration")
"""Options that need a draft model."""


@dataclass(frozen=True, kw_only=True)
class RivalOptions(Request):
    """What the draft competes with."""

    rivals: Annotated[
        tuple[LookupName, ...],
        Option(
            metavar="NAME,...", group=MEASURING,
            help="Also measure drafting without a draft model, from each request's own text: ngram, suffix.",
        ),
    ] = ()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeedOptions(Request):
    """The start of all random choices."""

    seed: Annotated[int, Option(min=0, max=2**63 - 1, group=SAMPLING, help="Seed for sampling.")] = 0


@dataclass(frozen=True, kw_only=True)
class TemperatureOptions(SeedOptions):
    """How the target chooses tokens, as every server understands it."""

    temperature: Annotated[
        float, Option(min=0, group=SAMPLING, help="Sampling temperature; 0 takes the most likely token.")
    ] = 0.0
    ignore_eos: Annotated[bool, Option(group=SAMPLING, help="Continue after stop tokens.")] = False


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(TemperatureOptions):
    """How the target chooses tokens."""

    top_k: Annotated[int, Option(min=0, group=SAMPLING, help="Sample from the N most likely tokens; 0 is all.")] = 0
    top_p: Annotated[
        float,
        Option(
            above=0, max=1, group=SAMPLING,
            help="Sample from the fewest tokens that together have a probability of at least X.",
        ),
    ] = 1.0  # fmt: skip
    stop_token_ids: Annotated[
        tuple[int, ...],
        Option(
            flag="--stop-token-id", min=0, metavar="ID,...", group=SAMPLING, help="More token ids that end an answer."
        ),
    ] = ()

    def sampling_params(self, max_new_tokens: int) -> "SamplingParams":
        """The runtime's parameters. Its fields have the names of these options."""
        from dflash_runtime.scheduling.sampling_params import SamplingParams

        given = values_of(self, SamplingOptions)
        return SamplingParams(
            max_new_tokens=max_new_tokens, verify_width=self.verified_rows, grammar=self.answer_grammar, **given
        )

    @property
    def answer_grammar(self) -> "Grammar | None":
        """The grammar that answers follow, or None."""
        return None

    @property
    def verified_rows(self) -> int | None:
        """The number of rows of a block to verify, including the anchor, or None for all rows."""
        return None


@dataclass(frozen=True, kw_only=True)
class DraftedOptions(Request):
    """How many tokens are drafted, and how the draft chooses them."""

    num_speculative_tokens: Annotated[
        int | None,
        Option(
            short="-k", metavar="K", min=1, group=ESSENTIALS,
            help="Draft K tokens per step. Default: the draft's block size minus one, which is also the most.",
        ),
    ] = None  # fmt: skip
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"],
        Option(
            group=DRAFTING,
            help="Draft the most likely tokens, or sample them and accept by rejection, which keeps the target's "
            "distribution.",
        ),
    ] = "greedy"


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(DraftedOptions, SamplingOptions):
    """How the draft and the target choose tokens."""


@dataclass(frozen=True, kw_only=True)
class BlockOptions(DraftingOptions):
    """Drafting with one verify width for all steps."""

    verify_width: Annotated[
        int | None,
        Option(
            min=1, group=DRAFTING,
            help="Verify the first N positions of a block, the last committed token included. The draft still fills "
            "the block, unless N is 1. Default: all K + 1.",
        ),
    ] = None  # fmt: skip

    @property
    def verified_rows(self) -> int | None:
        return self.verify_width
