"""Exports: each form by hand, and refusals of results that lack a fact."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_cli.commands.export import ExportRequest
from dflash_cli.publishing.exports.export_format import EXPORTS, PACKAGE
from dflash_cli.terminal.requests import parameters_of
from dflash_runtime.documents import to_json
from dflash_testing.command_line import run_main
from dflash_testing.evaluations import drawn_evaluation, write_evaluation

BY_HAND: dict[str, Any] = {
    "num_drafts": 10,
    "num_accepted_tokens": 18,
    "per_pos_accepted": [8, 6, 4, 0],
    "per_pos_verified": [10] * 4,
    "histogram": [2, 2, 2, 4, 0],
}
"""Ten steps of four draft tokens: 2 accepted none, 2 one, 2 two and 4 three. That is 2.8 tokens per step."""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_evaluation(tmp_path / "r.json", drawn_evaluation(), **BY_HAND)


def exported(to: str, *arguments: str) -> str:
    done = run_main("export", "r.json", "--to", to, *arguments)
    assert done.code == 0, done.err
    return done.out


def test_the_command_names_every_format() -> None:
    EXPORTS.discover(PACKAGE)
    (to,) = [item for item in parameters_of(ExportRequest) if item.name == "to"]
    assert sorted(to.choices) == sorted(EXPORTS)


def test_vllm_gets_marginal_rates_or_the_length() -> None:
    option, text = shlex.split(exported("vllm-rates"))
    config = json.loads(text)
    assert option == "--speculative-config"
    rates = config["synthetic_acceptance_rates"]
    assert rates == [0.8, 0.6, 0.4, 0.0]
    assert (config["rejection_sample_method"], config["num_speculative_tokens"], len(rates)) == ("synthetic", 4, 4)
    assert "synthetic_acceptance_length" not in config, "the two exclude each other"
    length = json.loads(shlex.split(exported("vllm-length"))[1])
    assert length["synthetic_acceptance_length"] == 2.8 == 1 + sum(rates)
    assert "synthetic_acceptance_rates" not in length


@pytest.mark.parametrize(("draft", "method", "block"), [("tiny", "dflash", 8), ("tiny:dspark", "dspark", None)])
def test_the_method_is_the_one_of_the_serve_command(draft: str, method: str, block: int | None) -> None:
    done = run_main("eval-acceptance", draft, "--num-prompts", "2", "-n", "8", "--json")
    Path("r.json").write_text(done.out)
    served = run_main("serve-command", draft, "--engine", "vllm").out
    for text in (served, exported("vllm-rates"), exported("vllm-length")):
        words = shlex.split(text)
        assert json.loads(words[words.index("--speculative-config") + 1])["method"] == method
    profile = json.loads(exported("speculation-profile"))
    assert (profile["method"], profile["block_size"]) == (method, block)
    assert profile["max_supported_k"] == profile["num_speculative_tokens"]


@pytest.mark.parametrize("command", ["card", "export"])
def test_a_result_without_a_draft_model_is_refused(command: str) -> None:
    done = run_main("eval-acceptance", "-t", "tiny", "--drafting", "ngram", "--num-prompts", "2", "--json")
    Path("r.json").write_text(done.out)
    refused = run_main(command, "r.json", *(("--to", "vllm-rates") if command == "export" else ()))
    assert (refused.code, refused.error_id, refused.field) == (2, "no-draft-model", "drafting")


def test_sglangs_length_includes_the_bonus_and_tensorrts_does_not() -> None:
    assert exported("tensorrt-llm-length") == "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=1.8\n"
    assert exported("sglang-length").splitlines()[0] == "SGLANG_SIMULATE_ACC_LEN=2.8"


def test_a_profile_has_marginal_and_conditional_rates_that_agree() -> None:
    found = json.loads(exported("speculation-profile"))
    assert found["marginal_accept_rates"] == [0.8, 0.6, 0.4, 0.0]
    assert found["conditional_accept_rates"] == [0.8, 0.75, round(4 / 6, 6), 0.0]
    assert found["acceptance_length_histogram"] == {"1": 2, "2": 2, "3": 2, "4": 4, "5": 0}
    assert found["mean_accept_length"] == 2.8
    assert found["mean_accept_length_per_request"] == round(
        drawn_evaluation().total.definitions["zlab_untruncated"] or 0, 6
    )
    assert found["validation"]["mean_consistency"]["passed"]
    assert found["validation"]["marginal_monotonicity"] == {"passed": True, "violations": []}
    assert (found["measured"], found["method"], found["accept_length_model"]) == (True, "dflash", "measured_per_k")
    assert (found["num_speculative_tokens"], found["block_size"], found["max_supported_k"]) == (4, 5, 4)
    assert found["status"].startswith("draft: ")
    assert found["draft_checkpoint"]["commit"] == "a" * 40
    assert found["measurement_conditions"]["dataset"] == drawn_evaluation().prompts.name


@pytest.mark.parametrize("to", ["speculation-profile", "vllm-rates", "golden-al", "sglang-length"])
def test_a_run_without_a_draft_or_with_narrow_steps_is_not_exported(to: str) -> None:
    plain: dict[str, Any] = {"num_drafts": 0, "per_pos_accepted": [], "per_pos_verified": [], "histogram": [0]}
    for name, changes in (("plain", plain), ("narrow", BY_HAND | {"per_pos_verified": [10, 10, 10, 0]})):
        write_evaluation(Path(f"{name}.json"), drawn_evaluation(), **changes)
        done = run_main("export", f"{name}.json", "--to", to, "-o", "out", "--thinking", "on")
        assert (done.code, done.out) == (2, "")
        assert not Path("out").exists()
        assert "Traceback" not in done.err


def test_golden_lengths_are_gathered_in_one_file() -> None:
    exported("golden-al", "--thinking", "on", "-o", "golden.yaml")
    head = Path("golden.yaml").read_text().partition("_metadata")[0]
    assert head.startswith("# ")
    write_evaluation(Path("r.json"), drawn_evaluation(num_drafted=3, chat_template_kwargs='{"enable_thinking": false}'))
    exported("golden-al", "-o", "golden.yaml")
    exported("golden-al", "-o", "golden.yaml")
    exported("golden-al", "-o", "golden.yaml", "--thinking", "on")
    text = Path("golden.yaml").read_text()
    assert text.startswith(head)
    curves = yaml.safe_load(text)
    length = round(drawn_evaluation(num_drafted=3).total.counts.acceptance_len or 0, 2)
    assert curves == {
        "_metadata": {"draft-model": "org/draft"},
        "target": {"thinking_on": {3: length, 4: 2.8}, "thinking_off": {3: length}},
    }
    assert list(curves["target"]["thinking_on"]) == [3, 4]


def test_a_golden_length_is_measured_on_coding_prompts_if_there_are_some() -> None:
    evaluation = drawn_evaluation(max_new_tokens=4096)
    coding = to_json(evaluation)["categories"]["code"]
    write_evaluation(Path("r.json"), evaluation, **BY_HAND, categories={"coding": coding})
    done = run_main("export", "r.json", "--to", "golden-al", "--thinking", "off", "--target-name", "my-model")
    assert yaml.safe_load(done.out)["my-model"]["thinking_off"] == {4: round(coding["acceptance_len"], 2)}
    assert done.notices == ()
    assert run_main("export", "r.json", "--to", "golden-al", "--thinking", "off").err == ""
    write_evaluation(Path("r.json"), drawn_evaluation())
    assert run_main("export", "r.json", "--to", "golden-al", "--thinking", "off").notices == ("not-golden",)


@pytest.mark.parametrize(
    ("form", "option", "value"),
    [
        ("vllm-rates", "--draft-name", "a/b"),
        ("vllm-length", "--target-name", "a/b"),
        ("sglang-length", "--thinking", "on"),
        ("speculation-profile", "--thinking", "off"),
        ("golden-al", "--draft-name", "a/b"),
    ],
)
def test_a_fact_without_a_place_in_the_form_is_refused(form: str, option: str, value: str) -> None:
    done = run_main("export", "r.json", "--to", form, option, value)
    assert (done.code, done.error_id, done.field) == (2, "options-exclude-each-other", option)


def test_an_entry_of_a_golden_file_is_not_replaced() -> None:
    exported("golden-al", "--thinking", "on", "-o", "golden.yaml")
    before = Path("golden.yaml").read_text()
    write_evaluation(Path("r.json"), drawn_evaluation(0.9))
    refused = run_main("export", "r.json", "--to", "golden-al", "--thinking", "on", "-o", "golden.yaml")
    assert (refused.code, refused.error_id, refused.field) == (2, "other-length", "target.thinking_on.4")
    assert refused.error is not None
    assert (refused.error.found, str(refused.error.path)) == (2.8, "golden.yaml")
    assert Path("golden.yaml").read_text() == before
    exported("golden-al", "--thinking", "on", "-o", "golden.yaml", "--force")
    assert Path("golden.yaml").read_text() != before


@pytest.mark.parametrize(
    ("text", "code", "id", "field"),
    [
        ("m:\n  thinking_on:\n    4: 2.8  # mine\n", 5, "comments-lost", None),
        ("m: [1\n", 2, "invalid-yaml", None),
        ("- 1\n", 2, "not-a-mapping", None),
        ("m: 1\n", 2, "not-golden-lengths", "m"),
        ("target:\n  thinking_on: 3.0\n", 2, "not-golden-lengths", "target.thinking_on"),
        ("m:\n  thinking_on:\n    '4': 2.8\n", 2, "not-golden-lengths", "m.thinking_on"),
        ("m:\n  thinking_on:\n    4: [2.8]\n", 2, "not-golden-lengths", "m.thinking_on"),
        ("\xff\n", 2, "not-utf-8", None),
        ("_metadata:\n  draft-model: other\nm: {}\n", 2, "other-draft", "draft-model"),
    ],
)
def test_an_unsuitable_golden_file_is_refused_and_not_changed(text: str, code: int, id: str, field: str | None) -> None:
    Path("golden.yaml").write_text(text, encoding="latin-1")
    done = run_main("export", "r.json", "--to", "golden-al", "--thinking", "on", "-o", "golden.yaml")
    assert (done.code, done.error_id, done.field) == (code, id, field)
    assert done.error is not None
    assert str(done.error.path) == "golden.yaml"
    assert Path("golden.yaml").read_text(encoding="latin-1") == text


def test_force_does_not_mix_lengths_of_two_drafts() -> None:
    text = "_metadata:\n  draft-model: other\nm: {}\n"
    Path("golden.yaml").write_text(text)
    done = run_main("export", "r.json", "--to", "golden-al", "--thinking", "on", "-o", "golden.yaml", "--force")
    assert (done.code, done.error_id) == (2, "other-draft")
    assert Path("golden.yaml").read_text() == text


@pytest.mark.parametrize("settings", [{}, {"thinking": []}, {"thinking": ["on", "off"]}, {"thinking": ["high"]}])
def test_thinking_has_to_be_stated(settings: dict[str, Any]) -> None:
    write_evaluation(Path("r.json"), drawn_evaluation(**settings))
    done = run_main("export", "r.json", "--to", "golden-al")
    assert (done.code, done.error_id, done.field) == (2, "thinking-unknown", "--thinking")
    assert done.error is not None
    assert str(done.error.path) == "r.json"


@pytest.mark.parametrize(
    "settings",
    [
        {"thinking": ["off"]},
        {"thinking": [], "chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": '{"thinking_mode": "disabled"}'},
    ],
)
def test_thinking_is_read_from_the_settings(settings: dict[str, Any]) -> None:
    write_evaluation(Path("r.json"), drawn_evaluation(**settings))
    assert list(yaml.safe_load(exported("golden-al"))["target"]) == ["thinking_off"]


def test_the_document_has_the_content() -> None:
    document = json.loads(exported("sglang-length", "--json"))
    assert (document["kind"], document["to"], document["output"]) == ("export", "sglang-length", None)
    assert document["content"] == exported("sglang-length")
