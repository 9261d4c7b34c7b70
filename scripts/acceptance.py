"""Measure the bundled pairs, and fail if an acceptance length leaves its interval. An argument names the device.

The text is the target's own, so a fault in drafting or verifying shows only here. A change of the bundled files or
prompts needs new intervals: `dflash eval-acceptance tiny` prints them.
"""

import sys

from dflash_cli import evaluate

INTERVALS = {
    "tiny": (3.241, 3.659),
    "tiny:reduced": (2.610, 2.912),
    "tiny:dflash2": (3.683, 4.180),
    "tiny:dspark": (3.882, 4.452),
}
"""Draft -> 95% interval over the 64 bundled prompts, in float32 on a CPU.

The figures were 3.439, 2.753, 3.919 and 4.150.
"""


def measure(draft: str, device: str) -> float:
    """The acceptance length of a bundled draft over the bundled prompts."""
    length = evaluate(draft=draft, device=device).total.counts.acceptance_len
    assert length is not None, "the prompts take steps"
    return length


def main(device: str = "auto") -> int:
    """Print each acceptance length with its interval. Returns the exit code: 1 if one is outside."""
    is_outside = False
    for draft, (low, high) in INTERVALS.items():
        found = measure(draft, device)
        verdict = "inside" if low <= found <= high else "OUTSIDE"
        is_outside |= verdict == "OUTSIDE"
        print(f"{draft}: acceptance length {found:.3f}, {verdict} [{low:.3f}, {high:.3f}]")
    return int(is_outside)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
