"""Refusals before anything is loaded: each command that cannot run ends before it imports torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.documents import to_json
from dflash_runtime.kv_transfer.handoff import Handoff, HandoffHeader, TensorSpec
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.command_line import IMPORT_PATHS

RUNTIMES = ("auto", "native", "transformers", "transformers-cache")
PROMPTED = ("generate", "bench", "tune", "eval-acceptance")
"""Commands that run prompts with a pair."""

REFUSED: Mapping[int, tuple[list[str], ...]] = {
    2: (
        ["generate", "x", "-k", "8"], ["generate", "x", "--verify-width", "9"],
        ["generate", "x", "--stop-token-id", "99999"], ["generate", "x", "--max-model-len", "9999"],
        ["bench", "-k", "8"], ["tune", "-k", "3,8"], ["eval-acceptance", "-k", "8"],
        ["eval-acceptance", "--workers", "0"], ["dump", "tiny", "--taps", "6", "--output", "dump"],
        ["generate", "x", "--device", "cudaa"], ["bench", "--device", "tpu"], ["generate", "x", "--dtype", "float16"],
        ["generate", "x", "--top-p", "3"], ["generate", "--dataset", "humanevl"], ["tune", "-e", "vlm"],
        ["eval-acceptance", "--context-lengths", "2048"], ["eval-acceptance", "--verify-width", "99"],
        ["validate", "tiny", "-e", "vlm"], ["convert", "tiny", "there.jsonl", "--to", "native"],
        ["serve-command", "tiny", "-e", "vlm"], ["probe", "http://127.0.0.1:9", "-e", "vlm"], ["explain", "C999"],
        # a pair that is not complete, or not of these roles
        *([name, "-t", "tiny"] for name in ("bench", "tune", "eval-acceptance")), ["generate", "x", "-t", "tiny"],
        ["generate", "x", "-d", "copy"], ["bench", "copy"], ["tune", "copy"], ["eval-acceptance", "copy"],
        ["diagnose", "copy"], ["validate", "copy", "--level", "run"],
        ["generate", "x", "-d", "copy", "-t", "tiny:dspark"],
        # options that exclude or need each other
        ["generate", "x", "--tree", "8", "--draft-sampling", "probabilistic"],
        ["generate", "x", "-k", "0", "--tree", "4"],
        ["eval-acceptance", "--tree", "8", "--draft-sampling", "probabilistic"], ["tune", "--tree", "8", "--budget"],
        ["eval-acceptance", "--gate", "lower"], ["probe", "http://127.0.0.1:9", "--gate", "lower"],
        ["generate", "x", "--thinking", "on"], ["eval-acceptance", "--exact-match", "both"],
        ["bench", "--temperature", "1"], ["bench", "--min-speedup", "-1"], ["eval-acceptance", "--min-acceptance", "0"],
        # files that cannot be read or written
        *([name, "-p", "bad.jsonl"] for name in PROMPTED), ["diagnose", "tiny", "-p", "bad.jsonl"],
        ["probe", "http://127.0.0.1:9", "-p", "bad.jsonl"], ["probe", "http://127.0.0.1:9", "--output", "absent/x"],
        ["generate", "x", "--output", "absent/rows.jsonl"], ["generate", "x", "--output", "bad", "--force"],
        ["eval-acceptance", "--output", "there.jsonl"], ["eval-acceptance", "--output", "bad", "--force"],
        ["eval-acceptance", "--min-acceptance", "2", "--gate-out", "absent/x"],
        ["bench", "--min-speedup", "2", "--gate-out", "absent/x"],
        ["tune", "--output", "absent/x"], ["tune", "--output", "there.jsonl"], ["tune", "--output", "tuned"],
        ["tune", "--step-times", "there.jsonl"], ["tune", "--what-if", "draft=int3"],
        # prompts that no target takes, and a folder without hand-offs
        *([name, "-p", "empty.jsonl"] for name in PROMPTED), ["generate", ""], ["generate", "--handoff-in", "copy"],
        ["generate", "x", "--handoff-out", "absent/x"], ["generate", "x", "--handoff-out", "there.jsonl"],
        ["eval-acceptance", "--prefix-store", "there.jsonl"], ["report", "there.jsonl"],
        ["report", "none.json", "-o", "absent/x.html"], ["compare", "there.jsonl", "there.jsonl"],
        # a target without a tokenizer, devices that no machine has, addresses, and more positions than a pair has
        ["generate", "x", "-d", "copy", "-t", "mute"], ["eval-acceptance", "copy", "-t", "mute"],
        ["generate", "x", "--device-map", "gpus"], ["generate", "x", "--device-map", "empty.json"],
        ["generate", "x", "--handoff-in", "gloo://host"], ["generate", "x", "--handoff-out", "nccl://host:x"],
        ["generate", "x", "--handoff-in", "glo://host:1"], ["generate", "x", "--handoff-out", "http://host:1/x"],
        ["inspect", "copy", "--target", "whole", "--max-model-len", "99999"],
    ),
    3: (
        ["generate", "--handoff-in", "garbled"],
        ["generate", "x", "--draft", "bad"], ["bench", "bad"], ["convert", "bad", "out", "--to", "vllm"],
        ["diagnose", "bad", "--target", "tiny"], ["bench", "wide", "-t", "tiny"],
        # a draft without a tensor
        ["generate", "x", "-d", "lacking", "-t", "tiny"],
        ["eval-acceptance", "--disaggregated", "--prefill-draft", "lacking"],
        *([name, "lacking", "-t", "tiny"] for name in ("bench", "tune", "eval-acceptance")),
        # a target without weights
        ["generate", "x", "-d", "copy", "-t", "bare"], ["dump", "bare", "--taps", "1", "--output", "dump"],
        *([name, "copy", "-t", "bare"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        # a target without one tensor, with one of integers, and with a tokenizer that is not JSON
        *([name, "copy", "-t", "halved"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        *(["generate", "x", "-k", "0", "-t", "halved", "--target-runtime", name] for name in RUNTIMES),
        ["eval-acceptance", "copy", "-t", "narrowed", "--target-runtime", "transformers"],
        ["dump", "halved", "--taps", "1", "--output", "dump"],
        ["generate", "x", "-d", "copy", "-t", "integers"], ["generate", "x", "-d", "copy", "-t", "mumbling"],
        ["generate", "--handoff-in", "damaged"],
    ),
    4: (
        *([name, "-p", "none.jsonl"] for name in PROMPTED), ["diagnose", "tiny", "-p", "none.jsonl"],
        ["validate", "tiny", "--level", "run", "-p", "none.jsonl"], ["generate", "x", "--draft", "org/none"],
        *([name, "org/none"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        *([name, "org/none", "-t", "tiny"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        ["eval-acceptance", "--mode", "replay", "--dump", "none"],
        ["dump", "org/none", "--taps", "1", "--output", "dump"], ["validate", "org/none", "--level", "run"],
        ["generate", "x", "--tools", "none.json"], ["generate", "x", "--json-schema", "none.json"],
        ["generate", "x", "--handoff-in", "none"], ["generate", "x", "--device-map", "none.json"],
        ["tune", "--step-times", "none.json"], ["diagnose", "tiny", "--expected", "none.json"],
        ["eval-acceptance", "--disaggregated", "--prefill-draft", "org/none"],
        ["eval-acceptance", "--lock", "none.lock"],
        ["probe", "http://127.0.0.1:9", "--result", "none.json"], ["report", "none.json"],
        ["compare", "none.json", "none.json"],
    ),
    5: (
        ["eval-acceptance", "--workers", "2"], ["generate", "x", "--tree", "4", "--draft", "tiny:dspark"],
        ["tune", "tiny:dspark", "--tree", "4"], ["diagnose", "copy", "-t", "copy"],
        # a target that nothing runs here, and settings that no kernels compute
        ["generate", "x", "-d", "copy", "-t", "unknown"], ["dump", "unknown", "--taps", "1", "--output", "dump"],
        *([name, "copy", "-t", "unknown"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        *([name, "--kernels", "triton", "--dtype", "float64"] for name in ("bench", "tune", "eval-acceptance")),
        ["generate", "x", "--tensor-parallel", "3"],
        ["generate", "x", "--target-runtime", "transformers-cache", "--tree", "4"],
    ),
}  # fmt: skip
"""Exit code -> commands that are refused before anything is loaded."""


def make_targets(home: Path) -> None:
    """Write copies of the bundled target, each with one fault, and one without faults."""
    name = b"model.layers.1.self_attn.k_proj.weight"
    whole = shutil.copytree(tiny_directory() / "target", home / "whole")
    weights = (whole / "model.safetensors").read_bytes()
    start = weights.index(b'"BF16"', weights.index(name))
    for folder, changed in {
        "halved": weights.replace(name, name.replace(b"k_proj", b"x_proj"), 1),
        "narrowed": weights.replace(b'"shape":[192,512]', b'"shape":[512,192]', 1),
        "integers": weights[:start] + b' "I16"' + weights[start + 6 :],
    }.items():
        shutil.copytree(whole, home / folder)
        (home / folder / "model.safetensors").write_bytes(changed)
    shutil.copytree(whole, home / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(whole, home / "mumbling")
    (home / "mumbling" / "tokenizer.json").write_text('{"version": ')


def make_damaged_handoff(folder: Path) -> None:
    """Write a hand-off with a sound header and unreadable tensors."""
    handoff = Handoff(key="a", fingerprint={}, prompt_token_ids=(1,), output_token_ids=(2,), params=SamplingParams(),
                      seed=0)  # fmt: skip
    header = HandoffHeader(handoff=handoff, tensors={"target": TensorSpec("float32", (1,), 0)}).sealed
    folder.mkdir(parents=True)
    (folder / "handoff.json").write_text(json.dumps(to_json(header)))
    (folder / "kv.safetensors").write_text("no tensors in here")


def make_files(home: Path) -> None:
    """Write the files that commands of REFUSED name."""
    (home / "there.jsonl").write_text("x")
    (home / "bad.jsonl").write_text('{"promp": "x"}')
    (home / "empty.jsonl").write_text('{"prompt": ""}\n{"prompt_token_ids": [99999]}')
    (home / "garbled" / "a").mkdir(parents=True)
    (home / "garbled" / "a" / "handoff.json").write_text("{")
    (home / "bad").mkdir()
    (home / "bad" / "config.json").write_text('{"block_size": ')
    (home / "tuned").mkdir()
    (home / "tuned" / "whole-7.jsonl").touch()
    shutil.copytree(tiny_directory() / "draft", home / "copy")
    wide = shutil.copytree(home / "copy", home / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    lacking = shutil.copytree(home / "copy", home / "lacking")
    tensors = (lacking / "model.safetensors").read_bytes()
    (lacking / "model.safetensors").write_bytes(tensors.replace(b'"norm.weight"', b'"nurm.weight"', 1))
    unknown = shutil.copytree(tiny_directory() / "target", home / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "hyena"}))
    make_targets(home)
    make_damaged_handoff(home / "damaged" / "a")
    (home / "empty.json").write_text("{}")
    (home / "bare").mkdir()
    (home / "bare" / "config.json").write_text(json.dumps(config))


def test_refusals_come_before_torch(tmp_path: Path) -> None:
    """One process without torch and Ray. A command that imports torch ends in another error than the expected one.

    No command says that it loads a pair, because nothing is loaded.
    """
    script = "\n".join([
        "import json, sys, time", "sys.modules |= dict.fromkeys(('torch', 'ray'))", "from dflash_cli.main import main",
        "for arguments in json.loads(sys.argv[1]):", "    sys.argv = ['dflash', *arguments]",
        "    started = time.process_time()", "    try: main()", "    except SystemExit as end:",
        "        print(json.dumps([arguments, end.code, time.process_time() - started]))",
    ])  # fmt: skip
    environment = os.environ | IMPORT_PATHS | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    make_files(tmp_path)
    wanted = [[arguments, code] for code, commands in REFUSED.items() for arguments in commands]
    command = [sys.executable, "-c", script, json.dumps([arguments for arguments, _ in wanted])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert [json.loads(line)[:2] for line in done.stdout.splitlines()] == wanted, done.stderr
    told = [
        line for line in done.stderr.splitlines() if "needs torch" in line or line.startswith(("loading", "asking"))
    ]
    assert not told
    slow = [line for line in done.stdout.splitlines() if json.loads(line)[2] > 2.0]
    assert not slow, "processor seconds, of which the first command imports most modules"
