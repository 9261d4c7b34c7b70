"""Print docs/reference/targets.md from the configs in tests/data/targets and the runtime's answer for each.

python scripts/target_table.py > docs/reference/targets.md

The page needs transformers 5.23.0, because the release decides which targets its code runs.
"""

import json
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

from dflash_cli.checkpoints.target_words import experts_in_words, layers_in_words
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_runtime.models.families.qwen3_5 import Qwen35Target
from dflash_runtime.models.target import target_families
from dflash_testing.hosted_models import BODY, OWN_CACHE, REFUSED, SERVED
from dflash_testing.multimodal_models import WRAPPERS
from dflash_testing.pair_ways import way_of, write_target
from dflash_testing.published_pairs import TARGETS, PublishedPair, read_table
from dflash_testing.target_sizes import TargetSizes, read_sizes


@dataclass(frozen=True)
class Tried:
    """The test that runs small models with a runtime, and the model types of that test."""

    test: str
    kinds: Collection[str]


FAMILIES = {kind: target_families()[kind] for kind in target_families()}

HYBRID = Tried(
    "test_hybrid_targets.py",
    [kind for kind, family in FAMILIES.items() if isinstance(family, type) and issubclass(family, Qwen35Target)],
)
"""The test of native families with recurrent layers, and of their multimodal models."""

UNLIKE = Tried("test_unlike_layers.py", [kind for kind in FAMILIES if kind.startswith("gemma4")])
"""The test of native families with unlike layers, and of their multimodal models."""

TRIED = {
    "native": Tried("test_families.py", FAMILIES),
    "transformers": Tried("test_hosted_targets.py", SERVED),
    "transformers-cache": Tried("test_own_cache_targets.py", OWN_CACHE),
}
"""Target runtime -> how it is tested."""

QUANTIZED, IN_FP8 = "test_hosted_quantization.py", "test_fp8_targets.py"
"""The tests of quantised weights, and of weights in FP8 that native code multiplies."""

REFUSED_WEIGHTS = "test_refused_quantization.py"
"""The test of quantised weights that are refused."""

HEAD = """# Targets

What `dflash` does with the config of each target family that drafts are published for. Printed by `python
scripts/target_table.py` from the configs in `tests/data/targets`; a test compares them. Keys and layers of these
configs are real, widths are small. `tests/golden/target_configs.py` writes them with the config classes of
transformers. Configs named by_hand follow a family's published files, because transformers had no class for it.

`inspect`, `validate`, `convert` and `serve-command` accept every config (`tests/behaviour/test_targets.py`). A family
or a kind of layer that is not listed is read in the same way, under the config's own name. A malformed config exits
with 3: a size is missing or has a wrong type, or the listed layers do not match their number. A family that does not
run here exits with 5, and only in commands that run it.

## Kinds of layers

| kind | names in configs |
|---|---|
| full | `full_attention`, `attention`; all layers that a pattern does not name |
| sliding | `sliding_attention`; `sliding_window_pattern`, `hybrid_layer_pattern`; a window alone in Mistral's family |
| chunked | `chunked_attention`; `attention_chunk_size` with `no_rope_layers` |
| latent | full attention with a `kv_lora_rank` |
| linear | `linear_attention`; `full_attention_interval`, `linear_attn_config`, `attn_type_list` |
| convolution | `conv`; `full_attn_idxs` |
| mamba | `mamba`, `mamba2`; M in `hybrid_override_pattern` |
| feed-forward | `moe`, `mlp`; E and - in `hybrid_override_pattern` |

A tapped layer may be of any kind, because its output is a hidden state. Linear layers, convolutions and Mamba keep a
state, from which rejected tokens must be removed. z-lab's code does not remove them (rule S30). A draft has its own
attention, so the target's latent attention or windows do not affect it.

The decoder's keys are read from `text_config`, `llm_config`, `language_config` and `thinker_config`, nested or not,
else from the top level.

## Families

- **pairs**: the number of published pairs in `tests/data/pairs.jsonl` with this target config.
  `tests/behaviour/test_published_pairs.py` runs `inspect`, `validate`, `convert` and `serve-command` on all of them.
- **run here**: the one answer that `inspect` and `validate` (P17) print and that `generate`, `eval-acceptance` and
  `bench` follow (`checkpoint/targets/runs_here.py`). A refusal exits with 5. Commands that read only headers
  know transformers' classes from a record of release 5.23.0, made by `scripts/transformers_types.py`.
- **tested by**: the test in `tests/behaviour` that runs models of the type ({sizes}) in float32 on the CPU and compares
  text, taps and logits with transformers. For quantised weights and refusals, the test in `tests/runtime/models`.
  There, `never_published` stands for any type that transformers does not know.

A type without a test runs if it passes the trial of [hosted targets](hosted-targets.md). On GPUs, Qwen3 was run at real
sizes, dense and with experts; also Qwen3.5 at the size of 4B, and the models of the tests marked `gpu`.

## FP8

Native families multiply matrices in FP8 (e4m3) as they are. Weights stay FP8 in memory. The dtype of each tensor
decides: modules that the config ignores are plain tensors in the file, and stay plain. The embedding, routers and
convolutions must be plain.

| `quant_method` | scales of weights | activations |
|---|---|---|
| `fp8` with `weight_block_size` | per block, powers of two; the last may be cut | a scale per block of a row |
| `fp8` | per matrix or row (`weight_scale_inv` or `weight_scale`) | a scale per row, or the stored `input_scale` |
| `compressed-tensors`, 8-bit floats | `tensor`, `channel`, `block` | `token`, `group`, static `tensor`, or none |
| `modelopt` with `quant_algo` FP8, in the config or in `hf_quant_config.json` | per matrix | the stored `input_scale` |

- Activations are rounded as the format says, as in vLLM and SGLang. A target thus computes what an inference server
  computes, but for the order of sums.
- Joined projections (q, k, v; gate and up) keep the scales of each part. Parts with stored scales of activations share
  the largest scale, as in vLLM.
- GPUs before compute capability 8.9 multiply the same numbers in 16 bits.
- Scales for a KV cache in FP8 are left out, unless `--kv-dtype fp8` stores KV in
  [FP8](../explanation/engine.md#attention).
- Other formats run through transformers, [dequantised](hosted-targets.md#quantised-weights): scales that are powers of
  two (`scale_fmt`), e5m2, blocks of other sizes than powers of two, groups of layers with different schemes, a joined
  projection of which only some parts are in FP8, and a shared expert that is computed in parts with other scales.
- compressed-tensors without `input_activations` does not round activations.

Exit code 3 refuses a malformed checkpoint, also for targets that transformers dequantises and for drafts. Headers show
these faults, so that no weights are read:

| id | fault |
|---|---|
| `scale-missing`, `scale-blocks-differ` | a weight in eight bits lacks its scale, or has scales of another shape |
| `scale-of-other-type` | a weight with scales is plain, or of another type than the config says |
| `weight-type` | a matrix is packed in another type than the config says |
| `scale-type` | scales are integers |
| `quantizations-differ` | two of the config, its decoder's config and `hf_quant_config.json` contradict each other |
| `quantization-setting` | a setting of `fp8` has a value that no reader knows |

One fault is found while scales are read, before any weight: a scale that is not a positive number (`scale-invalid`).
The exponent 255 of MXFP4 is such a scale.

`tests/runtime/models/test_fp8_targets.py` compares every form and every native family in float64 with transformers'
classes and rounded activations.

## Configs

| config | pairs | model_type | layers | experts | quantised | run here | tested by |
|---|---|---|---|---|---|---|---|
"""


