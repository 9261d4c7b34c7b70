"""Prints docs/targets.md from the configs in tests/data/targets.

python scripts/target_table.py > docs/targets.md
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_cli.checkpoints.opening import read_target
from dflash_cli.checkpoints.target_words import experts_in_words, layers_in_words
from dflash_runtime.config import TargetConfig, TargetFacts
from dflash_runtime.models.target import target_families

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "targets"

HEAD = """# Targets

What `dflash` makes of the config of each family of targets that drafts are published for. This page is printed by
`python scripts/target_table.py` from the configs in `tests/data/targets`, and a test holds it to them. Their keys and
layers are real and their widths small; `tests/golden/target_configs.py` writes them, with the config classes of
transformers, and those whose name begins with by_hand as families published them before there was a class.

Every one of them can be given to `inspect`, `validate`, `convert` and `serve-command`, held by
`tests/behaviour/test_targets.py`. A kind of layer or a family that is not listed is read in the same way, and named as
the config names it. What is malformed ends with exit 3: a size that is missing or of a wrong type, or layers that are
listed and are not as many as there are. A family that is not run here ends with exit 5, and only where it is to be run.

## Kinds of layers

| kind | what configs call it |
|---|---|
| full | `full_attention`, `attention`; what is left where a pattern names the others |
| sliding | `sliding_attention`; `sliding_window_pattern`, `hybrid_layer_pattern`; a window alone in Mistral's family |
| chunked | `chunked_attention`; `attention_chunk_size` with `no_rope_layers` |
| latent | full attention with a `kv_lora_rank` |
| linear | `linear_attention`; `full_attention_interval`, `linear_attn_config`, `attn_type_list` |
| convolution | `conv`; `full_attn_idxs` |
| mamba | `mamba`, `mamba2`; M in `hybrid_override_pattern` |
| feed-forward | `moe`, `mlp`; E and - in `hybrid_override_pattern` |

A tapped layer may be of any kind: its output is a hidden state all the same. Linear layers, convolutions and Mamba keep
a state, from which rejected tokens must be taken out again: z-lab's code does not, which rule S30 says. A draft has an
attention of its own, so that the target's latent attention or windows ask nothing of it.

The decoder's keys are looked for in `text_config`, `llm_config`, `language_config` and `thinker_config`, nested in one
another or not, and else at the top.

## Families

`run here` is whether a native family runs a target of that config, from plain weights; what transformers' code runs,
packed weights and multimodal models among it, is in [hosted targets](hosted-targets.md).

| config | model_type | layers | experts | quantised | run here |
|---|---|---|---|---|---|
"""


def is_run(facts: TargetFacts) -> bool:
    """Whether a family of this package serves a target with these facts."""
    return isinstance(facts, TargetConfig) and facts.model_type in target_families() and facts.quantization is None


def render() -> str:
    """The page."""
    rows = []
    for path in sorted(FOLDER.glob("*.json")):
        facts = read_target(json.loads(path.read_text(encoding="utf-8")), path)
        cells = (
            path.stem,
            facts.model_type,
            layers_in_words(facts),
            experts_in_words(facts) or "none",
            facts.quantization or "no",
            "yes" if is_run(facts) else "no",
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(render())
