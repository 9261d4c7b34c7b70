"""Number formats that `dflash tune --what-if` simulates. Does not import torch."""

from dataclasses import dataclass

from dflash_runtime.errors import UsageError

WEIGHT_FORMATS = ("bf16", "fp8", "int8", "int4")
"""Formats of weights, with a scale for each output."""

KV_FORMATS = ("bf16", "fp8", "fp8-head", "int8-head")
"""Formats of keys and values: with a scale of 1, as in engines without calibration, or a scale for each head."""

FORMATS = {"draft": WEIGHT_FORMATS, "kv": KV_FORMATS, "target": WEIGHT_FORMATS}
"""Part of a pair -> its formats. `kv` means keys and values of target and draft."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Formats of one or more parts of a pair: `draft=fp8`, or `draft=fp8+kv=fp8` at once."""

    formats: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return "+".join(f"{part}={name}" for part, name in self.formats)

    @property
    def file_name(self) -> str:
        """The name without characters that are special in shells and file systems."""
        return "what-if-" + self.name.replace("=", "-").replace("+", "-")


def parse_what_ifs(text: str) -> list[WhatIf]:
    """Return each what-if in `draft=fp8,kv=fp8,draft=fp8+kv=fp8` once. `all` means each format of each part alone.

    Raises:
        UsageError: naming an unknown part or format, or a part with two formats.
    """
    if text.strip() == "all":
        return [WhatIf(((part, name),)) for part, names in FORMATS.items() for name in names]
    found: dict[frozenset[tuple[str, str]], WhatIf] = {}
    for group in text.split(","):
        what_if = _parse_group(group)
        found.setdefault(frozenset(what_if.formats), what_if)
    return list(found.values())


def _parse_group(text: str) -> WhatIf:
    formats = tuple(_parse(item.strip()) for item in text.split("+"))
    if len(dict(formats)) < len(formats):
        raise UsageError(
            id="part-twice",
            field="--what-if",
            found=text.strip(),
            expected="one format of each part",
            hint="a comma separates formats of the same part: draft=fp8,draft=int4",
        )
    return WhatIf(formats)


def _parse(text: str) -> tuple[str, str]:
    part, _, name = text.partition("=")
    if name not in FORMATS.get(part, ()):
        known = "; ".join(f"{part}={'|'.join(names)}" for part, names in FORMATS.items())
        raise UsageError(
            id="unknown-what-if",
            field="--what-if",
            found=text,
            expected=f"PART=FORMAT, from {known}",
            hint="all tries each format; + joins several in one run",
        )
    return part, name
