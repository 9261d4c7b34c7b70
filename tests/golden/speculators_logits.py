"""Record draft logits of speculators on converted drafts, for tests/cli/conversion/test_logits.py.

Run it in a new environment:

    python -m venv spec
    spec/bin/pip install torch==2.13.0 transformers==5.19.0 numpy safetensors huggingface-hub
    spec/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    spec/bin/pip install pydantic pydantic-settings          # and the packages that its import needs
    export PYTHONPATH=.:runtime:kernels:tests
    spec/bin/python tests/golden/speculators_logits.py tests/golden/speculators_logits.json

The pairs are the random pairs of `support`, made again from their seeds, so the file holds only numbers. Features come
from a real forward of the target: speculators' id e is entry e of transformers' hidden states, which is the output of
layer e - 1. Everything is float32 on the CPU. Windows are wider than the context, because speculators measures a
window from the anchor and engines from each row.
"""

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import AutoModelForCausalLM

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_testing import checkpoints as support

PROMPT = [5, 3, 17, 8, 29, 2, 11, 23, 7, 19, 1, 13, 30, 4, 26, 9, 21, 6, 15, 28]
ANCHOR = 12


def main() -> None:
    """Convert each case, run speculators on it and write the logits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    with tempfile.TemporaryDirectory() as directory:
        cases = {name: record(Path(directory), name) for name in support.LOGIT_CASES}
    names = ("speculators", "transformers", "torch")
    document = {
        "provenance": {
            "script": "tests/golden/speculators_logits.py",
            "versions": {name: version(name) for name in names},
            "device": "cpu",
            "dtype": "float32",
        },
        "prompt": PROMPT,
        "anchor": ANCHOR,
        "logits": cases,
    }
    output.write_text(json.dumps(document) + "\n", encoding="utf-8")


def record(directory: Path, name: str) -> list[list[float]]:
    """Return draft logits [N - 1, V] of one case, after the prompt and its anchor."""
    source, target = support.make_logit_case(directory / name, name)
    request = ConversionSpec(
        to="speculators", target=open_target(target), target_reference=str(target), verifier=str(target)
    )
    converted = directory / name / "converted"
    convert_draft(plan_conversion(open_draft(source), request), converted)
    model = load(converted)
    length = len(PROMPT) + model.config.block_size + 1
    input_ids = torch.tensor([PROMPT + [ANCHOR] * (length - len(PROMPT))])
    loss_mask = torch.zeros_like(input_ids)
    loss_mask[0, len(PROMPT)] = 1
    with torch.inference_mode():
        states = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)(
            input_ids, output_hidden_states=True
        ).hidden_states
        features = torch.cat([states[layer] for layer in model.config.aux_hidden_state_layer_ids], dim=-1)
        _, logits, *_ = model._backbone_forward(
            features, input_ids, loss_mask, states[-1], torch.zeros_like(input_ids), max_anchors=1
        )
    rows: list[list[float]] = logits[0, 1:].tolist()
    return rows


def load(path: Path) -> Any:
    """speculators' own model of a converted checkpoint, with plain attention."""
    config = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(path, config=config, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
