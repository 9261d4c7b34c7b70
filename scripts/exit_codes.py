"""Print docs/reference/exit-codes.md from the error classes of the runtime.

python scripts/exit_codes.py > docs/reference/exit-codes.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_runtime.errors import DFlashError

MEANINGS = {
    0: "success",
    1: "a bug; the traceback is printed",
    2: "wrong use: options that contradict each other, or a prompt that cannot be served",
    3: "a gate or a validation failed, a locked checkpoint changed, a cause was found, or a checkpoint is malformed",
    4: "input that is absent or cannot be reached: missing, gated, offline, wrong revision, unreadable",
    5: "sound input that is not supported, or a conversion that would lose something",
    6: "out of memory or disk, or a pair that is too large for the free memory",
    130: "interrupted by Ctrl-C; finished results are kept",
    143: "terminated by SIGTERM; finished results are kept",
}

HEAD = """# Exit codes

Printed by `python scripts/exit_codes.py` from `dflash_runtime/errors.py`. Results go to stdout, everything else to
stderr. An error is one line. It names the mistake, its location and the expected value. A hint line names the next
command. Every error has an `id` and the fields `path`, `field`, `found`, `expected` and `hint` for programs that use
`dflash` from Python.

| code | meaning |
|---|---|
{codes}
## Errors in Python

Every error derives from `DFlashError`. Its default `id` is the name of its class in kebab-case, such as
`tensor-mismatch`. A more specific `id` names the situation.

| class | exit code | meaning |
|---|---|---|
{errors}"""


def errors(base: type[DFlashError] = DFlashError) -> Iterator[type[DFlashError]]:
    """The error classes of the runtime, each before the classes that derive from it."""
    for kind in base.__subclasses__():
        if kind.__module__ == DFlashError.__module__:
            yield kind
            yield from errors(kind)


def render() -> str:
    """The whole page."""
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in MEANINGS.items())
    rows = "".join(f"| `{kind.__name__}` | {kind.exit_code} | {_summary(kind)} |\n" for kind in errors())
    return HEAD.format(codes=codes, errors=rows)


def _summary(kind: type[DFlashError]) -> str:
    return (kind.__doc__ or "").partition("\n")[0].rstrip(".")


if __name__ == "__main__":
    sys.stdout.write(render())
