"""Faults and sound variants of the bundled drafts for `plant_faults.py`: one change each, with its right causes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Change = Callable[[Config, Tensors], object]

PAIRS = {"full": "tiny", "reduced": "tiny:reduced"}
SOUND = "as it is"


@dataclass(frozen=True)
class Case:
    """A draft with one change. Findings of the rules in `right` name its cause; for a sound variant `right` is empty.

    Rules in `beside` may also have findings without being wrong.
    """

    name: str
    change: Change
    right: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    is_fault: bool = True


def body(config: Config) -> Config:
    """The config object with the decoder's keys."""
    found: Config = config.get("transformer_layer_config", config)
    return found


def owner(config: Config) -> Config:
    """The config object with mask, taps and block size."""
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
    """Change every tensor with `part` in its name."""

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
    """Move one kept id by one, at a gap between ids."""
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
    """Faults in the tapped layers and their order."""
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
    """Faults in config keys: values that differ from training."""
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
    # M03 finds it in a reduced draft's headers without a target. With a target, P02 finds it instead.
    yield Case("wrong vocabulary", set_body(vocab_size=2047), ("P02", "P01", "P03", "N04", "P04", "N03", "M03"))


def order_faults() -> Iterator[Case]:
    """Faults in the order or layout of intact tensors."""
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
    """Faults in values: untrained or lost weights."""
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
    """Faults in the id maps of a reduced vocabulary."""
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


def sound_variants() -> Iterator[Case]:
    """Drafts that work as well as the original, or nearly. They must not get findings."""

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
        for case in (*faults(pair), *sound_variants())
    }  # fmt: skip
