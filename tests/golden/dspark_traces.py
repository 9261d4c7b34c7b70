"""Record acceptance traces of DSpark, for tests/behaviour/test_dspark.py: z-lab's loop with speculators' heads.

Run it in the environment that `zlab_traces.py` describes, from the root of the repository, with speculators 0.9.0
unpacked in FOLDER (only `models/dspark/model_definitions.py` is read):

    export PYTHONPATH=tests/helpers
    zlab/bin/python tests/golden/dspark_traces.py dflash_cli/tiny/target dflash_cli/tiny/draft FOLDER \\
        --prompts FILE.jsonl --output tests/golden/dspark_traces.json

The bias of a position is the last one that speculators' head gives for the tokens chosen so far, as in its training: in
the fill-in layout the head also reads the anchor's own row. The confidence of a position is the sigmoid of speculators'
confidence head for the position's hidden state and, in two of three cases, the embedding of the token before. Case n
takes prompt n, modulo the number of prompts. A case is recorded only if no choice in it is close.
"""

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import torch
from dflash import model as zlab
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config
from zlab_traces import provenance, smallest_gap

from dflash_testing.lifted_drafts import Spark, confidence_tensors, markov_tensors, sparks

CLOSE = 5e-5
"""Two correct float32 programs differ by less in these logits."""

DIGITS = 5
"""Recorded decimals of a confidence."""


class SparkModel(zlab.DFlash2DraftModel):  # type: ignore[misc]
    """z-lab's DFlash model. In its loop the Markov head chooses the tokens."""

    def __init__(self, config: Any, case: Spark) -> None:
        zlab.DFlashDraftModel.__init__(self, config)
        self.case = case
        self.head: Any = None
        self.confidence: Any = None
        self.rows: torch.Tensor | None = None
        self.gaps: list[float] = []
        self.drafts: list[list[int]] = []
        self.confidences: list[list[float]] = []

    def forward(self, position_ids: Any, noise_embedding: Any = None, **given: Any) -> torch.Tensor:
        """In the anchor-first layout a block has one row less, and each row proposes the token after it."""
        if not self.case.samples_from_anchor:
            self.rows = super().forward(position_ids, noise_embedding=noise_embedding, **given)
            return self.rows
        rows = super().forward(position_ids[:, :-1], noise_embedding=noise_embedding[:, :-1], **given)
        self.rows = rows
        return torch.cat((rows[:, :1], rows), dim=1)

    def propose(self, hidden: torch.Tensor, anchor_ids: torch.Tensor, head: Any, temperature: float) -> Any:
        """Choose from left to right."""
        assert self.rows is not None
        base = self.compute_logits(hidden, head)
        num_before = 0 if self.case.samples_from_anchor else 1
        rows, before = self.rows, [anchor_ids] * num_before
        tokens: list[torch.Tensor] = []
        confidences: list[float] = []
        for position in range(base.shape[1]):
            before.append(tokens[-1] if tokens else anchor_ids)
            read = rows[:, : len(before)]
            bias = self.head.block_bias(prev_token_ids=torch.stack(before, 1), hidden_states=read)[:, -1]
            confidences.append(self.confidence_of(rows[:, len(before) - 1], before[-1]))
            scores = base[:, position]
            if self.case.top_k is not None:
                best = scores.topk(self.case.top_k + 1).values[:, -2:]
                self.gaps.append(float(best[0, 0] - best[0, 1]))
                scores = scores.masked_fill(scores <= best[:, 1:], -torch.inf)
            self.gaps.append(smallest_gap(scores + bias))
            tokens.append((scores + bias).argmax(-1))
        self.drafts.append(torch.stack(tokens, 1)[0].tolist())
        self.confidences.append(confidences)
        return torch.stack(tokens, 1), None, None

    def confidence_of(self, hidden: torch.Tensor, before: torch.Tensor) -> float:
        """The confidence of the token that a hidden state [1, hidden] proposes after the token `before` [1]."""
        parts = [hidden, self.head.prev_embeddings(before)] if self.case.confidence_reads_token else [hidden]
        return round(float(self.confidence(torch.cat(parts, -1)).sigmoid()), DIGITS)


def main() -> None:
    """Trace every case and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("speculators", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    zlab._cuda_time = lambda: 0.0  # the loop asks CUDA for the time even on the CPU
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    prompts = [json.loads(line)["prompt_token_ids"] for line in arguments.prompts.read_text().splitlines()]
    code = arguments.speculators / "speculators" / "models" / "dspark" / "model_definitions.py"
    parts = runpy.run_path(str(code))
    traces = []
    for case in sparks():
        draft = load(arguments.draft, case, parts)
        prompt = prompts[case.seed % len(prompts)]
        found = trace(draft, target, prompt, arguments.max_new_tokens)
        gap = found.pop("gap")
        print(case.seed, round(gap, 5), found["acceptance_lengths"], flush=True)
        if gap > CLOSE:
            traces.append({"seed": case.seed, "noise": case.noise, "prompt_token_ids": prompt, **found})
    recorded = {**provenance(arguments), "head": "speculators 0.9.0, MarkovHead.block_bias and ConfidenceHead"}
    arguments.output.write_text(json.dumps({"provenance": recorded, "traces": traces}) + "\n")


def load(path: Path, case: Spark, parts: dict[str, Any]) -> SparkModel:
    """Return z-lab's model of the draft with heads of speculators."""
    config = json.loads((path / "config.json").read_text())
    head = parts["MarkovHead"](
        verifier_vocab_size=config["vocab_size"], draft_vocab_size=config["vocab_size"], markov_rank=case.rank,
        hidden_size=config["hidden_size"], head_type=case.head_type,
    )  # fmt: skip
    head.load_state_dict(markov_tensors(case, config["hidden_size"], config["vocab_size"]))
    tensors_of_confidence = confidence_tensors(case, config["hidden_size"])
    confidence = parts["ConfidenceHead"](tensors_of_confidence["proj.weight"].shape[1])
    confidence.load_state_dict(tensors_of_confidence)
    tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    config["dflash_config"]["block_size"] = config["block_size"] = case.num_drafts + 1
    settings = Qwen3Config(**{key: value for key, value in config.items() if key != "architectures"})
    settings._attn_implementation = "sdpa"
    draft = SparkModel(settings, case).float().eval()
    draft.load_state_dict(tensors, strict=True)
    draft.head, draft.confidence = head.eval(), confidence.eval()
    assert isinstance(draft, SparkModel)
    return draft


def trace(draft: SparkModel, target: Any, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Trace one prompt through the reference loop, without stop tokens, with the smallest gap between two choices."""
    stats = zlab.dflash_generate(
        draft, target, torch.tensor([prompt]), max_new_tokens, stop_token_ids=None, return_stats=True
    )
    with torch.inference_mode():
        gap = smallest_gap(target(stats.output_ids[:, :-1]).logits[0, len(prompt) - 1 :])
    return {
        "token_ids": stats.output_ids[0].tolist()[len(prompt) :],
        "acceptance_lengths": stats.acceptance_lengths,
        "drafts": draft.drafts,
        "confidences": draft.confidences,
        "gap": min(gap, *draft.gaps),
    }


if __name__ == "__main__":
    main()
