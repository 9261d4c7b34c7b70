"""Conversions between dialects: written configs and tensors, manifests, dropped copies and refusals."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_cli.conversion.verify import differing_fields
from dflash_cli.formats.dialect import writable_formats
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.errors import LossyConversion, PairMismatch, TensorMismatch, UnsupportedError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses

NOT_STATED = frozenset({"verifier"})


SHAPES = st.builds(
    support.Shape,
    hidden=st.sampled_from([8, 16]),
    inner=st.sampled_from([8, 24]),
    layers=st.just(2),
    heads=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([4, 8]),
    taps=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(lambda taps: tuple(sorted(taps))),
    target_layers=st.integers(6, 9),
    block=st.integers(2, 16),
    mask=st.integers(0, 31),
    bias=st.booleans(),
    windows=st.sampled_from([(None, None), (16, 16), (16, None), (None, 16)]),
    theta=st.sampled_from([10000.0, 1000000.0, 1234567.5]),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = st.sampled_from([None, YARN, {"type": "linear", "factor": 2.0}])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, rope=ROPES, causal=st.sampled_from([False, None]), data=st.data())
def test_there_and_back(shape: support.Shape, rope: Any, causal: Any, data: st.DataObject, tmp_path: Path) -> None:
    """native -> speculators -> native keeps every byte, and every field that both dialects state."""
    work = tmp_path / data.draw(st.uuids().map(str))
    changes = {} if causal is not None else {"is_causal": support.REMOVED}
    source = support.make_native(work / "source", shape, rope_scaling=rope, **changes)
    support.convert(source, work / "there", "speculators", verifier="acme/target")
    support.convert(work / "there", work / "back", "native")
    assert differing_fields(open_draft(source).config, open_draft(work / "back").config) == []
    there = open_draft(work / "there").config
    assert differing_fields(open_draft(source).config, there, ignored=NOT_STATED) == []
    support.assert_same_tensors(source, work / "back")
    second = support.convert(work / "back", work / "again", "speculators", verifier="acme/target")
    assert (work / "again" / "config.json").read_text() == (work / "there" / "config.json").read_text()
    assert second["verified"] == "roundtrip"


def test_carried_keys_survive_both_ways(tmp_path: Path) -> None:
    config = {"mask_token_id": 31, "target_layer_ids": [0, 2], "mask_token": "<mask>"}
    source = support.make_native(tmp_path / "source", dflash_config=config, use_cache=True)
    support.convert(source, tmp_path / "there", "speculators", verifier="acme/target")
    support.convert(tmp_path / "there", tmp_path / "back", "native")
    assert open_draft(tmp_path / "back").parsed.carried == {
        **open_draft(source).parsed.carried, "max_window_layers": 2,
    }  # fmt: skip


def test_native_to_native_states_the_keys_of_engines(tmp_path: Path) -> None:
    """Exports of NeMo Automodel (its own architecture) and Model-Optimizer (use_swa) become plain native."""
    config = {"mask_token_id": 31, "target_layer_ids": [0, 2], "use_swa": True, "swa_window_size": 16, "causal": False}
    source = support.make_native(
        tmp_path / "source", architectures=["Qwen3DFlashDraftModel"], dflash_config=config, is_causal=support.REMOVED
    )
    support.convert(source, tmp_path / "out", "native")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["layer_types"] == ["sliding_attention"] * 2
    assert (written["sliding_window"], written["use_sliding_window"], written["is_causal"]) == (16, True, False)
    assert "use_swa" not in written["dflash_config"]


@pytest.mark.parametrize("to", ["native", "speculators"])
def test_the_result_states_the_type_of_its_weights(to: str, tmp_path: Path) -> None:
    source = support.make_native(tmp_path / "source", dtype="bfloat16")
    plan = plan_conversion(open_draft(source), ConversionSpec(to=to, verifier="acme/target"))
    assert [warning.id for warning in plan.warnings] == ["dtype-corrected"]
    convert_draft(plan, tmp_path / "out")
    assert open_draft(tmp_path / "out").config.dtype == "float32"


class TestManifest:
    def test_every_key_and_tensor_is_listed(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source", auto_map={"AutoModel": "dflash.DFlashDraftModel"})
        manifest = support.convert(source, tmp_path / "out", "speculators", verifier="acme/target")
        changes = {entry["from"]: entry for entry in manifest["config"] if entry["from"]}
        assert changes["dflash_config.target_layer_ids"]["change"] == "derived"
        assert changes["dflash_config.target_layer_ids"]["to"] == "aux_hidden_state_layer_ids"
        assert changes["hidden_size"]["change"] == "moved"
        assert (changes["auto_map"]["to"], changes["auto_map"]["change"]) == (None, "dropped")
        assert changes["auto_map"]["why"]
        config = json.loads((source / "config.json").read_text())
        flat = {key for key in config if key != "dflash_config"} | {
            f"dflash_config.{k}" for k in config["dflash_config"]
        }
        assert changes.keys() == flat
        assert {entry["from"] for entry in manifest["tensors"]} == set(load_file(source / "model.safetensors"))
        assert {entry["change"] for entry in manifest["tensors"]} == {"kept"}

    def test_hashes_are_those_of_the_files(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        manifest = support.convert(source, tmp_path / "out", "speculators", verifier="acme/target")
        for side, directory in (("source", source), ("result", tmp_path / "out")):
            data = (directory / "model.safetensors").read_bytes()
            entry = manifest["weights"][side]["model.safetensors"]
            assert entry == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            config = (directory / "config.json").read_bytes()
            assert manifest["configs"][side]["sha256"] == hashlib.sha256(config).hexdigest()

    def test_model_card_and_licence_are_copied(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        (source / "README.md").write_text("a draft")
        (source / "LICENSE").write_text("MIT")
        manifest = support.convert(source, tmp_path / "out", "speculators", verifier="acme/target")
        changes = {entry["from"]: (entry["to"], entry["change"]) for entry in manifest["files"]}
        assert changes == {"LICENSE": ("LICENSE", "kept"), "README.md": ("README.md", "kept")}
        card = (tmp_path / "out" / "README.md").read_text()
        assert card.startswith("a draft\n\n## Provenance\n")
        dialects = {item.name: item.title for item in writable_formats()}
        assert all(text in card for text in ("`source`", dialects["native"], dialects["speculators"]))

    def test_permissions_are_ordinary(self, tmp_path: Path) -> None:
        support.convert(
            support.make_native(tmp_path / "source"), tmp_path / "out", "speculators", verifier="acme/target"
        )
        plain = tmp_path / "plain"
        plain.mkdir()
        assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode


class TestVerifier:
    def stored(self, tmp_path: Path, source: Path, **request: Any) -> str:
        support.convert(source, tmp_path / "out", "speculators", **request)
        verifier = open_draft(tmp_path / "out").config.verifier
        assert verifier is not None
        return verifier.name_or_path

    def test_given(self, tmp_path: Path) -> None:
        source = support.make_speculators(tmp_path / "source")
        assert self.stored(tmp_path, source, verifier="other/name") == "other/name"

    def test_carried(self, tmp_path: Path) -> None:
        assert self.stored(tmp_path, support.make_speculators(tmp_path / "source")) == "acme/target"

    def test_local_target_gives_its_name_and_a_warning(self, tmp_path: Path) -> None:
        source, target = support.make_native(tmp_path / "source"), support.make_target(tmp_path / "Qwen3-8B")
        outcome = invoke("convert", source, tmp_path / "out", "--to", "speculators", "--target", target)
        assert (outcome.code, outcome.notices) == (0, ("target-named-by-directory",))
        verifier = open_draft(tmp_path / "out").config.verifier
        assert verifier is not None
        assert (verifier.name_or_path, verifier.architectures) == ("Qwen3-8B", ("Qwen3ForCausalLM",))

    def test_none(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        outcome = invoke("convert", source, tmp_path / "out", "--to", "speculators")
        assert (outcome.code, outcome.error_id) == (2, "verifier-unknown")


class TestReducedHead:
    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[Path, Path]:
        return (
            support.make_speculators(tmp_path / "draft", support.REDUCED),
            support.make_target(tmp_path / "target", support.REDUCED),
        )

    def test_stays_in_its_dialect(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        support.convert(pair[0], tmp_path / "out", "speculators")
        support.assert_same_tensors(pair[0], tmp_path / "out")
        assert open_draft(tmp_path / "out").config == open_draft(pair[0]).config

    @pytest.mark.parametrize("to", ["native", "sglang", "mlx"])
    def test_dropped_only_on_demand(self, pair: tuple[Path, Path], tmp_path: Path, to: str) -> None:
        """Without the map the draft proposes other tokens, even if the head equals the target's rows."""
        draft, target = pair
        args = ("convert", draft, tmp_path / "out", "--to", to, "--target", target)
        refused = invoke(*args)
        assert (refused.code, refused.error_id, refused.field) == (5, "reduced-vocabulary", "draft_vocab_size")
        assert refused.error is not None
        assert "--allow-lossy" in str(refused.error.hint)
        assert not (tmp_path / "out").exists()
        if to == "sglang":
            assert invoke("validate", draft, "-t", target, "-e", to, "--fix-out", tmp_path / "out").code == 5
        assert not (tmp_path / "out").exists()
        assert invoke(*args, "--allow-lossy").code == 0

    def test_dropped_if_it_equals_the_targets_rows(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        draft, target = pair
        args = ("convert", draft, tmp_path / "out", "--to", "native", "--target", target, "--allow-lossy")
        outcome = invoke(*args)
        assert (outcome.code, outcome.notices) == (0, ("reduced-head-dropped",))
        assert outcome.out == f"{tmp_path / 'out'}\n"
        config = open_draft(tmp_path / "out").config
        assert config.draft_vocab_size == config.vocab_size == 32
        assert not {"lm_head.weight", "d2t", "t2d"} & set(Checkpoint(tmp_path / "out").tensors)

    def test_dropped_in_another_element_type(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        """The comparison casts the target's rows to the file's type."""
        draft, target = pair
        arrays = {k: v.astype(np.float64) if k == "model.embed_tokens.weight" else v for k, v in load(target).items()}
        arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.float64)
        support.write_checkpoint(target, support.target_config(support.REDUCED), arrays)
        support.convert(draft, tmp_path / "out", "native", target=target, allow_lossy=True)

    def test_tied_target(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        draft, target = pair
        arrays = load(target)
        arrays["model.embed_tokens.weight"] = arrays.pop("lm_head.weight")
        config = support.target_config(support.REDUCED, tie_word_embeddings=True)
        support.write_checkpoint(target, config, arrays)
        support.convert(draft, tmp_path / "out", "native", target=target, allow_lossy=True)

    @pytest.mark.parametrize("allow_lossy", [False, True])
    def test_refused_if_one_bit_differs(self, pair: tuple[Path, Path], tmp_path: Path, allow_lossy: bool) -> None:
        draft, target = pair
        arrays = load(draft)
        arrays["lm_head.weight"].view(np.uint8)[7, 0] ^= 1
        support.write_checkpoint(draft, support.speculators_config(support.REDUCED), arrays)
        args = ["--allow-lossy"] if allow_lossy else []
        outcome = invoke("convert", draft, tmp_path / "out", "--to", "native", "--target", target, *args)
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "copy-differs", "lm_head.weight")
        row = int(support.kept_ids(support.REDUCED)[7])
        assert outcome.error is not None
        assert re.findall(r"\d+", outcome.error.found) == ["7", str(row)]
        assert not (tmp_path / "out").exists()

    def test_refused_without_a_target(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        outcome = invoke("convert", pair[0], tmp_path / "out", "--to", "native")
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "copy-not-compared", "lm_head.weight")

    def test_refused_for_another_target(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        other = support.make_target(tmp_path / "other", replace(support.REDUCED, vocab=40))
        with refuses(PairMismatch, field="vocab_size"):
            support.convert(pair[0], tmp_path / "out", "native", target=other)

    def test_pieces_cover_every_row(self, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """If pieces are much smaller than the head, each row is still compared once."""
        from dflash_cli.checkpoints import target_copies

        monkeypatch.setattr(target_copies, "PIECE_BYTES", 200)
        draft = open_draft(pair[0])
        target = open_target(pair[1])
        mine, theirs = draft.checkpoint.tensors["lm_head.weight"], target.checkpoint.tensors["lm_head.weight"]
        ids = target_copies.target_ids(draft, "lm_head.weight")
        pieces = list(target_copies._pieces(mine, theirs, ids))
        assert [row for begin, end in pieces for row in range(begin, end)] == list(range(12))
        assert len(pieces) > 3
        assert target_copies.find_difference(draft, "lm_head.weight", target) is None


def load(path: Path) -> support.Arrays:
    return dict(load_file(path / "model.safetensors"))


class TestFullCopies:
    """speculators 0.5 to 0.8 wrote the target's embedding and head into files with a full vocabulary as well."""

    def source(self, tmp_path: Path, *, identity: bool = True) -> Path:
        target = support.target_arrays()
        extra: support.Arrays = {
            "embed_tokens.weight": target["model.embed_tokens.weight"],
            "lm_head.weight": target["lm_head.weight"],
            "d2t": np.zeros(32, dtype=np.int64) if identity else np.arange(32, dtype=np.int64)[::-1].copy(),
            "t2d": np.ones(32, dtype=np.bool_),
        }
        return support.make_speculators(tmp_path / "source", extra=extra, num_target_layers=4)

    def test_dropped_with_proof(self, tmp_path: Path) -> None:
        manifest = support.convert(
            self.source(tmp_path), tmp_path / "out", "native", target=support.make_target(tmp_path / "target")
        )
        dropped = {entry["from"]: entry["why"] for entry in manifest["tensors"] if entry["change"] == "dropped"}
        assert dropped["embed_tokens.weight"] == dropped["lm_head.weight"] != dropped["d2t"] == dropped["t2d"]
        assert set(load(tmp_path / "out")) == set(support.body_arrays())

    def test_refused_without_a_target(self, tmp_path: Path) -> None:
        with refuses(LossyConversion, "copy-not-compared", field="lm_head.weight"):
            support.convert(self.source(tmp_path), tmp_path / "out", "native")

    def test_embedding_may_be_dropped_on_demand(self, tmp_path: Path) -> None:
        target = support.target_arrays()
        extra: support.Arrays = {"embed_tokens.weight": target["model.embed_tokens.weight"]}
        source = support.make_speculators(tmp_path / "source", extra=extra, num_target_layers=4)
        with refuses(LossyConversion, "copy-not-compared", field="embed_tokens.weight") as caught:
            support.convert(source, tmp_path / "out", "native")
        assert "--allow-lossy" in str(caught.value.hint)
        outcome = invoke("convert", source, tmp_path / "out", "--to", "native", "--allow-lossy")
        assert (outcome.code, outcome.notices) == (0, ("embedding-not-compared",))

    def test_kept_in_their_dialect_but_for_the_identity_map(self, tmp_path: Path) -> None:
        support.convert(self.source(tmp_path), tmp_path / "out", "speculators")
        assert set(load(tmp_path / "out")) == {*support.body_arrays(), "embed_tokens.weight", "lm_head.weight"}

    def test_a_map_that_reorders_is_refused(self, tmp_path: Path) -> None:
        with refuses(UnsupportedError, "id-map-reorders", field="d2t"):
            support.convert(self.source(tmp_path, identity=False), tmp_path / "out", "speculators")


class TestRefusals:
    def test_depth_must_be_known(self, tmp_path: Path) -> None:
        source = support.make_speculators(tmp_path / "source")
        outcome = invoke("convert", source, tmp_path / "out", "--to", "native")
        assert (outcome.code, outcome.error_id) == (2, "target-depth-unknown")
        target = support.make_target(tmp_path / "target")
        support.convert(source, tmp_path / "out", "native", target=target)
        assert open_draft(tmp_path / "out").config.num_target_layers == 4

    def test_scales(self, tmp_path: Path) -> None:
        config = {"mask_token_id": 31, "target_layer_ids": [0, 2], "output_multiplier": 0.5}
        source = support.make_native(tmp_path / "source", dflash_config=config)
        args = ["convert", source, tmp_path / "out", "--to", "speculators", "--target-name", "acme/target"]
        refused = invoke(*args)
        assert (refused.code, refused.field) == (5, "output_multiplier")
        outcome = invoke(*args, "--allow-lossy")
        assert (outcome.code, outcome.notices) == (0, ("scales-dropped",))

    def test_mask_embedding(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        (source / "mask_embedding.pt").write_bytes(b"")
        args = ["convert", source, tmp_path / "out", "--to", "speculators", "--target-name", "acme/target"]
        refused = invoke(*args)
        assert refused.code == 5
        assert refused.error is not None
        assert refused.error.path == source / "mask_embedding.pt"
        assert invoke(*args, "--allow-lossy").code == 0

    def test_causal_full_layers(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source", is_causal=True)
        with refuses(LossyConversion, "causal-full-layers", field="causal"):
            support.convert(source, tmp_path / "out", "speculators", verifier="acme/target")

    def test_mixed_layers_warn_about_vllm(self, tmp_path: Path) -> None:
        shape = support.Shape(windows=(16, None))
        source = support.make_native(tmp_path / "source", shape, is_causal=support.REMOVED)
        plan = plan_conversion(open_draft(source), ConversionSpec(to="speculators", verifier="acme/target"))
        assert "causality-differs" in [warning.id for warning in plan.warnings]

    def test_malformed_tensors(self, tmp_path: Path) -> None:
        arrays = support.body_arrays()
        del arrays["norm.weight"]
        arrays["extra"] = np.zeros(1, dtype=np.float32)
        source = support.write_checkpoint(tmp_path / "source", support.native_config(), arrays)
        outcome = invoke("convert", source, tmp_path / "out", "--to", "speculators", "--target-name", "a/b")
        assert (outcome.code, outcome.error_id) == (3, "tensor-mismatch")
        assert isinstance(outcome.error, TensorMismatch)
        assert (outcome.error.missing, outcome.error.unexpected) == (("norm.weight",), ("extra",))

    @pytest.mark.parametrize("force", [False, True])
    def test_a_destination_that_is_not_a_checkpoint(self, tmp_path: Path, force: bool) -> None:
        precious = tmp_path / "out"
        precious.mkdir()
        (precious / "thesis.txt").write_text("years of work")
        args = ["--force"] if force else []
        outcome = invoke("convert", tmp_path / "absent", precious, "--to", "native", *args)
        assert outcome.code == 2
        assert (precious / "thesis.txt").exists()

    def test_the_source_is_not_replaced(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        outcome = invoke("convert", source, source, "--to", "native", "--force")
        assert (outcome.code, outcome.error_id) == (2, "destination-holds-source")


def test_the_bundled_pair_converts_and_validates(tmp_path: Path) -> None:
    for name, to, *options in (("tiny", "speculators"), ("tiny:reduced", "native", "--allow-lossy")):
        destination = tmp_path / to
        assert invoke("convert", name, destination, "--to", to, *options).code == 0
        assert invoke("validate", destination, "--engine", "vllm", "--strict").code == 0


def test_an_interrupted_conversion_does_not_read_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that hash end with the block that they read."""
    from dflash_runtime.checkpoint.stored import digests

    monkeypatch.setattr(digests, "HASH_BYTES", 64)
    source = support.make_native(tmp_path / "source")
    counts: list[int] = []

    def interrupt(stage: str, count: int, total: int) -> None:
        if stage == "hash":
            counts.append(count)
            raise KeyboardInterrupt

    plan = plan_conversion(open_draft(source), ConversionSpec(to="native"))
    with pytest.raises(KeyboardInterrupt):
        convert_draft(plan, tmp_path / "out", progress=interrupt)
    assert len(counts) <= 2
    assert list(tmp_path.iterdir()) == [source]
