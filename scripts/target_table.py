"""Prints docs/targets.md from the configs in tests/data/targets; what runs here is what the runtime says of each.

python scripts/target_table.py > docs/targets.md

Written with transformers 5.23.0, which decides what its code runs.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels", "tests/helpers")]

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.target_words import experts_in_words, layers_in_words
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.models.hosted_quantization import read_quantization
from dflash_runtime.models.target import find_target_runtime, target_families
from dflash_testing.hosted_models import BODY, OWN_CACHE, REFUSED, SERVED
from dflash_testing.multimodal_models import WRAPPERS
from dflash_testing.published_pairs import TARGETS, read_table, write_headers


@dataclass(frozen=True)
class Tried:
    """What is said of targets that run one way, the test that runs small ones, and the model types it has."""

    words: str
    test: str
    kinds: Collection[str]


TRIED = {
    "native": Tried("natively", "test_families.py", target_families()),
    "transformers": Tried("slowly, by transformers over our pages", "test_hosted_targets.py", SERVED),
    "transformers-cache": Tried(
        "very slowly, by transformers with its own cache", "test_own_cache_targets.py", OWN_CACHE
    ),
}
"""Whose code runs a target -> how it is tried."""

QUANTIZED = "test_hosted_quantization.py"
"""The test of packed weights."""

EIGHT_BITS = {
    "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (128, 128)),
    "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", (1, 1)),
}
"""Headers of a target whose config says that its weights are packed as fp8."""

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

`pairs` counts the published pairs in `tests/data/pairs.jsonl` of targets of that config, all of which
`tests/behaviour/test_published_pairs.py` takes through `inspect`, `validate`, `convert` and `serve-command`.

`run here` is what `generate`, `eval-acceptance` and `bench` do with a target of that config, as the runtime itself
says, or why they refuse it, with exit 5. `tried by` is the test in `tests/behaviour` that runs models of the type
({sizes}) in float32 on the CPU, against transformers' own text, taps and logits. Of packed
weights, and of what is refused, it is the test in `tests/runtime/models`, where `never_published` stands for any type
that transformers does not know. A type without a test runs if it passes the trial of
[hosted-targets.md](hosted-targets.md). On GPUs Qwen3 was run, dense and with experts at real sizes, and
of the others Qwen3.5 at the size of 4B and the models of the tests marked `gpu`.

| config | pairs | model_type | layers | experts | quantised | run here | tried by |
|---|---|---|---|---|---|---|---|
"""


@cache
def num_pairs() -> Counter[str]:
    """Config -> published pairs of targets of that config."""
    return Counter(pair.target for pair in read_table())


def how_it_runs(source: TargetSource) -> tuple[str, str]:
    """What becomes of a target that is to be run, and the tests of it."""
    folder = source.checkpoint.path
    try:
        runtime, config = find_target_runtime(source, "auto")
        quantization = read_quantization(source)
    except (UnsupportedError, CheckpointError) as error:
        text = error.message.replace(f"{folder}/config.json: ", "").replace(f"{folder}: ", "")
        reason = re.sub(r"^this runtime does not run \w+ targets: |, which this runtime does not run", "", text)
        return f"refused: {reason}", refusal_test(source, reason)
    tried = TRIED[runtime]
    test = which_test(tried, str(source.checkpoint.config["model_type"]), config.model_type)
    if quantization is None:
        return tried.words, test
    return f"{tried.words}; weights {quantization.label}", f"{test}; `{QUANTIZED}`, {quantization.method}"


def which_test(tried: Tried, whole: str, text: str) -> str:
    """The test of a multimodal model where there is one, or that of its decoder."""
    if whole in WRAPPERS:
        return f"`test_multimodal_targets.py`, {whole}"
    return f"`{tried.test}`, {text}" if text in tried.kinds else "none"


def refusal_test(source: TargetSource, reason: str) -> str:
    """The test that holds a refusal."""
    if reason.startswith("quantised weights"):
        return f"`{QUANTIZED}`"
    known = source.facts.model_type if source.facts.model_type in REFUSED else "never_published"
    return f"`test_hosted.py`, {known}"


def row(path: Path) -> str:
    """The row of a config; headers name no tensor, but for one of eight bits where the config says that there are."""
    config = json.loads(path.read_text(encoding="utf-8"))
    is_fp8 = config.get("quantization_config", {}).get("quant_method") == "fp8"
    with TemporaryDirectory() as home:
        target = Path(home) / "target"
        write_headers(target, config, EIGHT_BITS if is_fp8 else {})
        source = open_target(target)
        runs, test = how_it_runs(source)
    facts = source.facts
    cells = (
        path.stem,
        str(num_pairs()[path.stem] or ""),
        facts.model_type,
        layers_in_words(facts),
        experts_in_words(facts) or "none",
        facts.quantization or "no",
        runs,
        test,
    )
    return f"| {' | '.join(cells)} |\n"


def render() -> str:
    """The page."""
    sizes = f"{BODY['num_hidden_layers']} layers, {BODY['hidden_size']} wide with {BODY['vocab_size']} ids"
    return HEAD.replace("{sizes}", sizes) + "".join(map(row, sorted(TARGETS.glob("*.json"))))


if __name__ == "__main__":
    sys.stdout.write(render())
