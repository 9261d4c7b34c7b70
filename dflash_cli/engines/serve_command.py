"""The command that starts an engine with a pair, with the K that engine counts in. Printed, never run.

vLLM      num_speculative_tokens is block_size - 1
SGLang    --speculative-num-draft-tokens is block_size, the anchor included
llama.cpp --spec-draft-n-max is block_size - 1, after both checkpoints are converted to GGUF
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from dflash_cli.validation.rule import Finding
from dflash_runtime.config import DraftConfig, TargetConfig

NEEDS_V2 = "S03"
FLOAT16 = "P14"
PACKED_KV = "S22"
PACKED_TARGET = "S23"


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """What to type: `commands` in order, and `env` that the last of them needs."""

    engine: str
    commands: tuple[str, ...]
    num_draft_tokens: int
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The commands as a shell takes them."""
        prefix = "".join(f"{key}={shlex.quote(value)} " for key, value in self.env.items())
        return "\n".join([*self.commands[:-1], prefix + self.commands[-1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What a line is made of. `notices` are the ids of the findings that call for a flag."""

    draft: str
    target: str
    config: DraftConfig
    target_config: TargetConfig
    num_draft_tokens: int
    notices: frozenset[str]

    @property
    def context_limit(self) -> int | None:
        """The draft's positions, where the target has more."""
        limit = self.config.max_position_embeddings
        return limit if limit < self.target_config.max_position_embeddings else None


def make_line(engine: str, pair: Pair) -> LaunchLine:
    """The line for one engine."""
    make = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama, "transformers": _transformers}[engine]
    return make(pair)


def notices(findings: tuple[Finding, ...]) -> frozenset[str]:
    """The ids of findings."""
    return frozenset(item.id for item in findings)


def _vllm(pair: Pair) -> LaunchLine:
    model, _, revision = pair.draft.partition("@")
    speculative = {"method": "dflash", "model": model, "num_speculative_tokens": pair.num_draft_tokens}
    if revision:
        speculative["revision"] = revision
    target, _, target_revision = pair.target.partition("@")
    words = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    if target_revision:
        words += ["--revision", target_revision]
    if pair.context_limit is not None:
        words += ["--max-model-len", str(pair.context_limit)]
    if FLOAT16 in pair.notices:
        words += ["--dtype", "bfloat16"]
    if PACKED_KV in pair.notices:
        words += ["--kv-cache-dtype", "bfloat16"]
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if NEEDS_V2 in pair.notices else {}
    return LaunchLine("vllm", (shlex.join(words),), pair.num_draft_tokens, env)


def _sglang(pair: Pair) -> LaunchLine:
    draft, _, revision = pair.draft.partition("@")
    target, _, target_revision = pair.target.partition("@")
    words = ["python3", "-m", "sglang.launch_server", "--model-path", target]
    if target_revision:
        words += ["--revision", target_revision]
    words += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft]
    if revision:
        words += ["--speculative-draft-model-revision", revision]
    words += ["--speculative-num-draft-tokens", str(pair.num_draft_tokens + 1)]
    if pair.context_limit is not None:
        words += ["--context-length", str(pair.context_limit)]
    if FLOAT16 in pair.notices:
        words += ["--dtype", "bfloat16"]
    if PACKED_TARGET in pair.notices:
        words += ["--speculative-draft-model-quantization", "unquant"]
    return LaunchLine("sglang", (shlex.join(words),), pair.num_draft_tokens)


def _llama(pair: Pair) -> LaunchLine:
    """Both are converted first; the converter takes directories, and the draft has no tokenizer of its own."""
    draft, target = _gguf(pair.draft), _gguf(pair.target)
    convert = ["python3", "convert_hf_to_gguf.py"]
    serve = ["llama-server", "-m", target, "-md", draft, "--spec-type", "draft-dflash"]
    serve += ["--spec-draft-n-max", str(pair.num_draft_tokens)]
    if pair.context_limit is not None:
        serve += ["-c", str(pair.context_limit)]
    return LaunchLine(
        "llama.cpp",
        (
            shlex.join([*convert, pair.target, "--outtype", "bf16", "--outfile", target]),
            shlex.join(
                [*convert, pair.draft, "--outtype", "bf16", "--target-model-dir", pair.target, "--outfile", draft]
            ),
            shlex.join(serve),
        ),
        pair.num_draft_tokens,
    )


def _transformers(pair: Pair) -> LaunchLine:
    """A program on z-lab's own package, whose script shares our name and so is called as a module."""
    lines = (
        "# pip install 'dflash[local]' in an environment of its own: it is z-lab's package",
        "from dflash.model import DFlashDraftModel, dflash_generate",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"target = AutoModelForCausalLM.from_pretrained({pair.target!r}, dtype='auto', device_map='auto')",
        f"tokenizer = AutoTokenizer.from_pretrained({pair.target!r})",
        f"draft = DFlashDraftModel.from_pretrained({pair.draft!r}, dtype='auto').to(target.device)",
        "ids = tokenizer('def fibonacci(n):', return_tensors='pt').input_ids.to(target.device)",
        "stops = [tokenizer.eos_token_id]",
        f"output = dflash_generate(draft, target, ids, 256, stops, block_size={pair.num_draft_tokens + 1})",
        "print(tokenizer.decode(output[0]))",
    )
    return LaunchLine("transformers", lines, pair.num_draft_tokens)


def _gguf(reference: str) -> str:
    return PurePath(reference.partition("@")[0]).name + ".gguf"
