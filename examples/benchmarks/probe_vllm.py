"""Compare vLLM's own server with our engine on the same pair and prompts: accepted draft tokens by position.

    python3 examples/benchmarks/probe_vllm.py [--vllm-path DIR] [--out DIR] [--num-prompts 48] [--max-new-tokens 96]
    python3 examples/benchmarks/probe_vllm.py --url http://localhost:8000 --target DIR --draft DIR

The default pair is the bundled one. Servers' attention kernels need wider heads than its 32, so the heads are padded
with zeros, which changes no score. Both engines read the padded pair. The script starts the server, asks it like
`dflash probe` with 1 and with 8 requests at a time, and compares it with our engine in the same dtype. `--out` keeps
the answers, the probe's document and the server's log. The table comes last. The exit code is 1 if the server does
not answer.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dflash_cli
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.probing import probe_report
from dflash_cli.probing.probe_result import Probed
from dflash_runtime.documents import to_json
from dflash_runtime.errors import DFlashError
from timing.report import last_errors, say, table

SERVER = Path(__file__).parent / "timing" / "vllm_server.py"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
K = 7


RUNNING: set[int] = set()
"""Process groups of the servers that run now."""


def end_servers(*_: object) -> None:
    """End all servers and this process: the handler of SIGTERM, which `timeout` sends."""
    for group in RUNNING:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Pair:
    """The directories of both models."""

    target: Path
    draft: Path


def widen(source: Path, destination: Path, head_dim: int) -> Path:
    """Copy a Qwen3 decoder with heads padded by zeros to `head_dim`, so that attention scores stay the same.

    Rotation pairs dimension i with i + d / 2 at the frequency theta ** (-2i / d). In a wider head the same frequency
    belongs to a higher dimension. Head norms and attention both divide by the width. The remaining factor is the square
    root of the ratio of widths, and the norm of queries absorbs it. This is exact for a ratio of 4.
    """
    config = json.loads((source / "config.json").read_text())
    old = config["head_dim"]
    step, ratio = head_dim // old, math.sqrt(head_dim / old)
    if head_dim % old or not step & (step - 1) == 0:
        raise ValueError(f"{head_dim}, expected {old} times a power of 2")
    halves = [half * head_dim // 2 + step * place for half in (0, 1) for place in range(old // 2)]
    places = {"rotated": torch.tensor(halves), "plain": torch.arange(old)}
    found = {
        name: _widen(name, tensor, old, head_dim, places, ratio)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    destination.mkdir()
    save_file(found, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(config | {"head_dim": head_dim}, indent=2))
    for name in TOKENIZER:
        with suppress(FileNotFoundError):
            shutil.copy(source / name, destination)
    return destination


def _widen(name: str, tensor: Tensor, old: int, new: int, places: Mapping[str, Tensor], ratio: float) -> Tensor:
    """Widen one tensor: rows of q, k and v, columns of o, and the norms of heads. Others stay."""
    kind = name.split(".")[-2]
    where = places["plain" if kind in ("v_proj", "o_proj") else "rotated"]
    if kind in ("q_proj", "k_proj", "v_proj"):
        heads = tensor.view(-1, old, tensor.shape[1])
        wide = heads.new_zeros(heads.shape[0], new, tensor.shape[1])
        wide[:, where] = heads
        return wide.flatten(0, 1).contiguous()
    if kind == "o_proj":
        heads = tensor.view(tensor.shape[0], -1, old)
        wide = heads.new_zeros(tensor.shape[0], heads.shape[1], new)
        wide[..., where] = heads
        return wide.flatten(1).contiguous()
    if kind in ("q_norm", "k_norm"):
        norm = tensor.new_zeros(new)
        norm[where] = (tensor.float() / (ratio if kind == "q_norm" else 1.0)).to(tensor.dtype)
        return norm
    return tensor


def make_pair(given: argparse.Namespace, folder: Path) -> Pair:
    """The pair of the command line, or the bundled pair with wider heads."""
    if given.target is not None and given.draft is not None:
        return Pair(given.target, given.draft)
    tiny = tiny_directory()
    if not given.head_dim:
        return Pair(tiny / "target", tiny / "draft")
    return Pair(*(widen(tiny / name, folder / name, given.head_dim) for name in ("target", "draft")))


@contextmanager
def serving(given: argparse.Namespace, pair: Pair, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run vLLM's server with the pair. All its processes end with the block."""
    speculative = {"method": "dflash", "model": str(pair.draft), "num_speculative_tokens": given.num_speculative_tokens}
    speculative |= given.speculative or {}
    command = [
        sys.executable, str(SERVER), "--model", str(pair.target), "--served-model-name", "pair",
        "--host", "127.0.0.1", "--port", str(given.port), "--dtype", "bfloat16", "--max-model-len", "1024",
        "--max-num-seqs", "16", "--gpu-memory-utilization", str(given.gpu_memory_utilization),
        *given.server_args,
    ]  # fmt: skip
    if given.speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    if given.vllm_path is not None:
        env["PYTHONPATH"] = str(given.vllm_path)
    with log.open("w") as stream:
        # A new session: vLLM starts processes too, and all of them end with it.
        server = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
        RUNNING.add(server.pid)
        try:
            yield server
        finally:
            RUNNING.discard(server.pid)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def await_server(server: subprocess.Popen[str], url: str, log: Path, timeout_s: float) -> None:
    """Wait until the server lists its models.

    Raises:
        RuntimeError: the server ended or took too long; with the last errors of its log.
    """
    started = time.perf_counter()
    while time.perf_counter() - started < timeout_s:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}: {_last_errors(log)}")
        with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=2):
            say(f"server: ready after {time.perf_counter() - started:.0f} s")
            return
        time.sleep(1)
    raise RuntimeError(f"the server was not ready after {timeout_s:.0f} s: {_last_errors(log)}")


