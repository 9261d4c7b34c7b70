"""Record how engines' own code reads the habits of exporters, for tests/cli/engines/test_verdicts.py.

Uses the readers of engine_readings.py. Run it in the same environment, with transformers 5.23.0:

    export PYTHONPATH=.:runtime:kernels:tests/helpers:tests/golden
    zlab/bin/python tests/golden/engine_habits.py engines tests/golden/engine_habits.json

z-lab's loader runs whole. Of vLLM and SGLang, only the code that reads configs runs. The outcomes of loading weights
come from reading their code.
"""

import argparse
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
from engine_readings import Sglang, Vllm, Zlab
from transformers import AutoConfig

from dflash_testing import dialects, habits

KEPT = ("taps", "windows", "causal", "missing", "unexpected")


def read(reader: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return the values that a reader reads from a directory, or the name of its error."""
    try:
        found = reader(path)
        return {
            "head_dim": AutoConfig.from_pretrained(path).head_dim,
            **{key: found[key] for key in KEPT if key in found},
        }
    except Exception as error:
        return {"error": type(error).__name__}


def main() -> None:
    """Write every habit's draft and let each engine read it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    readers = {
        "vllm 0.33.0": Vllm(given.engines / "vllm-0.33.0").native,
        "sglang 0.5.23": Sglang(given.engines / "sglang").native,
        "z-lab 0.1.0": Zlab().native,
    }
    readings = []
    for habit in habits.CASES:
        with tempfile.TemporaryDirectory() as directory:
            draft = habits.make(Path(directory) / "draft", habit)
            readings += [
                {"habit": habit, "reader": name, "reading": read(reader, draft)} for name, reader in readers.items()
            ]
    document = {
        "provenance": {
            "script": "tests/golden/engine_habits.py",
            "wheels": ["vllm 0.33.0", "sglang 0.5.23"],
            "versions": {name: version(name) for name in ("dflash", "transformers", "torch")},
        },
        "readings": readings,
    }
    given.output.write_text(dialects.one_line_each(document), encoding="utf-8")
    print(f"{len(readings)} readings")


if __name__ == "__main__":
    main()
