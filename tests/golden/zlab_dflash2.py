"""Record acceptance traces of z-lab's DFlash 2 on lifted drafts, for tests/behaviour/test_zlab_dflash2.py.

Run it in the environment that `zlab_traces.py` describes, from the root of the repository:

    export PYTHONPATH=tests/helpers
    zlab/bin/python tests/golden/zlab_dflash2.py dflash_cli/tiny/target dflash_cli/tiny/draft \\
        --prompts FILE.jsonl --output tests/golden/zlab_dflash2.json

Case n takes prompt n, modulo the number of prompts. A case is recorded only if no choice in it is close: neither the
target's, nor the selector's, nor the last candidate's.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from dflash import model as zlab
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config
from zlab_traces import provenance, smallest_gap

from dflash_testing.lifted_drafts import cases, lift

CLOSE = 5e-5
"""Two correct float32 programs differ by less in these logits and scores."""


def main() -> None:
    """Trace every case and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    zlab._cuda_time = lambda: 0.0  # the loop asks CUDA for the time even on the CPU
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    prompts = [json.loads(line)["prompt_token_ids"] for line in arguments.prompts.read_text().splitlines()]
    config = json.loads((arguments.draft / "config.json").read_text())
    tensors = load_file(arguments.draft / "model.safetensors")
    traces = []
    for case in cases():
        draft = load(*lift(config, tensors, case))
        prompt = prompts[case.seed % len(prompts)]
        found = trace(draft, target, prompt, arguments.max_new_tokens)
        gap = found.pop("gap")
        print(case.seed, round(gap, 5), found["acceptance_lengths"], flush=True)
        if gap > CLOSE:
            traces.append({"seed": case.seed, "noise": case.noise, "prompt_token_ids": prompt, **found})
    document = {"provenance": provenance(arguments), "traces": traces}
    arguments.output.write_text(json.dumps(document) + "\n")


def load(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Return z-lab's model of a lifted draft."""
    settings = Qwen3Config(**{key: value for key, value in config.items() if key != "architectures"})
    settings._attn_implementation = "sdpa"
    draft = zlab.DFlash2DraftModel(settings).float().eval()
    names = {name: f"{name}.weight" if name.endswith("_codebook") else name for name in tensors}
    draft.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, strict=True)
    return draft


def trace(draft: Any, target: Any, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Trace one prompt through the reference loop, without stop tokens, with the smallest gap between two choices."""
    gaps: list[float] = []
    propose, argmax = draft.propose, torch.argmax

    def watched(hidden: torch.Tensor, anchors: torch.Tensor, head: Any, temperature: float) -> Any:
        logits = draft.compute_logits(hidden, head)[0]
        count = draft.candidate_selector.top_k
        best = logits.topk(count + 1, dim=-1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))
        torch.argmax = seen  # type: ignore[assignment]
        try:
            return propose(hidden, anchors, head, temperature)
        finally:
            torch.argmax = argmax

    def seen(scores: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if scores.shape[-1] > 1:
            gaps.append(smallest_gap(scores))
        return argmax(scores, *arguments, **options)

    draft.propose = watched
    stats = zlab.dflash_generate(
        draft, target, torch.tensor([prompt]), max_new_tokens, stop_token_ids=None, return_stats=True
    )
    with torch.inference_mode():
        gaps.append(smallest_gap(target(stats.output_ids[:, :-1]).logits[0, len(prompt) - 1 :]))
    return {
        "token_ids": stats.output_ids[0].tolist()[len(prompt) :],
        "acceptance_lengths": stats.acceptance_lengths,
        "gap": min(gaps),
    }


if __name__ == "__main__":
    main()
