"""Plants faults in drafts, one at a time, and records what each level of `dflash validate` says; writes docs/faults.md.

    python examples/benchmarks/faults.py --out faults.jsonl --markdown docs/faults.md

Every finished case is a line of the JSON Lines file, so an interrupted run goes on where it was. `--device cuda` runs
the pairs on a GPU; `--jobs N` takes as many cases at a time. `--sample N` takes every Nth case.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.validation.readings import SearchBudget
from dflash_cli.validation.report import Report
from dflash_cli.validation.run_settings import RunSettings
from dflash_cli.validation.validator import ValidationRequest, validate_draft
from dflash_runtime.config import EngineConfig

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Change = Callable[[Config, Tensors], object]

PAIRS = {"full": "tiny", "reduced": "tiny:reduced"}
NUM_PROMPTS, NUM_TOKENS = 12, 48
LOSS_THAT_COUNTS = 0.10
SOUND = "as it is"
NO_READING = "R06"
"""The rule that says: too little is accepted, and no reading explains it."""


@dataclass(frozen=True)
class Case:
    """A draft with one change. `right` are the rules whose finding names the cause; a sound variant has none.

    `beside` are rules that may speak as well without being wrong.
    """

    name: str
    change: Change
    right: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    is_fault: bool = True


def body(config: Config) -> Config:
    """The object that holds the decoder's keys."""
    found: Config = config.get("transformer_layer_config", config)
    return found


def owner(config: Config) -> Config:
    """The object that holds mask, taps and block."""
    found: Config = config.get("dflash_config", config)
    return found


def set_taps(change: Callable[[list[int]], list[int]]) -> Change:
    def apply(config: Config, _: Tensors) -> None:
        key = "target_layer_ids" if "dflash_config" in config else "aux_hidden_state_layer_ids"
        shift = 0 if "dflash_config" in config else 1
        owner(config)[key] = [tap + shift for tap in change([tap - shift for tap in owner(config)[key]])]

    return apply


def set_rope(**keys: Any) -> Change:
    def apply(config: Config, _: Tensors) -> None:
        scaling = {name: value for name, value in keys.items() if name != "rope_theta"}
        if "rope_parameters" in body(config):
            body(config)["rope_parameters"] |= keys
        elif scaling:
            config["rope_scaling"] = scaling
        else:
            config.update(keys)

    return apply


def set_body(**keys: Any) -> Change:
    return lambda config, _: body(config).update(keys)


def set_top(**keys: Any) -> Change:
    return lambda config, _: config.update(keys)


def set_mask(token: int) -> Change:
    return lambda config, _: owner(config).update(mask_token_id=token)


def set_block(size: int) -> Change:
    def apply(config: Config, _: Tensors) -> None:
        config["block_size"] = size
        for method in config.get("speculators_config", {}).get("proposal_methods", []):
            method["speculative_tokens"] = size - 1

    return apply


def set_window(width: int) -> Change:
    def apply(config: Config, _: Tensors) -> None:
        count = body(config)["num_hidden_layers"]
        body(config).update(
            layer_types=["sliding_attention"] * count, sliding_window=width, use_sliding_window=True,
            max_window_layers=0,
        )  # fmt: skip

    return apply


