"""What does not fit of hand-offs, as people are told. Needs no torch."""

from collections.abc import Iterable


def without_echoes(problems: Iterable[str]) -> list[str]:
    """What does not fit, without the fields that one side lacks because it has no draft: that is said once.

    Rows that are missing come first, since they are what acceptance falls by.
    """
    found = list(dict.fromkeys(problems))
    has_no_draft = any(text in found for text in ("draft: here dflash, there none", "draft: here none, there dflash"))
    kept = [text for text in found if not (has_no_draft and (" nothing" in text))]
    return sorted(kept, key=lambda text: ": here " in text)
