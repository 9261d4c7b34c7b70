"""The part that the dialects of a draft family other than DFlash share: how their checkpoints are recognised.

A family is one file in this package. It has a class with the family's settings, and one class per dialect, which
inherits these settings and the dialect. `Variant` refuses drafts of the family with other layers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import Format, named_architectures
from dflash_cli.formats.relatives import Relative


class FamilyFormat(Format):
    """A dialect of a draft family.

    family_marks   the marks of the family, in every dialect
    plain_names    names in `architectures` of drafts with DFlash's layers
    """

    priority: ClassVar[int] = 15
    family_marks: ClassVar[Relative]
    plain_names: ClassVar[frozenset[str]] = frozenset()

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """The marks of the family. A dialect with a `kind` is recognised by its key alone, any other by its absence."""
        is_own_dialect = ("speculators_model_type" in config) == (self.kind is not None)
        return self.family_marks.evidence(config, tensor_names) if is_own_dialect else None


class Variant(Relative):
    """Drafts of a family under an architecture name that `plain_names` of its dialects lacks."""

    priority: ClassVar[int] = 9
    plain_names: ClassVar[frozenset[str]] = frozenset()
    difference: ClassVar[str] = "its layers are not the ones of a DFlash draft"

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """A speculators type decides alone: engines replace the architecture names of such a config."""
        named = set(named_architectures(config))
        is_other = bool(named) and not named & self.plain_names and "speculators_model_type" not in config
        return self._architecture(config) if is_other else None