def edit(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change every tensor whose name holds a part."""

    def apply(_: Config, tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            old = tensors[name]
            tensors[name] = change(old).to(old.dtype).contiguous()

    return apply


def exchange(first: str, second: str) -> Change:
    def apply(_: Config, tensors: Tensors) -> None:
        old = dict(tensors)
        for name in old:
            if first in name:
                other = name.replace(first, second)
                tensors[name], tensors[other] = old[other], old[name]

    return apply


def copy_layer(config: Config, tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "layers.1.")] = tensors[name].clone()


def noise(seed: int, share: float, part: str = "proj") -> Change:
    def apply(_: Config, tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(tensors):
            item = tensors[name]
            if part in name and item.dim() == 2:
                random = torch.randn(item.shape, generator=generator) * item.float().std()
                tensors[name] = ((1 - share) * item.float() + share * random).to(item.dtype)

    return apply


def permute_columns(order: tuple[int, ...]) -> Change:
    def apply(_: Config, tensors: Tensors) -> None:
        blocks = tensors["fc.weight"].chunk(len(order), dim=1)
        tensors["fc.weight"] = torch.cat([blocks[index] for index in order], dim=1).contiguous()

    return apply


def pairs_side_by_side(part: str, head_dim: int = 32) -> Change:
    return edit(part, lambda item: item.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2))


def both(*changes: Change) -> Change:
    return lambda config, tensors: [change(config, tensors) for change in changes]


def zero_half(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(item: torch.Tensor) -> torch.Tensor:
        item = item.clone()
        item.narrow(dim, 0, item.shape[dim] // 2).zero_()
        return item

    return change


def to_float32(change: Callable[[torch.Tensor], torch.Tensor] = lambda item: item.float()) -> Change:
    def apply(config: Config, tensors: Tensors) -> None:
        for name, item in list(tensors.items()):
            if item.is_floating_point():
                tensors[name] = change(item).float().contiguous()
        config["dtype"] = "float32"

    return apply


def through_fp8(item: torch.Tensor) -> torch.Tensor:
    scale = 448 / item.float().abs().max()
    return (item.float() * scale).to(torch.float8_e4m3fn).float() / scale


def shuffle_rows(name: str) -> Change:
    generator = torch.Generator().manual_seed(1)
    return edit(name, lambda item: item[torch.randperm(len(item), generator=generator)])


def one_id_off(_: Config, tensors: Tensors) -> None:
    """A gap in the kept ids is moved by one."""
    offsets = tensors["d2t"].clone()
    ids = torch.arange(len(offsets)) + offsets
    at = next(index for index in range(100, len(ids) - 1) if ids[index + 1] - ids[index] > 1)
    offsets[at] += 1
    tensors["d2t"] = offsets


def faults(pair: str) -> Iterator[Case]:
    """Every fault of a pair."""
    yield from tap_faults()
    yield from config_faults(pair)
    yield from order_faults()
    yield from value_faults()
    if pair == "reduced":
        yield from map_faults()


def tap_faults() -> Iterator[Case]:
    """Features of other layers, or in another order."""
    yield Case("taps one layer later", set_taps(lambda taps: [tap + 1 for tap in taps]), ("R01",), ("C10",))
    yield Case("taps one layer earlier, the first stays", set_taps(lambda taps: [0, 1, 2, 3]), ("R01",))
    yield Case("taps in reverse", set_taps(lambda taps: taps[::-1]), ("R01", "C07"))
    yield Case("two taps exchanged", set_taps(lambda taps: [taps[1], taps[0], *taps[2:]]), ("R01", "C07"))
    yield Case("one tap of another layer", set_taps(lambda taps: [*taps[:2], 5, taps[3]]), ("R01", "C07"), ("C10",))
    yield Case("first tap one later", set_taps(lambda taps: [1, *taps[1:]]), ("R01",))
    yield Case("blocks of fc in reverse", permute_columns((3, 2, 1, 0)), ("R01",))
    yield Case("blocks of fc rotated", permute_columns((1, 2, 3, 0)), ("R01",))
    yield Case("two blocks of fc exchanged", permute_columns((1, 0, 2, 3)), ("R01",))


def config_faults(pair: str) -> Iterator[Case]:
    """Keys of the config that say something else than the draft was trained with."""
    for theta in (500.0, 10_000.0, 100_000.0, 500_000.0, 1e7, 1e8):
        yield Case(f"rope base {theta:g}", set_rope(rope_theta=theta), ("R04", "P05"))
    for kind in ("linear", "yarn"):
        keys = {"rope_type": kind, "factor": 4.0}
        if kind == "yarn":
            keys["original_max_position_embeddings"] = 512
        yield Case(f"{kind} rope scaling added", set_rope(**keys), ("R04", "P05"))
    for token in (0, 4, 5, 100, 2047):
        yield Case(f"mask {token}", set_mask(token), ("R03",), ("C14", "P03", "M08"))
    for width in (2, 5, 16):
        yield Case(f"window {width}", set_window(width), ("R07",))
    for size in (12, 16):
        yield Case(f"block {size} for 8", set_block(size), ("R08",))
    if pair == "full":
        yield Case("causal", set_top(is_causal=True), ("R02",))
    yield Case("wrong number of target layers", set_top(num_target_layers=7), ("C11",))
    yield Case("wrong vocabulary", set_body(vocab_size=2047), ("P02", "P01", "P03", "N04", "P04", "N03"))


def order_faults() -> Iterator[Case]:
    """Tensors that are whole and stand in another's place, or are laid out otherwise."""
    yield Case("norms minus 1", edit("norm.weight", lambda item: item.float() - 1), ("R09", "N31"))
    yield Case("norms plus 1", edit("norm.weight", lambda item: item.float() + 1), ("R09",))
    yield Case("q and k norms exchanged", exchange("q_norm", "k_norm"), ("R09",))
    yield Case("layer norms exchanged", exchange("input_layernorm", "post_attention_layernorm"), ("R09",))
    yield Case("gate and up exchanged", exchange("gate_proj", "up_proj"), ("R09",))
    yield Case("keys and values exchanged", exchange("k_proj", "v_proj"), ("R09",))
    yield Case("layers exchanged", exchange("layers.0.", "layers.1."), ("R09",))
    interleaved = [pairs_side_by_side(part) for part in ("q_proj", "k_proj", "q_norm", "k_norm")]
    yield Case("interleaved rope", both(*interleaved), ("R09",))
    yield Case("interleaved rope, norms left", both(*interleaved[:2]), ("R09",))


def value_faults() -> Iterator[Case]:
    """Values that were never trained, or were lost."""
    yield Case("untrained", noise(0, 1.0, ""), ("R06",), ("M10",))
    yield Case("untrained layers", noise(0, 1.0, "layers."), ("R06",))
    yield Case("untrained fc", noise(0, 1.0, "fc."), ("R06",))
    yield Case("noise of equal size in all projections", noise(0, 0.5), ("R06",))
    yield Case("layer 1 is a copy of layer 0", copy_layer, ("N17",))
    yield Case("half of fc's columns zero", edit("fc.weight", zero_half(1)), ("N14", "N32"))
    yield Case("half of the rows of q_proj zero", edit("q_proj", zero_half(0)), ("N32",))
    yield Case("half of the columns of down_proj zero", edit("down_proj", zero_half(1)), ("N32",))
    yield Case("half of the rows of gate_proj zero", edit("gate_proj", zero_half(0)), ("N32",))
    yield Case("one tensor zero", edit("layers.0.self_attn.o_proj", torch.zeros_like), ("N13",))
    yield Case(
        "one NaN",
        edit("layers.1.mlp.up_proj", lambda item: item.index_fill(0, torch.tensor([0]), float("nan"))),
        ("N13",),
    )
    yield Case("norms all one", edit("norm.weight", torch.ones_like), ("N19",))
    yield Case("hidden_norm all one", edit("hidden_norm", torch.ones_like), ("N19",))
    yield Case("8-bit floats in a float32 file", to_float32(through_fp8), ("N33",), ("M10",))
    yield Case("fc times 100,000", edit("fc.weight", lambda item: item.float() * 1e5), ("N18",))
    yield Case("down_proj transposed", edit("down_proj", lambda item: item.T), ("N03", "N04"))


def map_faults() -> Iterator[Case]:
    """Of a reduced vocabulary."""
    yield Case("d2t all zero", edit("d2t", torch.zeros_like), ("M07", "M06"))
    yield Case("d2t of absolute ids", edit("d2t", lambda item: item + torch.arange(len(item))), ("M06",))
    yield Case("one id of d2t off", one_id_off, ("M06", "M10", "M12"))
    yield Case("one id of d2t and t2d off", both(one_id_off, _follow), ("M12",))
    yield Case("rows of the head in another order", shuffle_rows("lm_head"), ("M12",), ("M10",))
    yield Case("t2d inverted", edit("t2d", lambda item: ~item.bool()), ("M05", "M06"))


def _follow(_: Config, tensors: Tensors) -> None:
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    mask = torch.zeros_like(tensors["t2d"])
    mask[ids] = True
    tensors["t2d"] = mask


def sound_variants(pair: str) -> Iterator[Case]:
    """Drafts that work as well as the original, or nearly; nothing may be found in them."""

    def sound(name: str, change: Change) -> Case:
        return Case(name, change, is_fault=False)

    yield sound(SOUND, lambda config, tensors: None)
    yield sound("float32", to_float32())
    yield sound("block 7", set_block(7))
    yield sound("block 6", set_block(6))
    yield sound("a wide window", set_window(1024))
    yield sound("more positions", set_body(max_position_embeddings=4096))
    yield sound("another initializer range", set_body(initializer_range=0.1))
    yield sound("dropout stated", set_body(attention_dropout=0.1))
    yield sound("use_cache off", set_body(use_cache=False))
    yield sound("extra key", set_top(comment="trained on Python"))
    yield sound("transformers version", set_top(transformers_version="5.23.0"))
    for seed in range(1, 7):
        yield sound(f"noise of 2% ({seed})", noise(seed, 0.02))
    for scale in (0.97, 0.99, 1.01, 1.03):
        yield sound(f"fc times {scale}", _scale("fc.weight", scale))
        yield sound(f"final norm times {scale}", _scale("norm.weight", scale))


def _scale(name: str, scale: float) -> Change:
    def apply(_: Config, tensors: Tensors) -> None:
        tensors[name] = (tensors[name].float() * scale).to(tensors[name].dtype)

    return apply


def cases() -> dict[str, tuple[str, Case]]:
    """Every case by its key, `pair/name`."""
    return {
        f"{pair}/{case.name}": (pair, case)
        for pair in PAIRS
        for case in (*faults(pair), *sound_variants(pair))
    }  # fmt: skip


def plant(case: Case, source: Path, path: Path) -> None:
    """Write the draft with the change."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    case.change(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: item.contiguous() for name, item in tensors.items()}, path / "model.safetensors")


def examine(key: str, device: str) -> dict[str, Any]:
    """Plant one case and run every level on it."""
    torch.set_num_threads(1)
    pair, case = cases()[key]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        plant(case, fetch_directory(PAIRS[pair], Role.DRAFT), draft)
        levels = {
            "headers": _validate(draft, "headers", device, has_target=False),
            "pair": _validate(draft, "headers", device),
            "weights": _validate(draft, "weights", device),
            "run": _validate(draft, "run", device),
        }
    search = levels["run"].search
    return {
        "key": key,
        "pair": pair,
        "name": case.name,
        "is_fault": case.is_fault,
        "right": case.right,
        "beside": case.beside,
        "acceptance_len": search.acceptance_len if search is not None else None,
        "levels": {
            level: [[item.id, item.severity, item.message] for item in report.findings]
            for level, report in levels.items()
        },
        "seconds": time.monotonic() - begin,
    }


def _validate(draft: Path, level: Any, device: str, *, has_target: bool = True) -> Report:
    run = None
    if level == "run":
        budget = SearchBudget(num_prompts=NUM_PROMPTS, max_new_tokens=NUM_TOKENS)
        run = RunSettings(EngineConfig(device=device, max_num_requests=32), budget, lambda *_: None)
    return validate_draft(
        ValidationRequest(
            draft=draft,
            target=fetch_directory(TINY, Role.TARGET) if has_target else None,
            target_reference=TINY if has_target else None,
            level=level,
            run=run,
        )
    )


@dataclass(frozen=True)
class Verdict:
    """What was said of one case. `level` is the first that spoke of it."""

    word: str
    level: str
    rules: str
    loss: float | None


def judge(row: dict[str, Any], sound_len: float) -> Verdict:
    """right, wrong, no cause, other or silent, as docs/faults.md explains; finding or silent for a sound variant."""
    length = row["acceptance_len"]
    loss = 1 - (length - 1) / (sound_len - 1) if length is not None else None
    seen: dict[str, tuple[str, str]] = {}
    for level, findings in row["levels"].items():
        for rule, severity, _ in findings:
            if severity != "info" and rule not in row["beside"]:
                seen.setdefault(rule, (level, severity))
    rules = ", ".join(seen)
    first = next(iter(seen.values()), ("", ""))[0]
    if not row["is_fault"]:
        return Verdict("finding" if seen else "silent", first, rules, loss)
    named = [level for rule, (level, _) in seen.items() if rule in row["right"]]
    foreign = [rule for rule in seen if rule not in row["right"] and rule != NO_READING]
    if any(rule.startswith("R") or seen[rule][1] == "error" for rule in foreign):
        return Verdict("wrong", first, rules, loss)
    if named:
        return Verdict("right", named[0], rules, loss)
    word = "no cause" if NO_READING in seen else "other" if seen else "silent"
    return Verdict(word, first, rules, loss)


def render(rows: list[dict[str, Any]]) -> str:
    """docs/faults.md."""
    sound = {row["pair"]: row["acceptance_len"] for row in rows if row["name"] == SOUND}
    rows = [row for row in rows if row["pair"] in sound]
    judged = [(row, judge(row, sound[row["pair"]])) for row in rows]
    planted = [(row, verdict) for row, verdict in judged if row["is_fault"]]
    variants = [(row, verdict) for row, verdict in judged if not row["is_fault"]]
    large = [item for item in planted if item[1].loss is None or item[1].loss > LOSS_THAT_COUNTS]
    lines = [HEAD.rstrip("\n").format(prompts=NUM_PROMPTS, tokens=NUM_TOKENS, done=len(rows), all=len(cases()))]
    lines.append("")
    lines.append("| | faults | right cause | wrong cause | no cause named | only other findings | silent |")
    lines.append("|---|---|---|---|---|---|---|")
    for title, chosen in (("all", planted), ("that cost more than 10%, or cannot run", large)):
        counts = [sum(item.word == word for _, item in chosen) for word in WORDS]
        lines.append(f"| {title} | {len(chosen)} | {' | '.join(map(str, counts))} |")
    found = [row["key"] for row, verdict in variants if verdict.word == "finding"]
    lines += [
        "",
        f"Sound variants: {len(variants)}, with a finding: {len(found)}"
        + (f" ({', '.join(found)})." if found else "."),
    ]
    lines += ["", "Faults by the first level that named them:", "", "| level | faults |", "|---|---|"]
    for level in ("headers", "pair", "weights", "run"):
        lines.append(f"| {level} | {sum(item.level == level and item.word == 'right' for _, item in planted)} |")
    lines += [
        "",
        "## Every fault",
        "",
        "| pair | fault | accepts | lost | verdict | first level | rules |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row, verdict) for row, verdict in planted]
    lines += [
        "",
        "## Sound variants",
        "",
        "| pair | variant | accepts | lost | verdict | first level | rules |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row, verdict) for row, verdict in variants]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any], verdict: Verdict) -> str:
    length = f"{row['acceptance_len']:.2f}" if row["acceptance_len"] is not None else "not run"
    loss = f"{verdict.loss:.0%}" if verdict.loss is not None else ""
    cells = (row["pair"], row["name"], length, loss, verdict.word, verdict.level, verdict.rules)
    return f"| {' | '.join(cells)} |"


WORDS = ("right", "wrong", "no cause", "other", "silent")

HEAD = """# Planted faults

What `dflash validate` says of drafts with one fault each, and of sound ones. Printed by
`python examples/benchmarks/faults.py`, from the two bundled drafts, with {prompts} prompts of {tokens} tokens at the
run level.

"Lost" is the share of the accepted drafts that the fault costs. A verdict is *right* where a finding names the cause,
*wrong* where a reading or an error names another, *no cause* where it is said that too little is accepted and
that no reading explains it, *other* where only other rules spoke, *silent* where none did. Levels: headers without a
target, headers with one (pair), weights, run. A reading is named only where it gains more than a tenth of a token, and
more than a tenth of what is accepted: faults that cost less than that are meant to be silent at the run level.

A draft that loses much and still accepts a good share of its block can only be known by its own figure: compare with
what its card says, by `dflash eval-acceptance --min-acceptance`.

## What the run level asks of a cause

- All readings, some 150, are estimated along one text; up to four that look better are run on all prompts.
- A reading explains a draft where it accepts at least 1.5 tokens a step and an eighth of the block (2 tokens for
  predictions from the anchor on: an untrained draft that echoes its anchor reaches 1.5 on text that repeats itself),
  gains more than 0.1 tokens and more than a tenth of the accepted drafts, and its paired interval lies above zero.
- The interval is that of one test at 5% divided by the number of readings (Bonferroni), so that the chance that any
  reading is named for a sound draft is 5% at most, whichever of them are run.
- Of several that explain a draft only the one that gains most is named.
- Where none does, a draft that has less than 7% of its drafts accepted is an error, and below 12% a warning (R06).
  Sound drafts at temperature 0: 34% and 25% (bundled), 31% (speculators, Qwen3-8B on GSM8K), 21 to 37% (vllm#43445,
  blocks of 16); SGLang's own test asks for 12% (2.8 of 16 on GSM8K). Drafts read wrongly or never trained: 0 to 6%.

## Totals

Cases: {done} of {all}.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="state and result, JSON Lines")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="only cases whose key, pair/name, holds this")
    parser.add_argument("--sample", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each job; only 1 is of use on pairs this small")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case is begun")
    given = parser.parse_args()
    begin = time.monotonic()
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {row["key"] for row in rows}
    wanted = [key for index, key in enumerate(cases()) if index % given.sample == 0 or key.endswith(f"/{SOUND}")]
    todo = [key for key in wanted if key not in done and given.only in key]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool, given.out.open("a") as state:
        pending = [pool.apply_async(examine, (key, given.device)) for key in todo]
        for key, item in zip(todo, pending, strict=True):
            left = given.budget - (time.monotonic() - begin)
            try:
                row = item.get(timeout=None if left == float("inf") else max(left, 0.1))
            except multiprocessing.TimeoutError:
                sys.stderr.write(f"out of time at {key}; run again to go on\n")
                break
            rows.append(row)
            state.write(json.dumps(row) + "\n")
            state.flush()
            sys.stderr.write(f"{len(rows)}/{len(wanted)} {key} {row['seconds']:.1f} s\n")
    known = cases()
    order = {key: index for index, key in enumerate(known)}
    rows = sorted((row for row in rows if row["key"] in order), key=lambda row: order[row["key"]])
    rows = [row | {"right": known[row["key"]][1].right, "beside": known[row["key"]][1].beside} for row in rows]
    text = render(rows)
    if given.markdown is not None:
        given.markdown.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
