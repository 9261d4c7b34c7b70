"""Record what engines' own code makes of DFlash 2 and DSpark configs, for tests/behaviour/test_family_verdicts.py.

The configs are the cases of `dflash_testing.family_cases`. `engine_verdicts` tells how to install the engines and what
of them runs; this script adds the values that only these families have. The folder of a draft states the way of
drafting, as the serve command of an engine does.

    env/bin/python tests/golden/family_verdicts.py vllm engines/vllm-0.33.0 tests/golden/family_verdicts.json
    env/bin/python tests/golden/family_verdicts.py sglang engines/sglang tests/golden/family_verdicts.json
    env/bin/python tests/golden/family_verdicts.py zlab - tests/golden/family_verdicts.json
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import engine_loaders
from engine_loaders import Reading, vllm_release
from verdict_recorder import Recorder

from dflash_testing import family_cases


def of_zlab(model: Any, config: Any, draft: Path) -> Reading:
    """The settings of z-lab's DFlash 2 model."""
    from dflash.model import _draft_value

    if type(model).__name__ == "DFlashDraftModel":
        return {"selector_rank": None}
    convolution, selector = model.layers[0].attention_conv, model.candidate_selector
    cap = _draft_value(config, "final_logit_softcapping")
    return {
        "conv_kernel_size": convolution.kernel_size,
        "conv_group_size": convolution.group_size,
        "selector_rank": selector.predecessor_codebook.embedding_dim,
        "selector_top_k": selector.top_k,
        "input_embedding_scale": float(_draft_value(config, "input_embedding_scale", 1.0)),
        "output_multiplier": float(_draft_value(config, "output_multiplier", 1.0)),
        "final_logit_softcapping": float(cap) if cap is not None and float(cap) > 0 else None,
    }


def of_vllm(model: Any, config: Any, draft: Path) -> Reading:
    """The settings of vLLM's DFlash 2 and DSpark models.

    The layout is that of DSparkSpeculator, which needs a GPU: dspark/speculator.py:69, 0.25.0 dspark/speculator.py:45.
    """
    if draft.name.startswith("dflash2"):
        convolution, selector = model.model.layers[0].attention_conv, model.model.candidate_selector
        return {
            "conv_kernel_size": convolution.taps,
            "conv_group_size": convolution.group_size,
            "selector_rank": selector.predecessor_codebook.shape[1],
            "selector_top_k": selector.top_k,
            "input_embedding_scale": model.model.input_embedding_scale,
            "output_multiplier": model.candidate_logits_processor.scale,
            "final_logit_softcapping": model.candidate_logits_processor.soft_cap,
        }
    release = vllm_release(Path(sys.argv[2]))
    if release >= (0, 27):
        is_anchor_first = getattr(config, "sample_from_anchor", True)
    else:
        is_anchor_first = not getattr(config, "dspark_bonus_anchor", False)
    confidence = getattr(model.model, "confidence_head", None)  # 0.25 has none and skips its tensors
    return {
        "sample_from_anchor": bool(is_anchor_first),
        "markov_rank": model.model.markov_head.markov_w1.embedding_dim,
        "markov_head_type": "vanilla",
        "dspark_draft_topk": getattr(config, "dspark_draft_topk", None) if release >= (0, 28) else None,
        "confidence": None if confidence is None else bool(confidence.with_markov),
        "default_drafts": getattr(config, "block_size", None) or getattr(config, "dspark_block_size", None),
    }


def of_sglang(model: Any, config: Any, draft: Path) -> Reading:
    """The settings of SGLang's DFlash 2 and DSpark models. By default it builds no confidence head."""
    if draft.name.startswith("dflash2"):
        convolution, selector = model.layers[0].attention_conv, model.candidate_selector
        if selector is None:
            return {"selector_rank": None}
        return {
            "conv_kernel_size": 0 if convolution is None else convolution.taps,
            "conv_group_size": 0 if convolution is None else convolution.group_size,
            "selector_rank": selector.predecessor_codebook.shape[1],
            "selector_top_k": selector.top_k,
        }
    heads = {"VanillaMarkov": "vanilla", "GatedMarkovHead": "gated", "RNNHead": "rnn"}
    return {
        "sample_from_anchor": model.sample_from_anchor,
        "markov_rank": model.markov_head.markov_rank,
        "markov_head_type": heads[type(model.markov_head).__name__],
        "confidence": None if model.confidence_head is None else model.confidence_head.with_markov,
    }


FAMILIES = ("dflash2", "dspark")


def is_read(case: family_cases.FamilyCase, engine: str) -> bool:
    """Whether the engine is asked: z-lab's package has no DSpark, and vLLM alone reads the speculators dialect."""
    is_native = not case.is_speculators
    return engine == "vllm" or (is_native and (engine == "sglang" or case.family == "dflash2"))


RECORDER = Recorder(
    description=__doc__,
    engines={
        "vllm": ("vllm", partial(engine_loaders.start_vllm, of_vllm), "vllm"),
        "sglang": ("sglang", partial(engine_loaders.start_sglang, of_sglang), "sglang 0.5.23"),
        "zlab": ("dflash", partial(engine_loaders.start_zlab, of_zlab), "z-lab 0.1.0"),
    },
    cases=family_cases.all_cases(),
    is_read=is_read,
    stem_of=lambda case: case.family,
    plain_of=lambda found: {family: found.get(f"{family}: as it is", {}) for family in FAMILIES},
    base_of=lambda plain, name: plain[next(family for family in FAMILIES if name.startswith(family))],
)

if __name__ == "__main__":
    RECORDER.main()
