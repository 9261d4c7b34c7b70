"""The published pairs in tests/data/pairs.jsonl, one per row, as configs and headers without weights.

A row has the known facts of a pair, or stand-ins of the same kind if a config was not available. The rest has defaults.
The target's sizes come from its config in tests/data/targets unless `sizes` changes them. If only the number of taps is
known, they are spread as in z-lab's code. The mask is the last id. `config`, `nested` and `body` change the draft's
config, and `tensors` adds tensors to its headers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_cli.formats.draft_kinds.kind_reading import KindReading
from dflash_testing.checkpoints import Json, Shape, body_shapes, native_config, speculators_config, write_config
from dflash_testing.families import is_of_family, own_shapes
from dflash_testing.kinds import kind_of
from dflash_testing.paths import ROOT

TABLE = ROOT / "tests" / "data" / "pairs.jsonl"
TARGETS = ROOT / "tests" / "data" / "targets"
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
ENGINES = ("vllm", "sglang")
NUM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "I32": 4, "I8": 1, "BOOL": 1, "U8": 1}


@dataclass(frozen=True, kw_only=True)
class PublishedPair:
    """One row.

    errors          every rule that finds an error for vLLM and SGLang, with the reason why it is true
    warnings        every rule that finds a warning, except P17, which is about this runtime
    served          the engines that serve the pair
    not_converted   a name in the refusal of a conversion to the other dialect, or nothing if it is converted
    asked           the number of tokens to draft, for a draft without a block size
    kind            the other kind of the draft, whose table gives its tensors; empty for DFlash
    steps           measured steps at this shape: `ms` by batch, the card, the log in docs/measurements, and its lines
    """

    draft: str
    of: str
    revision: str = ""
    target: str
    shape: Json
    dialect: str = "native"
    sizes: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    nested: Json = field(default_factory=dict)
    body: Json = field(default_factory=dict)
    tensors: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=lambda: list(ENGINES))
    not_converted: str = ""
    asked: int | None = None
    kind: str = ""
    steps: Json = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the draft, with its revision if the table has several."""
        return f"{self.draft} ({self.revision})" if self.revision else self.draft

    @property
    def is_read(self) -> bool:
        """Whether `inspect` describes the draft. Kinds without a table and drafts without a block size are refused."""
        return bool(self.kind) or not {"C01", "C03"} & self.errors.keys()

    @property
    def has_unknown_layout(self) -> bool:
        """Whether the draft's config does not state which rows of a block predict a token."""
        return "C50" in self.warnings

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the draft and the target to directories with their published names."""
        target = folder / "target" / self.of.rpartition("/")[2]
        draft = folder / "draft" / self.draft.rpartition("/")[2]
        config = self.target_config()
        decoder = _decoder(config)
        vocab, hidden = decoder["vocab_size"], decoder["hidden_size"]
        rows = {name: ("BF16", (vocab, hidden)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        write_headers(target, config, rows)
        shape = self._shape(decoder)
        changes = {"max_position_embeddings": decoder.get("max_position_embeddings") or 4096, "dtype": "bfloat16"}
        tensors = {name: ("BF16", size) for name, size in body_shapes(shape).items()}
        if shape.draft_vocab != shape.vocab:
            tensors |= _reduced(shape)
        stated = self._draft_config(shape, changes, config)
        if self.kind:
            expected = KindReading(kind_of(self.kind), stated).expected
            tensors = {name: ("BF16", tuple(size or 0 for size in sizes)) for name, sizes in expected.items()}
        elif is_of_family(stated):
            own = own_shapes(stated, shape)
            tensors |= {name: ("F32" if "confidence" in name else "BF16", size) for name, size in own.items()}
        tensors |= {name: ("BF16", tuple(size)) for name, size in self.tensors.items()}
        write_headers(draft, stated, tensors)
        return draft, target

    def target_config(self) -> Json:
        """Return the config of the target, in its sizes."""
        config: Json = json.loads((TARGETS / f"{self.target}.json").read_text(encoding="utf-8"))
        decoder = _decoder(config)
        depth = _depth(decoder)
        for key, value in self.sizes.items():
            if key == "num_hidden_layers":
                _set_depth(decoder, depth, value)
            elif key == "rope_theta" and "rope_theta" in decoder.get("rope_parameters", {}):
                decoder["rope_parameters"][key] = value
            elif key == "tie_word_embeddings":  # of a multimodal model, the whole config decides
                config[key] = decoder[key] = value
            else:
                decoder[key] = value
        return config

    def _shape(self, decoder: Json) -> Shape:
        given = dict(self.shape)
        depth, taps = _depth(decoder), given.pop("taps")
        layers = given["layers"]
        kinds = given.pop("windows", "f") * layers
        window = given.pop("window", 2048)
        rope = decoder.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or (rope.get("full_attention") or {}).get("rope_theta")
        defaults: Json = {
            "hidden": decoder["hidden_size"],
            "inner": 3 * decoder["hidden_size"],
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "vocab": decoder["vocab_size"],
            "draft_vocab": decoder["vocab_size"],
            "mask": decoder["vocab_size"] - 1,
            "theta": float(theta or decoder.get("rope_theta") or 1e4),
        }
        return Shape(
            **{
                **defaults,
                **given,
                "taps": tuple(taps) if isinstance(taps, list) else _spread(depth, taps),
                "target_layers": depth,
                "windows": tuple(window if kind == "s" else None for kind in kinds[:layers]),
            }
        )

    def _draft_config(self, shape: Shape, changes: Json, target: Json) -> Json:
        given = {key: value for key, value in self.config.items() if value != "REMOVED"}
        removed = self.config.keys() - given.keys()
        if self.dialect == "speculators":
            config = speculators_config(shape, **given)
            config["transformer_layer_config"] |= changes | self.body
            verifier = {"name_or_path": self.of, "architectures": target["architectures"]}
            config["speculators_config"] = {**config["speculators_config"], "verifier": verifier}
            if config.get("sample_from_anchor"):
                config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = shape.block
        else:
            given = {key: shape.vocab if value == "VOCAB" else value for key, value in given.items()}
            config = native_config(shape, **{**changes, **given})
            config["dflash_config"] |= self.nested
        return {key: value for key, value in config.items() if key not in removed}


def read_table() -> list[PublishedPair]:
    """Return every row."""
    rows = TABLE.read_text(encoding="utf-8").splitlines()
    return [PublishedPair(**json.loads(row)) for row in rows]


def write_headers(path: Path, config: Json, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a checkpoint for `validate`: its one file has a header, and a hole instead of weights."""
    path.mkdir(parents=True)
    write_config(path, config)
    header: Json = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + NUM_BYTES[dtype] * _product(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _reduced(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the head of a reduced vocabulary and its id map."""
    return {
        "lm_head.weight": ("BF16", (shape.draft_vocab, shape.hidden)),
        "d2t": ("I64", (shape.draft_vocab,)),
        "t2d": ("BOOL", (shape.vocab,)),
    }


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _decoder(config: Json) -> Json:
    return next((config[key] for key in NESTED if key in config), config)


def _depth(decoder: Json) -> int:
    return int(
        decoder.get("num_hidden_layers") or decoder.get("num_layers") or len(decoder.get("layers_block_type", ()))
    )


def _set_depth(decoder: Json, before: int, depth: int) -> None:
    """Set the number of layers, and repeat or cut lists with one value per layer."""
    for key, value in decoder.items():
        if isinstance(value, list) and len(value) == before:
            decoder[key] = (value * (depth // before + 1))[:depth]
        elif key == "per_layer_config":
            layers = ((layer, f"{layer % before:02}") for layer in range(depth))
            decoder[key] = {f"{layer:02}": value[like] for layer, like in layers if like in value}
    named = "num_layers" if "num_layers" in decoder and "num_hidden_layers" not in decoder else "num_hidden_layers"
    decoder[named] = depth


def _spread(depth: int, count: int) -> tuple[int, ...]:
    """Return evenly spread taps. Source: z-lab/dflash model.py build_target_layer_ids."""
    return tuple(round(1 + index * (depth - 4) / (count - 1)) for index in range(count))