PAIRS_HEAD = """
## Published pairs

Every pair in `tests/data/pairs.jsonl`, from its configs and headers. The published weights were not run. Keys that
were not available have stand-ins of the same kind.

- **way**: how the target runs with this draft, or the reason of a refusal.
- **step**: milliseconds of a step at batch 1, 8 and 32 on one H200. The weights are random and have the target's shape.
  The draft has this kind, block and number of layers. The link leads to the log. Gigabytes are the published number of
  weights, in bfloat16 unless native code multiplies them in FP8. `examples/benchmarks/pair_steps.py` measures the pairs
  that fit.

| draft | target | kind of draft | block | target's type | way | step |
|---|---|---|---|---|---|---|
"""


def pair_row(pair: PublishedPair) -> str:
    """The row of a published pair."""
    with TemporaryDirectory() as home:
        way = way_of(pair, Path(home))
    cells = (
        pair.name, pair.of, way.kind, str(pair.shape["block"]), way.target_type, way.words, steps_cell(pair, way.words)
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def steps_cell(pair: PublishedPair, way: str) -> str:
    """Times of steps with a link to their log, or the reason why the pair has no times."""
    if "refused" in way:
        return "does not run here"
    if not pair.steps:
        return sizes()[pair.of].why_not or "not measured yet"
    times = " / ".join(f"{pair.steps['ms'][batch]:.3g}" for batch in pair.steps["ms"])
    card = "" if pair.steps["card"] == "H200" else f" on {pair.steps['card']}"
    return f"[{times}](../measurements/{pair.steps['log']}){card}"


@cache
def sizes() -> dict[str, TargetSizes]:
    """Published name of a target -> sizes."""
    return read_sizes()


@cache
def num_pairs() -> Counter[str]:
    """Config -> published pairs of targets of that config."""
    return Counter(pair.target for pair in read_table())


def answer_and_test(source: TargetSource) -> tuple[str, str]:
    """How a target runs, or why it is refused, and its tests."""
    answer = how_it_runs(source)
    if answer.runtime is None:
        return answer.words, refusal_test(source, answer.reason)
    whole, kind = str(source.checkpoint.config["model_type"]), source.facts.model_type
    own = next((tried for tried in (HYBRID, UNLIKE) if answer.runtime == "native" and kind in tried.kinds), None)
    test = which_test(TRIED[answer.runtime], whole, kind) if own is None else f"`{own.test}`, {whole}"
    quantization = answer.quantization
    packed = IN_FP8 if answer.is_fast else QUANTIZED
    return answer.words, test if quantization is None else f"{test}; `{packed}`, {quantization.method}"


def which_test(tried: Tried, whole: str, text: str) -> str:
    """The test of the multimodal model if there is one, else the test of its decoder."""
    if whole in WRAPPERS:
        return f"`test_multimodal_targets.py`, {whole}"
    return f"`{tried.test}`, {text}" if text in tried.kinds else "none"


def refusal_test(source: TargetSource, reason: str) -> str:
    """The test that checks a refusal."""
    if reason.startswith("quantised weights"):
        return f"`{REFUSED_WEIGHTS}`"
    known = source.facts.model_type if source.facts.model_type in REFUSED else "never_published"
    return f"`test_hosted.py`, {known}"


def row(path: Path) -> str:
    """The row of a config."""
    with TemporaryDirectory() as home:
        source = write_target(Path(home) / "target", json.loads(path.read_text(encoding="utf-8")))
        runs, test = answer_and_test(source)
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
    """The whole page."""
    sizes = f"{BODY['num_hidden_layers']} layers, {BODY['hidden_size']} wide with {BODY['vocab_size']} ids"
    configs = "".join(map(row, sorted(TARGETS.glob("*.json"))))
    return HEAD.replace("{sizes}", sizes) + configs + PAIRS_HEAD + "".join(map(pair_row, read_table()))


if __name__ == "__main__":
    sys.stdout.write(render())
