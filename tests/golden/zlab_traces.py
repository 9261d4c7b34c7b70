"""Record acceptance traces of z-lab's reference loop, for tests/behaviour/test_zlab_traces.py and for any other pair.

Run it in a new environment, because PyPI's `dflash` has a script of the same name as this project:

    python -m venv zlab
    zlab/bin/pip install torch==2.13.0 transformers==5.15.0 tqdm
    zlab/bin/pip install --no-deps dflash==0.1.0
    zlab/bin/python tests/golden/zlab_traces.py TARGET DRAFT --prompts FILE.jsonl --output TRACES.json

Prompts are rows of `prompt_token_ids`. Everything is float32 on the CPU and greedy. A trace includes the smallest gap
between the two best logits of target and draft. If the gap is as small as rounding, another output is not a fault.
"""

import argparse
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from dflash import model as zlab
from transformers import AutoModelForCausalLM, Qwen3Config

WINDOW = 24

READINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"window": WINDOW, "is_causal": False},
    "sliding causal": {"window": WINDOW, "is_causal": None},
}
"""Reading of the weights -> the keys that it changes in the draft's config."""


def main() -> None:
    """Trace every reading on every prompt and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--readings", nargs="*", default=list(READINGS))
    arguments = parser.parse_args()
    zlab._cuda_time = lambda: 0.0  # the loop asks CUDA for the time even on the CPU
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    prompts = [json.loads(line)["prompt_token_ids"] for line in arguments.prompts.read_text().splitlines()]
    traces = []
    for reading in arguments.readings:
        draft = load_draft(arguments.draft, READINGS[reading])
        for prompt in prompts:
            traces.append({"reading": reading, **trace(draft, target, prompt, arguments.max_new_tokens)})
            print(reading, len(prompt), traces[-1]["acceptance_lengths"])
    document = {"provenance": provenance(arguments), "traces": traces}
    arguments.output.write_text(json.dumps(document) + "\n")


def load_draft(path: Path, changes: dict[str, Any]) -> Any:
    """Return z-lab's model of a native checkpoint, with `changes` in its config."""
    config = Qwen3Config.from_pretrained(path)
    if "is_causal" in changes:
        config.is_causal = changes["is_causal"]
    if "window" in changes:
        config.use_sliding_window = True
        config.sliding_window = changes["window"]
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return zlab.DFlashDraftModel.from_pretrained(path, config=config, dtype=torch.float32).eval()


def trace(draft: Any, target: Any, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Trace one prompt through the reference loop, without stop tokens."""
    gaps: list[float] = []
    compute_logits = type(draft).compute_logits

    def watched(self: Any, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        logits: torch.Tensor = compute_logits(self, hidden, head)
        gaps.append(smallest_gap(logits[0]))
        return logits

    draft.compute_logits = watched.__get__(draft)
    stats = zlab.dflash_generate(
        draft, target, torch.tensor([prompt]), max_new_tokens, stop_token_ids=None, return_stats=True
    )
    output_ids = stats.output_ids[0].tolist()
    with torch.inference_mode():
        logits = target(stats.output_ids[:, :-1]).logits[0, len(prompt) - 1 :]
    return {
        "prompt_token_ids": prompt,
        "token_ids": output_ids[len(prompt) :],
        "acceptance_lengths": stats.acceptance_lengths,
        "smallest_target_gap": smallest_gap(logits),
        "smallest_draft_gap": min(gaps),
    }


def smallest_gap(logits: torch.Tensor) -> float:
    """Logits [T, V] -> the smallest distance, over all rows, between a row's two best logits."""
    best = logits.float().topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the versions and settings that made these traces."""
    return {
        "loop": f"dflash {version('dflash')} (PyPI), dflash.model.dflash_generate",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "dtype": "float32",
        "device": "cpu",
        "window": WINDOW,
        "max_new_tokens": arguments.max_new_tokens,
        "target_sha256": digest(arguments.target),
        "draft_sha256": digest(arguments.draft),
    }


def digest(path: Path) -> str:
    """Return the hash of a checkpoint's weights."""
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
