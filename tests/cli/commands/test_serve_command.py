"""`dflash serve-command`: commands with K in each engine's count. `dflash env`: the parts of the installation."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from dflash_cli.terminal import environment
from dflash_cli.terminal.environment import find_conflicts
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke

BLOCK = support.SMALL.block


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return support.make_native(tmp_path / "dflash-draft"), support.make_target(tmp_path / "target")


def line(pair: tuple[Path, Path], engine: str, *more: str) -> str:
    outcome = invoke("serve-command", pair[0], "--target", pair[1], "--engine", engine, *more)
    assert outcome.code == 0, outcome.err
    return outcome.out.strip()


def option(line: str, flag: str) -> str:
    """The value of an option in a command line."""
    words = shlex.split(line)
    return words[words.index(flag) + 1]


def speculative_config(line: str) -> dict[str, Any]:
    return dict(json.loads(option(line, "--speculative-config")))


class TestLine:
    def test_vllm_counts_drafts(self, pair: tuple[Path, Path]) -> None:
        words = shlex.split(line(pair, "vllm"))
        assert words[:3] == ["vllm", "serve", str(pair[1])]
        speculative = json.loads(words[words.index("--speculative-config") + 1])
        assert speculative == {"method": "dflash", "model": str(pair[0]), "num_speculative_tokens": BLOCK - 1}

    def test_sglang_counts_the_anchor(self, pair: tuple[Path, Path]) -> None:
        words = shlex.split(line(pair, "sglang"))
        assert words[words.index("--speculative-num-draft-tokens") + 1] == str(BLOCK)
        assert words[words.index("--speculative-algorithm") + 1] == "DFLASH"
        assert words[words.index("--speculative-draft-model-path") + 1] == str(pair[0])

    def test_llama_converts_first(self, pair: tuple[Path, Path]) -> None:
        target, draft, serve = (shlex.split(item) for item in line(pair, "llama.cpp").splitlines())
        assert target[2] == str(pair[1])
        assert draft[draft.index("--target-model-dir") + 1] == str(pair[1])
        assert serve[serve.index("--spec-draft-n-max") + 1] == str(BLOCK - 1)
        assert serve[serve.index("-md") + 1] == draft[draft.index("--outfile") + 1] == "dflash-draft.gguf"

    def test_transformers_is_a_program(self, pair: tuple[Path, Path]) -> None:
        program = line(pair, "transformers")
        compile(program, "line", "exec")
        assert f"block_size={BLOCK}" in program

    def test_several_engines_are_labelled(self, pair: tuple[Path, Path]) -> None:
        lines = line(pair, "vllm@0.30,sglang").splitlines()
        assert [item.split()[:2] for item in lines] == [
            ["#", "vllm"], ["vllm", "serve"], ["#", "sglang"], ["python3", "-m"]
        ]  # fmt: skip

    def test_fewer_tokens(self, pair: tuple[Path, Path]) -> None:
        assert speculative_config(line(pair, "vllm", "-k", "2"))["num_speculative_tokens"] == 2

    def test_more_tokens_than_trained_are_refused(self, pair: tuple[Path, Path]) -> None:
        outcome = invoke("serve-command", pair[0], "--target", pair[1], "--engine", "vllm", "-k", BLOCK)
        assert (outcome.code, outcome.error_id) == (2, "too-many-drafts")
        assert outcome.error is not None
        assert outcome.error.message.startswith(f"{outcome.field}: ")
        assert outcome.error is not None
        assert (outcome.field, outcome.error.found) == ("--num-speculative-tokens", BLOCK)
        assert str(BLOCK - 1) in str(outcome.error.expected)

    def test_mixed_layers_need_the_other_runner(self, tmp_path: Path) -> None:
        shape = support.Shape(windows=(16, None))
        pair = support.make_native(tmp_path / "dflash-draft", shape), support.make_target(tmp_path / "target")
        assert line(pair, "vllm").startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve ")

    def test_a_shorter_draft_limits_the_context(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "dflash-draft", max_position_embeddings=64)
        pair = draft, support.make_target(tmp_path / "target")
        assert option(line(pair, "vllm"), "--max-model-len") == "64"
        assert "--context-length 64" in line(pair, "sglang")

    def test_a_packed_target_does_not_pack_the_draft(self, tmp_path: Path) -> None:
        target = support.make_target(tmp_path / "target", quantization_config={"quant_method": "fp8"}, dtype="float16")
        pair = support.make_native(tmp_path / "dflash-draft"), target
        assert option(line(pair, "sglang"), "--speculative-draft-model-quantization") == "unquant"
        assert "--dtype bfloat16" in line(pair, "vllm")

    def test_names_are_quoted(self, tmp_path: Path) -> None:
        pair = support.make_native(tmp_path / "it's dflash"), support.make_target(tmp_path / "target; rm x")
        words = shlex.split(line(pair, "vllm"))
        assert words[2] == str(pair[1])
        assert json.loads(words[4])["model"] == str(pair[0])

    @pytest.mark.parametrize(("engine", "option"), [("llama.cpp", "-md"), ("tensorrt-llm", "--config")])
    def test_no_file_is_taken_for_an_option(self, engine: str, option: str, tmp_path: Path) -> None:
        pair = support.make_native(tmp_path / "-dflash"), support.make_target(tmp_path / "target")
        words = shlex.split(line(pair, engine))
        assert words[words.index(option) + 1].startswith("dflash")

    def test_json(self, pair: tuple[Path, Path]) -> None:
        (document,) = json.loads(line(pair, "sglang", "--json"))["serve_commands"]
        assert document["num_draft_tokens"] == BLOCK - 1
        assert document["verdict"]["outcome"] == "serves"

    def test_the_bundled_pair(self) -> None:
        outcome = invoke("serve-command", "tiny", "--engine", "vllm")
        assert outcome.code == 0
        assert speculative_config(outcome.out)["num_speculative_tokens"] == 7

    def test_nothing_is_run(self, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("serve-command must run nothing")

        monkeypatch.setattr(subprocess, "Popen", refuse)
        for engine in ("vllm", "sglang", "llama.cpp", "transformers"):
            assert line(pair, engine)


class TestRefusal:
    def test_a_dialect_the_engine_cannot_read(self, tmp_path: Path) -> None:
        draft, target = support.make_speculators(tmp_path / "draft"), support.make_target(tmp_path / "target")
        outcome = invoke("serve-command", draft, "--target", target, "--engine", "sglang")
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "not-served", "S09")
        assert outcome.error is not None
        assert str(outcome.error.hint).startswith("dflash convert ")
        assert outcome.out == ""

    def test_a_relative(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", xpress_topc=0)
        target = support.make_target(tmp_path / "target")
        assert invoke("serve-command", draft, "--target", target, "--engine", "vllm").code == 5

    def test_another_target(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        target = support.make_target(tmp_path / "target", support.Shape(hidden=24))
        outcome = invoke("serve-command", draft, "--target", target, "--engine", "vllm")
        assert outcome.code == 3
        assert "P01" in outcome.err or "N05" in outcome.err

    def test_a_rule_about_lower_acceptance_is_a_warning(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft", sliding_window_non_causal=False)
        target = support.make_target(tmp_path / "target")
        outcome = invoke("serve-command", draft, "--target", target, "--engine", "vllm")
        assert outcome.code == 0
        assert "warning: C20" in outcome.err

    def test_no_engine(self) -> None:
        outcome = invoke("serve-command", "tiny", "--engine", ",")
        assert (outcome.code, outcome.field) == (2, "--engine")

    def test_one_of_two_engines(self, tmp_path: Path) -> None:
        """The command of the other engine is printed. The exit code and the last line belong to the refusal."""
        draft, target = support.make_speculators(tmp_path / "draft"), support.make_target(tmp_path / "target")
        outcome = invoke("serve-command", draft, "--target", target, "--engine", "vllm,sglang")
        assert outcome.code == 5
        assert outcome.out.startswith("# vllm 0.33\nvllm serve ")
        assert "sglang.launch_server" not in outcome.out
        assert (outcome.error_id, outcome.field) == ("not-served", "S09")

    def test_a_target_that_only_the_draft_names_is_absent(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft")
        outcome = invoke("serve-command", draft, "--engine", "vllm")
        assert outcome.code == 4
        error, hint = outcome.err.splitlines()[-2:]
        assert error.startswith("error: acme/target: ")
        assert str(draft) in error
        assert "--target" in hint

    def test_no_target(self, tmp_path: Path) -> None:
        outcome = invoke("serve-command", support.make_native(tmp_path / "draft"), "--engine", "vllm")
        assert outcome.code == 2
        assert "add --target" in outcome.err


class TestEnv:
    def test_document(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_HUB_CACHE", "/somewhere/hub")
        outcome = invoke("env", "--json")
        assert outcome.code == 0
        assert "hf_secret" not in outcome.out
        document = json.loads(outcome.out)
        assert document["variables"]["HF_TOKEN"] == "set"
        assert document["cache"] == "/somewhere/hub"
        assert document["python"] == ".".join(map(str, sys.version_info[:3]))
        assert document["packages"]["torch"]

    @pytest.mark.parametrize("value", ["/somewhere", "~/elsewhere", "$HOME/there"])
    @pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
    def test_the_cache_is_the_hubs(self, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The cache folder is the one that huggingface_hub states, which takes long to import."""
        for other in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, value)
        theirs = runpy.run_path(str(constants.__file__))["HF_HUB_CACHE"]
        assert str(environment._cache()) == theirs

    def test_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        outcome = invoke("env")
        assert re.search(r"^HF_TOKEN +not set$", outcome.out, re.MULTILINE)
        assert "torch " in outcome.out

    def test_a_failing_driver_is_not_an_error(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\nexit 9\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert environment.describe_environment("0").gpus is None

    @pytest.mark.parametrize(("listing", "end"), [("RECORD", ",,"), ("SOURCES.txt", "")])
    def test_other_owners_of_the_name_are_named(
        self, listing: str, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("other", "dflash_runtime"):  # from Python 3.12 on, files that do not exist are not listed
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
        files = f"other/__init__.py{end}\ndflash_runtime/__init__.py{end}\n"
        owners = [install(tmp_path, "dflash", SCRIPT), install(tmp_path, "other", (listing, files))]
        monkeypatch.setattr(metadata, "distributions", lambda: owners)
        script, module = find_conflicts()
        assert (script.startswith("dflash 0.1.0 "), module.startswith("other 0.1.0 ")) == (True, True)
        assert (" dflash-cli" in script, " dflash_runtime," in module) == (True, True)

    def test_our_own_distribution_is_no_conflict(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        own = install(tmp_path, "dflash-cli", SCRIPT)
        monkeypatch.setattr(metadata, "distributions", lambda: [own])
        assert find_conflicts() == []


SCRIPT = ("entry_points.txt", "[console_scripts]\ndflash = dflash.cli:main\n")


def install(site: Path, name: str, file: tuple[str, str]) -> metadata.PathDistribution:
    """Add a distribution with one more file beside METADATA."""
    home = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    home.mkdir()
    for path, text in (("METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n"), file):
        (home / path).write_text(text)
    return metadata.PathDistribution(home)


def test_a_config_that_cannot_be_read_is_an_error_though_no_engine_stops_at_it(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft", rms_norm_eps=[1, 2])
    target = support.make_target(tmp_path / "target")
    outcome = invoke("serve-command", draft, "--target", target, "--engine", "vllm")
    assert (outcome.code, outcome.field) == (3, "rms_norm_eps")
    assert outcome.error is not None
    assert outcome.error.found == [1, 2]


def test_a_draft_without_a_block_is_served_as_it_is_asked_for(tmp_path: Path) -> None:
    """A draft in the form that nvidia publishes. Only the option states how many tokens to draft."""
    draft = support.make_native(tmp_path / "dflash-draft", block_size=support.REMOVED)
    target = support.make_target(tmp_path / "target")
    silent = invoke("serve-command", draft, "--target", target, "--engine", "vllm")
    assert silent.code == 2
    assert "block_size" in silent.err
    told = invoke("serve-command", draft, "--target", target, "--engine", "vllm", "-k", 3)
    assert told.code == 0, told.err
    assert speculative_config(told.out)["num_speculative_tokens"] == 3
    for level in ("headers", "weights"):
        outcome = invoke("validate", draft, "--target", target, "-k", 3, "--level", level, "--json")
        assert outcome.code == 3
        assert [item["id"] for item in json.loads(outcome.out)["findings"] if item["severity"] == "error"] == ["C03"]
