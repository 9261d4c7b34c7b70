"""Give random bytes to each reader of files and messages from outside, in this process.

An input is identified by reader, seed and index. A reader may accept it or refuse it with a DFlashError. Everything
else is a fault: another exception, a wait past the limit, a message without an end, and accepted content that differs
from the written content.
"""

import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_runtime.errors import DFlashError
from dflash_testing.byte_mutations import mutate
from dflash_testing.deadline import deadline

LONGEST_S = 5.0
"""The longest time for one input, with other work on the machine."""

LONGEST_MESSAGE = 20_000

Read = Callable[[bytes], object]


@dataclass(frozen=True)
class Reader:
    """A reader, and sound inputs for it. `refuses` lists its errors besides DFlashError."""

    bases: Sequence[bytes]
    read: Read
    refuses: tuple[type[Exception], ...] = ()


@dataclass
class Totals:
    """How many inputs were accepted and refused, and one input of each fault, by the code line that failed."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    slowest_s: float = 0.0


def fuzz(name: str, reader: Reader, seed: int, indices: range, totals: Totals) -> None:
    """Give inputs to a reader and add the outcomes to `totals`."""
    for index in indices:
        generator = random.Random(f"{name} {seed} {index}")
        data = mutate(generator.choice(reader.bases), generator)
        started = time.perf_counter()
        try:
            with deadline(LONGEST_S):
                reader.read(data)
            outcome = "accepted"
        except DFlashError as error:
            outcome = "refused"
            if len(error.message) > LONGEST_MESSAGE:
                totals.faults.setdefault(f"{name}: message {error.id}", f"{seed}:{index}: {error.message[:300]!r}")
        except reader.refuses:
            outcome = "refused"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "fault"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{name}: {type(error).__name__} ({Path(frame.filename).name}:{frame.lineno})"
            totals.faults.setdefault(place, f"{seed}:{index}: {str(error)[:300]}")
        seconds = time.perf_counter() - started
        if seconds > LONGEST_S:  # an extension module may have taken the time
            totals.faults.setdefault(f"{name}: slow", f"{seed}:{index}: {seconds:.1f} s")
        totals.outcomes[outcome] += 1
        totals.slowest_s = max(totals.slowest_s, seconds)


def file_reader(path: Path, read: Callable[[Path], object]) -> Read:
    """A reader of bytes that writes them to a file for a reader of files."""

    def write_and_read(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return write_and_read


def as_json(value: Any) -> bytes:
    """A value as the bytes of a JSON text."""
    return json.dumps(value).encode()
