"""Drafts of other kinds: a sound one has no fault, each fault is named, and names are converted byte for byte."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_cli import validate
from dflash_cli.engines.serving_engine import all_engines
from dflash_cli.formats.detection import detect_from
from dflash_cli.formats.dialect import all_formats
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.kind_reading import KindReading
from dflash_cli.formats.draft_kinds.table import FORMS, evaluate
from dflash_cli.formats.fields import REMOVED, with_keys
from dflash_runtime.errors import MISSING
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.kinds import CASES, KindCase, kind_of
from dflash_testing.paths import ROOT

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
WRONG: dict[str, Any] = {
    "count": 0, "index": -1, "number": "1", "positive": 0, "flag": "yes", "text": 5, "layers": [], "kinds": "full",
    "one kind": ["full_attention", "sliding_attention"],
}  # fmt: skip
"""Form -> a value that lacks it."""


def read(case: KindCase, config: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None) -> KindReading:
    found = {name: array.shape for name, array in case.arrays().items()} if shapes is None else shapes
    return KindReading(kind_of(case.kind), config, found)


def shapes_of(case: KindCase) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in case.arrays().items()}


def test_every_kind_has_a_case() -> None:
    kinds = {item.name for item in all_formats() if isinstance(item, Kind)}
    assert kinds == {case.kind for case in CASES.values()}
    assert set(WRONG) == set(FORMS)


@EVERY
def test_a_sound_draft_has_no_fault_and_is_described(case: KindCase, tmp_path: Path) -> None:
    draft = case.write(tmp_path / "draft")
    assert detect_from(case.config, frozenset(case.arrays()), draft).format.name == case.kind
    report = validate(draft=str(draft))
    assert {item.id for item in report.findings if item.id != "C01"} <= {"D02"}
    outcome = invoke("inspect", draft, "--json")
    document = json.loads(outcome.out)
    assert (outcome.code, document["role"], document["dialect"]) == (0, "draft", case.kind)
    assert document["config"]["sizes"]["hidden"] == support.SMALL.hidden
    stated = {name: value for _, name, value in case.reading.stated.values()}
    assert stated.items() <= document["config"]["settings"].items()
    assert not document["unserved"]
    assert "unstated" not in document["config"]["head"]
    for name in case.served:
        assert name in document["config"]["served_by"]


@pytest.mark.parametrize("line", (ROOT / "tests/golden/kind_layouts.jsonl").read_text().splitlines())
def test_a_draft_that_speculators_saved_fits_its_table(line: str) -> None:
    """Recorded from speculators 0.9.0 by tests/golden/kind_layouts.py."""
    saved = json.loads(line)
    reading = KindReading(kind_of(saved["kind"]), saved["config"], {k: tuple(v) for k, v in saved["shapes"].items()})
    assert not [*reading.absent, *reading.wrong, *reading.unknown]
    assert (reading.missing, reading.unexpected, reading.misshapen) == ([], [], {})
    assert len(reading.expected) >= 13


@EVERY
def test_each_engine_serves_it_from_its_first_release(case: KindCase, tmp_path: Path) -> None:
    kind = kind_of(case.kind)
    for engine in all_engines():
        first = case.served.get(engine.name)
        for release in engine.releases or ((),):
            is_served = first is not None and (not release or release >= tuple(map(int, first.split("."))))
            assert engine(release).serves_kind(kind, case.config) == is_served, engine(release)
    draft = case.write(tmp_path / "draft")
    verdicts = validate(draft=str(draft), engine=("vllm", "sglang", "transformers", "llama.cpp")).verdicts
    assert {item.name for item in verdicts if item.outcome != "stops"} == set(case.served)
    assert all(item.reasons == ("C01",) for item in verdicts if item.outcome == "stops")


@EVERY
def test_every_key_that_is_removed_or_wrong_is_named(case: KindCase) -> None:
    sound = read(case, case.config)
    assert not [*sound.absent, *sound.wrong]
    for key, name, _ in sound.stated.values():
        without = read(case, with_keys(case.config, dict.fromkeys(sound.names_of(key), REMOVED)))
        absent = {fault.key.rpartition(".")[2] for fault in without.absent}
        names = {item.rpartition(".")[2] for item in sound.names_of(key)}
        is_needed = key.is_needed or bool(key.needed_by and sound.values[key.needed_by])
        assert bool(absent & names) == is_needed, name
        wrong = "never" if key.choices else WRONG[key.form]
        assert name in [fault.key for fault in read(case, with_keys(case.config, {name: wrong})).wrong]


def test_a_setting_that_is_stated_in_two_ways_is_named() -> None:
    """At the top level and in an object. Lists of tapped layers may count from 0 and from 1."""
    found = set()
    for case in CASES.values():
        sound = read(case, case.config)
        for key, name, _ in sound.stated.values():
            for other in set(sound.names_of(key)) - {name} if key.form in ("count", "layers") else ():
                wrong = list(
                    read(case, with_keys(case.config, {other: 77 if key.form == "count" else [0, 1, 9]})).wrong
                )
                assert [fault.key for fault in wrong] in ([other], [name]), (name, other)
                found.add((case.kind, key.size))
    assert {
        ("domino", "emb"),
        ("xpress", "block"),
        ("xpress", "taps"),
        ("eagle3", "aux"),
        ("mtp", "num_layers"),
    } <= found
    config = with_keys(CASES["xpress"].config, {"aux_hidden_state_layer_ids": [1, 3]})
    assert not list(read(CASES["xpress"], config).wrong)


@EVERY
def test_every_tensor_that_is_removed_or_misshapen_is_named(case: KindCase) -> None:
    shapes = shapes_of(case)
    sound = read(case, case.config, shapes)
    assert not sound.missing
    assert not sound.unexpected
    assert not sound.misshapen
    if not sound.is_listed:
        return
    assert len(sound.expected) >= 6
    for name in sound.expected:
        assert read(case, case.config, {key: value for key, value in shapes.items() if key != name}).missing == [name]
        assert list(read(case, case.config, {**shapes, name: (*shapes[name], 3)}).misshapen) == [name]
        wider = (shapes[name][0] + 1, *shapes[name][1:])
        assert list(read(case, case.config, {**shapes, name: wider}).misshapen) == [name]
        assert read(case, case.config, {**shapes, f"{name}.extra": (3,)}).unexpected == [f"{name}.extra"] or (
            sound.kind.free != r"(?!)"
        )


@EVERY
def test_no_unknown_key_is_passed_over(case: KindCase, tmp_path: Path) -> None:
    container = next((key for key in ("dflash_config", "transformer_layer_config") if key in case.config), None)
    names = ["depth_of_head", *([f"{container}.depth_of_head"] if container else [])]
    config = with_keys(case.config, dict.fromkeys(names, 2))
    before, after = list(read(case, case.config).unknown), list(read(case, config).unknown)
    assert {fault.key for fault in after if fault not in before} == set(names)
    report = validate(draft=str(case.write(tmp_path / "draft", config)))
    assert {f"config.json:{name}" for name in names} <= {item.location for item in report.findings if item.id == "D02"}


@pytest.mark.parametrize(
    ("name", "change", "rule", "outcomes"),
    [
        ("lilicorr", ("removed", "lilicorr.out_head.weight"), "D03", {"vllm": "stops", "sglang": "stops"}),
        ("lilicorr", ("removed", "layers.0.mlp.up_proj.weight"), "D03", {"vllm": "drops", "sglang": "drops"}),
        ("xpress", ("removed", "xpress_head.mix.L"), "D03", {"vllm": "stops"}),
        ("xpress", ("removed", "xpress_head.w1.weight"), "D03", {"vllm": "drops"}),
        ("xpress", ("added", "xpress_head.w3.weight"), "D04", {"vllm": "stops"}),
        ("laguna", ("added", "aux_hidden_norms.7.weight"), "D04", {"vllm": "stops", "sglang": "serves"}),
        ("muse", ("added", "model."), "D03", {"vllm": "stops", "sglang": "serves", "llama.cpp": "stops"}),
    ],
)
def test_an_engine_stops_or_drops_as_its_loader_does(
    name: str, change: tuple[str, str], rule: str, outcomes: dict[str, str], tmp_path: Path
) -> None:
    case, arrays = CASES[name], CASES[name].arrays()
    verb, tensor = change
    if tensor == "model.":
        arrays, rule = {f"model.{key}": value for key, value in arrays.items()}, "D04"
    elif verb == "removed":
        del arrays[tensor]
    else:
        arrays[tensor] = np.zeros(4, dtype=np.float32)
    draft = case.write(tmp_path / "draft", arrays=arrays)
    report = validate(draft=str(draft), engine=tuple(outcomes))
    assert {item.name: item.outcome for item in report.verdicts} == outcomes
    found = [item for item in report.findings if item.id == rule]
    assert found
    assert all(tensor in f"{item.location} {item.message}" for item in found)
    for verdict in report.verdicts:
        assert verdict.reasons == ((rule,) if verdict.outcome != "serves" else ())


@pytest.mark.parametrize("name", ["xpress", "lilicorr", "eagle 3", "p-eagle"])
def test_a_reduced_vocabulary_or_a_setting_that_an_engine_ignores_is_told(name: str, tmp_path: Path) -> None:
    is_eagle = name in ("eagle 3", "p-eagle")
    changes = {"norm_before_residual": True} if is_eagle else {"draft_vocab_size": 12}
    config = with_keys(CASES[name].config, changes)
    verdicts = validate(draft=str(CASES[name].write(tmp_path / "draft", config)), engine=("vllm", "sglang")).verdicts
    found = {item.name: item.outcome for item in verdicts}
    expected = {"eagle 3": ("serves", "drops"), "p-eagle": ("serves", "stops")}.get(name, ("stops", "stops"))
    assert (found["vllm"], found["sglang"]) == expected


LINES = {
    ("xpress", "vllm"): (
        'VLLM_USE_V2_MODEL_RUNNER=1 vllm serve TARGET --speculative-config \'{"method": "dflash", "model": "DRAFT", '
        '"num_speculative_tokens": 3}\''
    ),
    ("domino", "sglang"): (
        "python3 -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
        "--speculative-draft-model-path DRAFT --speculative-num-draft-tokens 4"
    ),
    ("eagle 3", "vllm"): (
        'vllm serve TARGET --speculative-config \'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 2}\''
    ),
    ("eagle 3", "sglang"): (
        "python3 -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path DRAFT --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3"
    ),
    ("eagle 3", "llama.cpp"): (
        "llama-server -m target.gguf -md draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 2"
    ),
    ("p-eagle", "vllm"): (
        'vllm serve TARGET --speculative-config \'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 2, '
        '"parallel_drafting": true}\''
    ),
    ("eagle", "vllm"): (
        'vllm serve TARGET --speculative-config \'{"method": "eagle", "model": "DRAFT", "num_speculative_tokens": 2}\''
    ),
    ("mtp", "vllm"): (
        'vllm serve TARGET --speculative-config \'{"method": "mtp", "model": "DRAFT", "num_speculative_tokens": 2}\''
    ),
    ("mtp of sglang", "sglang"): (
        "python3 -m sglang.launch_server --model-path TARGET --speculative-algorithm NEXTN "
        "--speculative-draft-model-path DRAFT --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3"
    ),
}


@EVERY
def test_each_serving_engine_has_a_command_and_each_other_a_reason(case: KindCase, tmp_path: Path) -> None:
    draft, target = case.write(tmp_path / "draft"), support.make_target(tmp_path / "target")
    tokens = ["-k", 2] if kind_of(case.kind).is_chain else []
    for engine in all_engines():
        outcome = invoke("serve-command", draft, "--target", target, "--engine", engine.name, *tokens)
        assert outcome.code == (0 if engine.name in case.served else 5), outcome.err
        line = outcome.out.strip().splitlines()[-1] if outcome.out else ""
        shown = line.replace(str(draft), "DRAFT").replace(str(target), "TARGET")
        for (name, served), expected in LINES.items():
            if CASES[name] is case and served == engine.name:
                assert shown == expected
        if engine.name not in case.served:
            assert outcome.error is not None
            refusal = "does not serve" if engine().judges(kind_of(case.kind)) else "not known whether it serves"
            assert refusal in outcome.error.message


def test_a_chain_of_drafts_needs_a_number_of_tokens(tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target")
    plain = CASES["eagle 3"].write(tmp_path / "plain")
    refused = invoke("serve-command", plain, "--target", target, "--engine", "vllm")
    assert (refused.code, "-k" in refused.err) == (2, True)
    stated = CASES["eagle 3 in speculators"].write(tmp_path / "stated")
    told = invoke("serve-command", stated, "--target", target, "--engine", "vllm")
    assert '"num_speculative_tokens": 3' in told.out


ROUND_TRIPS = [
    ("domino", "native", "sglang"), ("domino by its name", "sglang", "native"), ("xpress", "speculators", "native"),
    ("xpress in speculators", "vllm", "speculators"), ("eagle 3", "vllm", "sglang"),
    ("eagle 3", "speculators", "sglang"), ("eagle 3 in speculators", "native", "speculators"),
    ("p-eagle", "speculators", "native"),
    ("p-eagle in speculators", "vllm", "speculators"), ("eagle", "sglang", "native"), ("mtp", "speculators", "native"),
    ("mtp in speculators", "sglang", "speculators"), ("mtp", "sglang", "vllm"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "to", "back"), ROUND_TRIPS)
def test_names_are_converted_and_back(name: str, to: str, back: str, tmp_path: Path) -> None:
    """The result is sound, has the same settings and bytes, and the engine it is named after serves it."""
    case = CASES[name]
    draft, target = case.write(tmp_path / "draft"), support.make_target(tmp_path / "target")
    options = ("--target", target, "--target-name", "acme/target")
    there, again = tmp_path / "there", tmp_path / "again"
    for source, result, word in ((draft, there, to), (there, again, back)):
        done = invoke("convert", source, result, "--to", word, *options)
        assert done.code == 0, done.err
        report = validate(draft=str(result), engine=(word,) if word in ("vllm", "sglang") else ())
        assert not [item for item in report.findings if item.severity == "error"], report.findings
    arrays, written = load_file(draft / "model.safetensors"), load_file(again / "model.safetensors")
    assert arrays.keys() == written.keys()
    assert all(np.array_equal(arrays[key], written[key]) for key in arrays)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (draft, again)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    before, after = (read(case, config).values for config in configs)
    assert {key: value for key, value in before.items() if value is not None}.items() <= after.items()
    manifest = json.loads((there / "conversion.json").read_text())
    assert {item["change"] for item in manifest["tensors"]} <= {"kept", "renamed"}
    assert len(manifest["tensors"]) == len(arrays)


def test_the_assistant_of_muse_becomes_a_draft_that_dflash_runs(tmp_path: Path) -> None:
    draft, target = CASES["muse"].write(tmp_path / "draft"), support.make_target(tmp_path / "target")
    refused = invoke("generate", "x", "-d", draft, "-t", target, "-n", 2)
    assert refused.code == 5
    out = tmp_path / "out"
    assert invoke("convert", draft, out, "--to", "native", "--target", target).code == 0
    config = json.loads((out / "config.json").read_text())
    assert config["is_causal"] is False
    assert config["dflash_config"] == {"mask_token_id": 31, "target_layer_ids": [0, 2]}
    assert not validate(draft=str(out), target=str(target)).fails()


def test_a_target_with_too_few_layers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    draft = CASES["muse"].write(tmp_path / "draft", with_keys(CASES["muse"].config, {"num_target_layers": REMOVED}))
    shape = replace(support.SMALL, target_layers=2)
    target = support.make_target(tmp_path / "target", shape, num_hidden_layers=2)
    outcome = invoke("convert", draft, tmp_path / "out", "--to", "native", "--target", target)
    assert outcome.code == 3
    assert "target_layer_ids" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "to", "error", "code"),
    [
        ("domino, causal_v5", "sglang", "kind-not-renamed", 5), ("jetspec", "native", "kind-not-renamed", 5),
        ("hunyuan", "native", "kind-not-renamed", 5), ("lilicorr", "vllm", "kind-not-renamed", 5),
        ("xpress", "vllm", "kind-not-renamed", 5), ("adaflash", "native", "kind-not-renamed", 5),
    ],
)  # fmt: skip
def test_a_kind_with_more_than_other_names_is_not_converted(
    name: str, to: str, error: str, code: int, tmp_path: Path
) -> None:
    draft = CASES[name].write(tmp_path / "draft")
    outcome = invoke("convert", draft, tmp_path / "out", "--to", to)
    assert outcome.error is not None
    assert (outcome.code, outcome.error.id) == (code, error)
    assert not (tmp_path / "out").exists()


def test_a_faulty_draft_is_not_renamed(tmp_path: Path) -> None:
    arrays = CASES["domino"].arrays()
    del arrays["prefix_gru.weight_hh_l0"]
    draft = CASES["domino"].write(tmp_path / "draft", arrays=arrays)
    outcome = invoke("convert", draft, tmp_path / "out", "--to", "native")
    assert outcome.error is not None
    assert (outcome.code, outcome.error.id) == (3, "kind-malformed")
    assert "prefix_gru.weight_hh_l0" in outcome.error.message
    option = invoke("convert", draft, tmp_path / "out", "--to", "native", "--normalise-taps")
    assert (option.code, option.error and option.error.id) == (2, "option-of-dflash")


def test_a_refusal_of_another_name_prints_the_conversion(tmp_path: Path) -> None:
    draft = CASES["domino by its name"].write(tmp_path / "draft")
    (found,) = [item for item in validate(draft=str(draft), engine=("sglang",)).findings if item.severity == "error"]
    assert found.fix.startswith("dflash convert")
    assert "--to sglang" in found.fix


@EVERY
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_no_value_of_a_config_stops_the_reader(case: KindCase, seed: int, tmp_path: Path) -> None:
    """Every command ends with a documented exit code."""
    random = Random(seed)
    junk = [None, 0, -1, 1e308, float("inf"), True, "x", [], [None], {}, {"a": 1}, 10**30, [10**20], ["a"]]
    names = [name for _, name, _ in case.reading.stated.values()] + ["architectures", "model_type"]
    target = support.make_target(tmp_path / "target")
    for number in range(1 if seed == 1 else 5):
        config = with_keys(case.config, {random.choice(names): random.choice(junk) for _ in range(2)})
        draft = case.write(tmp_path / f"draft-{number}", config)
        for words in (
            ("inspect", draft),
            ("validate", draft, "--engine", "vllm,sglang,llama.cpp,transformers"),
            ("serve-command", draft, "--target", target, "--engine", "vllm,sglang"),
            ("convert", draft, tmp_path / f"out-{number}", "--to", "native", "--target-name", "a/b"),
        ):
            assert invoke(*words).code in (0, 2, 3, 5), config


def test_formulas() -> None:
    sizes = {"block": 4, "taps": [1, 2, 3], "width": None, "hidden": 16, "ratio": 2.5, "group": 5, "huge": 1e300}
    found = [
        evaluate(text, sizes)
        for text in (
            "2*block-1",
            "taps*hidden",
            "width or hidden",
            "ratio*block",
            "hidden/group",
            "absent",
            "block-4",
            "huge*huge",
        )
    ]
    assert found == [7, 48, 16, 10, 3, None, None, None]


def test_every_kind_names_its_source_and_its_release() -> None:
    for item in all_formats():
        if isinstance(item, Kind):
            assert "Source" in (type(item).__doc__ or ""), item.name
            assert item.head, item.name


def test_a_key_without_a_default_has_none() -> None:
    """A reader's default is a value of the key's form, or a formula."""
    for item in all_formats():
        for key in item.stated if isinstance(item, Kind) else ():
            if key.default is not MISSING and not isinstance(key.default, str):
                assert not key.fault(key.default), (item.name, key.size)


def test_the_table_of_kinds_in_the_documents_is_true() -> None:
    from runpy import run_path

    table = run_path(str(ROOT / "scripts" / "kind_table.py"))["table"]
    assert table() in (ROOT / "docs" / "reference" / "drafts.md").read_text(encoding="utf-8")


def test_a_config_with_any_number_of_layers_is_read_in_seconds() -> None:
    """The fuzzer found 5 s for 2**31 layers: as many tensors were listed as a config asked for."""
    case = CASES["xpress"]
    reading = KindReading(case.reading.kind, {**case.config, "num_hidden_layers": 2**31})
    assert len(case.reading.expected) < len(reading.expected) < 50_000