def _last_errors(log: Path) -> str:
    return last_errors(log.read_text(errors="replace"), 3)


def own_rows(given: argparse.Namespace, pair: Pair, prompts: list[list[int]], path: Path) -> Any:
    """Measure our engine on the same prompts in the server's dtype."""
    return dflash_cli.evaluate(
        draft=str(pair.draft),
        target=str(pair.target),
        prompts=prompts,
        max_new_tokens=given.max_new_tokens,
        device=given.device,
        dtype=given.dtype,
        num_speculative_tokens=given.num_speculative_tokens,
        output=path,
    )


def choose_prompts(pair: Pair, count: int) -> list[list[int]]:
    """The bundled prompts as token ids, so that both engines read the same tokens."""
    from dflash_cli.generation.prompts import gather_rows
    from dflash_cli.generation.tokenizer import Tokenizer

    rows: list[PromptRow] = gather_rows([], str(tiny_directory() / "prompts.jsonl"))
    tokenizer = Tokenizer(pair.target)
    return [tokenizer.encode(row.value) for row in rows[:count]]


def show(own: Any, found: Probed) -> None:
    """Print where answers diverge and by how much, then the counts by position."""
    print("\n".join([*probe_report.equality_lines(found), "", *probe_report.attribution_lines(found.attribution), ""]))
    runs = [("ours", own.total), *((run.name, run.total) for run in found.runs)]
    positions = range(max(total.counts.num_speculative_tokens for _, total in runs))
    rows: list[tuple[Any, ...]] = []
    for place in positions:
        counts = [total.counts for _, total in runs]
        shares = [item.per_pos_accepted[place] / item.num_drafts if item.num_drafts else None for item in counts]
        rows.append((str(place + 1), *(item.per_pos_accepted[place] for item in counts), *shares))
    names = [name for name, _ in runs]
    print(table(("position", *(f"{name}: accepted" for name in names), *(f"{name}: share" for name in names)), rows))
    lengths = [(name, total.counts.num_drafts, total.counts.acceptance_len) for name, total in runs]
    print("\n" + table(("run", "steps", "acceptance length"), lengths))


def measure(given: argparse.Namespace, folder: Path, out: Path) -> int:
    """Measure both engines on the same prompts. Returns 1 if the server does not answer."""
    pair = make_pair(given, folder)
    prompts = choose_prompts(pair, given.num_prompts)
    url = given.url or f"http://127.0.0.1:{given.port}"
    log, own_path = out / "server.log", out / "own.jsonl"

    def ask() -> Probed:
        return dflash_cli.probe(
            url=url,
            result=own_path,
            draft=str(pair.draft),
            target=str(pair.target),
            prompts=prompts,
            max_new_tokens=given.max_new_tokens,
            output=out / "served.jsonl",
        )

    try:
        if given.url is not None:
            own = own_rows(given, pair, prompts, own_path)
            found = ask()
        else:
            with serving(given, pair, log) as server:
                own = own_rows(given, pair, prompts, own_path)  # while the server starts
                say(f"ours: acceptance length {own.total.counts.acceptance_len:.3f}")
                await_server(server, url, log, given.ready_timeout)
                found = ask()
    except (DFlashError, RuntimeError) as error:
        say(f"failed: {error}")
        return 1
    (out / "probe.json").write_text(json.dumps(to_json(found), indent=1) + "\n")
    show(own, found)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-path", type=Path, help="folder with vLLM, for the server only")
    parser.add_argument("--url", help="address of a running server with the pair of --target and --draft")
    parser.add_argument("--target", type=Path, help="target directory (default: the bundled target with wider heads)")
    parser.add_argument("--draft", type=Path, help="draft directory, together with --target")
    parser.add_argument(
        "--head-dim", type=int, default=128, help="width of padded heads; 0 keeps the pair unchanged (default: 128)"
    )
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-speculative-tokens", type=int, default=K)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="dtype of our engine; the server uses bfloat16")
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument(
        "--ready-timeout", type=float, default=150, help="seconds to wait for the server to start (default: 150)"
    )
    parser.add_argument(
        "--server-args", nargs=argparse.REMAINDER, default=[], help="further arguments for the server; must come last"
    )
    parser.add_argument("--out", type=Path, help="folder for prompts, answers and logs")
    return parser


def main() -> int:
    signal.signal(signal.SIGTERM, end_servers)
    given = make_parser().parse_args()
    if given.vllm_path is not None:
        sys.path.append(str(given.vllm_path))  # for packages that are missing in this environment
    given.speculative, given.server_args = {}, ["--no-enable-prefix-caching", *given.server_args]
    with tempfile.TemporaryDirectory() as folder:
        out = given.out or Path(folder) / "out"
        out.mkdir(parents=True, exist_ok=True)
        return measure(given, Path(folder), out)


if __name__ == "__main__":
    sys.exit(main())
