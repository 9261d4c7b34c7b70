"""A draft and the dump to judge it on, checked against each other before torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_cli.acceptance.dumps.dump_format import Dump
from dflash_cli.checkpoints.checkpoint_identity import digest_ends
from dflash_cli.checkpoints.opening import NO_OVERRIDES, DraftCheckpoint, Overrides
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.device.setup.early_refusals import refuse_draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import PairMismatch, UsageError
from dflash_runtime.scheduling.limits import resolve_num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """A draft, the dump to judge it on, and optionally the target that provides embedding and head.

    The mean uses every `every`-th anchor of each text. 0 leaves the mean out, and drafts only the chained walk. The
    walks are written to `journal` in the form of an evaluation's answers. Trees of each of `trees` nodes walk the texts
    too, with at most `tree_candidates` tokens per position.

    Raises:
        PairMismatch: the draft was not made for the dump's target, or taps layers that the dump does not hold.
        UsageError: the config asks for no draft tokens, or for more than the draft was trained for.
        UnsupportedError, TensorMismatch: see `refuse_draft`.
    """

    draft: DraftCheckpoint
    draft_reference: str
    dump: Dump
    head_from: TargetSource | None = None
    config: EngineConfig
    every: int = 1
    overrides: Overrides = NO_OVERRIDES
    confidence: float = 0.95
    num_resamples: int = 10_000
    journal: Path | None = None
    force: bool = False
    trees: tuple[int, ...] = ()
    tree_candidates: int | None = None

    def __post_init__(self) -> None:
        if self.num_drafts == 0:
            raise UsageError(
                id="replay-without-drafts",
                field="--num-speculative-tokens",
                found=0,
                expected="1 or more drafted tokens",
            )
        refuse_draft(self.draft, self.config, num_tree_nodes=max(self.trees, default=0))
        _check_dump(self.draft, self.dump, self.head_from)

    @property
    def num_drafts(self) -> int:
        """K."""
        return resolve_num_drafts(self.config, self.draft.config)


def _check_dump(draft: DraftCheckpoint, dump: Dump, head_from: TargetSource | None) -> None:
    """Refuse a dump of another target than the draft's, as far as the files state their targets.

    Raises:
        PairMismatch: naming both values.
    """
    path, config = draft.checkpoint.path, draft.config
    missing = [tap for tap in config.target_layer_ids if tap not in dump.taps]
    if missing:
        raise PairMismatch(
            f"taps layers {_listed(config.target_layer_ids)}, but {dump.path} holds layers {_listed(dump.taps)}",
            id="dump-lacks-layers",
            path=path,
            field="target_layer_ids",
            found=config.target_layer_ids,
            hint="dump the target again with --taps-from DRAFT",
        )
    widths = {"hidden_size": config.feature_size, "vocab_size": config.vocab_size}
    for field, found in widths.items():
        expected = getattr(dump, field)
        if expected is not None and found != expected:
            raise PairMismatch(
                f"{field} {found}, but {dump.path} was made with {dump.target_name}, which has {field} {expected}",
                id=f"dump-{field.replace('_', '-')}",
                path=path,
                field=field,
                found=found,
                expected=str(expected),
            )
    if head_from is not None and dump.ends_digest not in (None, digest_ends(head_from)):
        raise PairMismatch(
            f"{dump.path} was made with {dump.target_name}, and its embedding or head has other weights",
            id="dump-of-another-target",
            path=head_from.checkpoint.path,
            hint="name the dump's own target with --head-from",
        )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
