"""Record what engines' own code makes of DFlash 2 and DSpark configs, for tests/behaviour/test_family_verdicts.py.

The configs are the cases of `dflash_testing.family_cases`. `engine_verdicts` tells how to install the engines and what
of them runs; this script adds the values that only these families have. The folder of a draft states the way of
drafting, as the serve command of an engine does.

    env/bin/python tests/golden/family_verdicts.py vllm engines/vllm-0.33.0 tests/golden/family_verdicts.json
    env/bin/python tests/golden/family_verdicts.py sglang engines/sglang tests/golden/family_verdicts.json
    env/bin/python tests/golden/family_verdicts.py zlab - tests/golden/family_verdicts.json
"""

import argparse
import json
import logging
import sys
import tempfile
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import engine_verdicts
from engine_verdicts import NEWEST_VLLM, Load, Reading, attempt, differs, vllm_release, with_stand_ins

from dflash_testing import checkpoints as support
from dflash_testing import config_cases, family_cases


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


STARTS = {
    "vllm": ("vllm", partial(engine_verdicts.start_vllm, of_vllm), "vllm"),
    "sglang": ("sglang", partial(engine_verdicts.start_sglang, of_sglang), "sglang 0.5.23"),
    "zlab": ("dflash", partial(engine_verdicts.start_zlab, of_zlab), "z-lab 0.1.0"),
}


def main() -> None:
    """Let one engine load every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=STARTS)
    parser.add_argument("code", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", default="", help="record only cases whose name contains this text, and print them")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.code))
    own, start, name = STARTS[arguments.engine]
    load = with_stand_ins(start, own)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = with_stand_ins(lambda: load_all(load, arguments.only, arguments.engine), own)
    if not arguments.only:
        record(arguments.output, f"vllm {arguments.code.name.partition('-')[2]}" if name == "vllm" else name, found)


def is_read(case: family_cases.FamilyCase, engine: str) -> bool:
    """Whether the engine is asked: z-lab's package has no DSpark, and vLLM alone reads the speculators dialect."""
    is_native = not case.is_speculators
    return engine == "vllm" or (is_native and (engine == "sglang" or case.family == "dflash2"))


def load_all(load: Load, only: str, engine: str) -> dict[str, Reading]:
    """Name of a case -> its reading."""
    found: dict[str, Reading] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        target.mkdir()
        support.write_config(target, config_cases.TARGET)
        for index, (name, case) in enumerate(family_cases.all_cases().items()):
            if only not in name or not is_read(case, engine):
                continue
            draft = Path(folder) / f"{case.family}-{index}"
            support.write_checkpoint(draft, case.config, support.random_arrays(case.shapes))
            found[name] = attempt(load, draft, target, folder)
            if only:
                print(name, json.dumps(found[name]))
    return found


def record(output: Path, engine: str, found: dict[str, Reading]) -> None:
    """Replace the engine's entry. A reading states only its differences from the base as it is.

    For a release of vLLM before the newest one, only the cases are kept in which it differs from the newest one.
    """
    document = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    plain = {family: found.get(f"{family}: as it is", {}) for family in ("dflash2", "dspark")}
    kept = {name: reading for name, reading in found.items() if is_kept(engine, name, reading, document)}
    entry = {
        "versions": {name: version(name) for name in ("transformers", "torch")},
        "plain": plain,
        "cases": {name: without(reading, plain[family_of(name)]) for name, reading in kept.items()},
    }
    document = dict(sorted({**document, engine: entry}.items()))
    lines = [f"{json.dumps(key)}: {engine_verdicts._lines(value)}" for key, value in document.items()]
    output.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    stops = sum("stops" in reading for reading in found.values())
    print(f"{engine}: {len(found)} cases, {stops} stop, {len(kept)} kept")


def family_of(name: str) -> str:
    return "dflash2" if name.startswith("dflash2") else "dspark"


def is_kept(engine: str, name: str, reading: Reading, document: Reading) -> bool:
    if not engine.startswith("vllm ") or engine == NEWEST_VLLM:
        return True
    newest = document[NEWEST_VLLM]
    return differs(name, reading, {**newest, "plain": newest["plain"][family_of(name)]})


def without(reading: Reading, plain: Reading) -> Reading:
    """The fields that differ from the plain ones."""
    return {key: value for key, value in reading.items() if "stops" in reading or value != plain.get(key, reading)}


if __name__ == "__main__":
    main()
