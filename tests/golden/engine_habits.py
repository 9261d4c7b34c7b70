"""Record what z-lab's loader makes of exporters' habits, for tests/cli/engines/test_verdicts.py.

python -m venv zlab
zlab/bin/pip install torch==2.13.0 transformers==5.23.0 tqdm numpy safetensors
zlab/bin/pip install --no-deps dflash==0.1.0
export PYTHONPATH=.:runtime:kernels:tests/helpers
zlab/bin/python tests/golden/engine_habits.py tests/golden/engine_habits.json
"""

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from dflash.model import DFlashDraftModel
from transformers import Qwen3Config

from dflash_testing import habits


def read(path: Path) -> dict[str, Any]:
    """What the loader takes from a directory, or the name of the error it stops with."""
    try:
        config = Qwen3Config.from_pretrained(path)
        model, info = DFlashDraftModel.from_pretrained(
            path, config=config, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        return {"error": type(error).__name__}
    layers = [layer.self_attn for layer in model.layers]
    return {
        "num_missing": len(info["missing_keys"]),
        "num_unexpected": len(info["unexpected_keys"]),
        "taps": list(model.target_layer_ids),
        "windows": [layer.sliding_window for layer in layers],
        "causal": [bool(layer.is_causal) for layer in layers],
    }


def main() -> None:
    """Write every habit's draft and read it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    transformers.logging.set_verbosity_error()
    readings = {}
    for habit in habits.CASES:
        with tempfile.TemporaryDirectory() as directory:
            readings[habit] = read(habits.make(Path(directory) / "draft", habit))
    versions = {name: version(name) for name in ("dflash", "transformers", "torch")}
    document = {"provenance": {"script": "tests/golden/engine_habits.py", "versions": versions}, "readings": readings}
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
