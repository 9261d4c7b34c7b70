"""Record what one engine makes of every case, in the JSON file of all engines' readings."""

import argparse
import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import engine_loaders
from engine_loaders import Load, Reading
from stand_ins import with_stand_ins

from dflash_testing import checkpoints as support

NEWEST_VLLM = "vllm 0.33.0"


def write_plain(draft: Path, case: Any) -> None:
    """A draft of random float32 tensors."""
    support.write_checkpoint(draft, case.config, support.random_arrays(case.shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """A set of cases with the engines that load them.

    description   the help of the script
    engines       name on the command line -> the engine's package, the function that starts it, its name in the file
    cases         name -> case, with its `config` and the `shapes` of its tensors
    is_read       whether the engine of this name is asked about a case
    stem_of       start of the name of a case's folder, which names the way of drafting
    plain_of      the readings of all cases -> the entry `plain` of the file
    base_of       (`plain`, the name of a case) -> the reading of the case's base
    write         writes the draft of a case to a folder
    """

    description: str
    engines: Mapping[str, tuple[str, Callable[[], Load], str]]
    cases: Mapping[str, Any]
    is_read: Callable[[Any, str], bool]
    stem_of: Callable[[Any], str]
    plain_of: Callable[[Mapping[str, Reading]], Reading]
    base_of: Callable[[Reading, str], Reading]
    write: Callable[[Path, Any], None] = write_plain

    def main(self) -> None:
        """Let one engine load every case."""
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("engine", choices=self.engines)
        parser.add_argument("code", type=Path)
        parser.add_argument("output", type=Path)
        only = "record only cases whose name contains this text, and print them"
        parser.add_argument("--only", default="", help=only)
        new = "record only cases that the file lacks, and keep its other cases"
        parser.add_argument("--new", action="store_true", help=new)
        arguments = parser.parse_args()
        sys.path.insert(0, str(arguments.code))
        package, start, name = self.engines[arguments.engine]
        load = with_stand_ins(start, package)
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        entry = f"vllm {arguments.code.name.partition('-')[2]}" if name == "vllm" else name
        kept = self.recorded(arguments.output, entry) if arguments.new else {}
        found = with_stand_ins(lambda: self.load_all(load, arguments.only, arguments.engine, kept), package)
        if not arguments.only:
            self.record(arguments.output, entry, found)

    def recorded(self, output: Path, engine: str) -> dict[str, Reading]:
        """Name of a case -> its whole reading in the file."""
        entry = json.loads(output.read_text(encoding="utf-8"))[engine]
        return {
            name: reading if "stops" in reading else {**self.base_of(entry["plain"], name), **reading}
            for name, reading in entry["cases"].items()
        }

    def load_all(self, load: Load, only: str, engine: str, kept: Mapping[str, Reading]) -> dict[str, Reading]:
        """Name of a case -> its reading, which is the kept one if there is one."""
        found: dict[str, Reading] = {}
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "target"
            target.mkdir()
            support.write_config(target, engine_loaders.PAIR.TARGET)
            for index, (name, case) in enumerate(self.cases.items()):
                if only not in name or not self.is_read(case, engine):
                    continue
                if name in kept:
                    found[name] = kept[name]
                    continue
                draft = Path(folder) / f"{self.stem_of(case)}-{index}"
                self.write(draft, case)
                found[name] = attempt(load, draft, target, folder)
                if only:
                    print(name, json.dumps(found[name]))
        return found

    def record(self, output: Path, engine: str, found: Mapping[str, Reading]) -> None:
        """Replace the engine's entry. A reading states only its differences from the reading of its base.

        For a release of vLLM before the newest one, only the cases are kept in which it differs from the newest one.
        """
        document = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
        plain = self.plain_of(found)
        is_older = engine.startswith("vllm ") and engine != NEWEST_VLLM
        kept = {
            name: reading
            for name, reading in found.items()
            if not is_older or self.differs(name, reading, document[NEWEST_VLLM])
        }
        entry = {
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "plain": plain,
            "cases": {name: without(reading, self.base_of(plain, name)) for name, reading in kept.items()},
        }
        document = dict(sorted({**document, engine: entry}.items()))
        lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in document.items()]
        output.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        stops = sum("stops" in reading for reading in found.values())
        print(f"{engine}: {len(found)} cases, {stops} stop, {len(kept)} kept")

    def differs(self, name: str, reading: Reading, newest: Reading) -> bool:
        """Whether a reading differs from the newest release's. Two stops are equal, whatever their errors."""
        other = newest["cases"][name]
        if "stops" in other or "stops" in reading:
            return ("stops" in other) != ("stops" in reading)
        return reading != {**self.base_of(newest["plain"], name), **other}


def attempt(load: Load, draft: Path, target: Path, folder: str) -> Reading:
    """A reading, or the kind and the beginning of the error by which the engine stops."""
    try:
        with Path(os.devnull).open("w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            return load(draft, target)
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:
        text = re.sub(" at 0x[0-9a-f]+", "", " ".join(str(error).replace(folder, "").split()))
        return {"stops": f"{type(error).__name__}: {text[:150]}"}


def without(reading: Reading, base: Reading) -> Reading:
    """The fields that differ from the fields of the base."""
    return {key: value for key, value in reading.items() if "stops" in reading or value != base.get(key, reading)}


def _lines(entry: Reading) -> str:
    cases = ",\n".join(f"{json.dumps(name)}: {json.dumps(reading)}" for name, reading in entry["cases"].items())
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(entry[key])}" for key in entry if key != "cases")
    return f'{{{head}, "cases": {{\n{cases}\n}}}}'
