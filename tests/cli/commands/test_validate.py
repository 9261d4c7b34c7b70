"""`dflash validate` as a command: output, exit codes, engines, JSON."""

import json
import re
import shlex
from pathlib import Path

import pytest

from dflash_cli.commands.validate import print_finding
from dflash_cli.diagnosis.diagnosis_options import DiagnosisOptions
from dflash_cli.diagnosis.run_settings import run_settings
from dflash_cli.rules.rule import Finding
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edited_config


class TestCommand:
    def test_sound(self) -> None:
        outcome = invoke("validate", "tiny")
        assert outcome.code == 0
        assert outcome.out.endswith("0 errors, 0 warnings\n")
        assert "against tiny" in outcome.out

    def test_findings_exit_3(self, tmp_path: Path) -> None:
        draft = support.make_native(
            tmp_path / "draft", dflash_config={"mask_token_id": None, "target_layer_ids": [0, 2]}
        )
        outcome = invoke("validate", draft)
        assert outcome.code == 3
        assert re.search(r"^C12 error +config\.json:dflash_config\.mask_token_id: ", outcome.out, re.MULTILINE)
        assert outcome.notices == ("no-target",)

    def test_strict(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", num_target_layers=support.REMOVED)
        assert invoke("validate", draft).code == 0
        assert invoke("validate", draft, "--strict").code == 3
        assert invoke("validate", draft, "--strict", "--ignore", "c11").code == 0

    def test_json_is_one_document(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", block_size=1)
        outcome = invoke("validate", draft, "--json")
        document = json.loads(outcome.out)
        assert outcome.code == 3
        assert document["schema_version"] == 1
        assert document["passed"] is False
        assert document["findings"][0]["id"] == "C03"

    @pytest.mark.parametrize(
        ("args", "named"),
        [(["--engine", "vlm"], "mean vllm?"), (["--engine", "vllm@new"], "vllm@new"), (["--ignore", "X99"], "X99")],
    )
    def test_usage(self, args: list[str], named: str) -> None:
        outcome = invoke("validate", "tiny", *args)
        assert outcome.code == 2
        assert named in outcome.err

    def test_engine_decides_severity(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft", sliding_window_non_causal=False)
        assert invoke("validate", draft).code == 0
        assert invoke("validate", draft, "--engine", "vllm@0.33").code == 3
        assert invoke("validate", draft, "--engine", "vllm@0.24").code == 0

    def test_engines_get_a_verdict_each(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft", sliding_window_non_causal=False)
        engines = ["--engine", "vllm@0.33,sglang,transformers"]
        lines = invoke("validate", draft, *engines).out.splitlines()
        verdicts = json.loads(invoke("validate", draft, *engines, "--json").out)["verdicts"]
        assert [(item["outcome"], item["reasons"]) for item in verdicts] == [
            ("drops", ["C20"]), ("stops", ["S09"]), ("stops", ["S14"]),
        ]  # fmt: skip
        assert {item["text"] for item in verdicts} <= set(lines)
        assert "2 of 2 layers" in verdicts[0]["text"]
        assert " without a target: " in lines[-1]
        older = invoke("validate", draft, "--engine", "vllm@0.24", "--json")
        verdict = json.loads(older.out)["verdicts"][0]
        assert (verdict["outcome"], verdict["reasons"]) == ("serves", [])

    def test_a_general_fault_stops_every_engine(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", num_key_value_heads=3)
        document = json.loads(invoke("validate", draft, "--engine", "vllm,sglang", "--json").out)
        assert [item["outcome"] for item in document["verdicts"]] == ["stops", "stops"]
        assert "C38" in [item["id"] for item in document["findings"]]

    def test_an_engine_may_serve_a_relative(self, tmp_path: Path) -> None:
        """The finding says only that the draft is not DFlash."""
        draft = support.make_native(tmp_path / "draft", architectures=["Gemma4DSparkModel"])
        outcome = invoke("validate", draft, "--engine", "vllm", "--json")
        assert outcome.code == 5
        (verdict,) = json.loads(outcome.out)["verdicts"]
        assert (verdict["outcome"], verdict["reasons"]) == ("serves", ["C01"])

    def test_every_finding_has_effect_and_fix(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", block_size=1)
        outcome = invoke("validate", draft)
        lines = outcome.out.splitlines()
        index = next(at for at, line in enumerate(lines) if line.startswith("C03 error"))
        assert lines[index + 1].startswith("    effect: ")
        assert lines[index + 2].startswith("    fix: ")

    def test_fixes_are_ready_to_paste(self, tmp_path: Path) -> None:
        """Fixes have the user's names, quoted for the shell, and the word TARGET for an unknown target."""
        draft = support.make_native(tmp_path / "it's a draft", tie_word_embeddings=True, is_neox_style=False)
        lines = invoke("validate", draft).out.splitlines()
        (copy,) = [line for line in lines if "--fix-out" in line]
        assert shlex.split(copy) == ["fix:", "dflash", "validate", str(draft), "--fix-out", "it's a draft-fixed"]
        draft = support.make_speculators(tmp_path / "spec")
        target = support.make_target(tmp_path / "my target")
        for given, name in (([], "TARGET"), (["--target", target], str(target))):
            lines = invoke("validate", draft, "-e", "sglang", *given).out.splitlines()
            (fix,) = [line for line in lines if "--to sglang" in line]
            assert shlex.split(fix)[1:] == [
                "dflash", "convert", str(draft), "spec-fixed", "--to", "sglang", "--target", name,
            ]  # fmt: skip

    def test_as_many_prompts_are_drawn_as_asked_for(self, tmp_path: Path) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt_token_ids": [index]}) + "\n" for index in range(40)))
        drawn = {}
        made_up = run_settings(tmp_path, DiagnosisOptions(max_new_tokens=8))
        assert (made_up.prompts, made_up.budget.num_prompts) == (None, 32)
        for count in (None, 5):
            request = DiagnosisOptions(prompts=prompts, num_prompts=count, max_new_tokens=8)
            settings = run_settings(tmp_path, request)
            drawn[count] = settings.prompts
        assert drawn[None] == [[index] for index in range(40)]
        assert drawn[5] is not None
        assert len(drawn[5]) == 5

    def test_prompts_belong_to_the_run_level(self) -> None:
        assert invoke("validate", "tiny", "--prompts", "x.jsonl").code == 2


class TestWidth:
    """A terminal of 80 columns wraps findings, but no fix, which has a command to copy.

    A pipe wraps nothing, so that grep finds whole lines.
    """

    def finding(self) -> Finding:
        return Finding("C20", "error", "config.json:" + "key." * 30, "word " * 40, effect="why " * 40, fix="do " * 40)

    def test_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", "80")
        print_finding(self.finding())
        *lines, fix = capsys.readouterr().out.splitlines()
        assert len(lines) > 5
        location = self.finding().location
        assert max(len(line) for line in lines if location not in line) <= 80
        assert any(location in line for line in lines), "a word that is wider than the terminal stays whole"
        assert fix == "    fix: " + self.finding().fix

    def test_in_a_pipe(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_finding(self.finding())
        assert len(capsys.readouterr().out.splitlines()) == 3


class TestFixOut:
    def test_mechanical_faults_are_fixed(self, tmp_path: Path) -> None:
        """A flag, a surplus key and a count that follows from another are fixed, and the copy passes."""
        draft = support.make_speculators(tmp_path / "draft", sliding_window_non_causal=False, model_type="qwen3")
        with edited_config(draft) as config:
            config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 4
        out = tmp_path / "dflash-mended"
        outcome = invoke("validate", draft, "--engine", "vllm", "--fix-out", out)
        assert outcome.code == 0, outcome.out
        for rule in ("C04 error", "C20 error", "C30 error"):
            assert rule in outcome.out
        assert outcome.out.endswith(" speculators; fixed: C04, C20, C30\n")
        written = json.loads((out / "config.json").read_text())
        assert written["sliding_window_non_causal"] is True
        assert "model_type" not in written
        support.assert_same_tensors(draft, out)
        assert invoke("validate", out, "--engine", "vllm").code == 0

    def test_the_engine_decides_the_dialect(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft")
        target = support.make_target(tmp_path / "target")
        out = tmp_path / "out"
        outcome = invoke("validate", draft, "--target", target, "-e", "sglang", "--fix-out", out, "--json")
        document = json.loads(outcome.out)
        assert outcome.code == 0, outcome.out
        assert document["repaired"]["dialect"] == "sglang"
        assert "S09" in document["repaired"]["fixed"]

    def test_windows_that_take_no_effect(self, tmp_path: Path) -> None:
        shape = support.Shape(windows=(16, 16))
        draft = support.make_native(tmp_path / "draft", shape, use_sliding_window=False)
        outcome = invoke("validate", draft, "--fix-out", tmp_path / "out")
        assert outcome.code == 0, outcome.out
        assert json.loads((tmp_path / "out" / "config.json").read_text())["use_sliding_window"] is True

    def test_faults_that_only_the_trainer_can_fix_are_left(self, tmp_path: Path) -> None:
        """Weights that contradict the config are fixed. A tap on the last layer is not."""
        nested = {"mask_token_id": 31, "target_layer_ids": [0, 3]}
        draft = support.make_native(tmp_path / "draft", dflash_config=nested, tie_word_embeddings=True)
        outcome = invoke("validate", draft, "--fix-out", tmp_path / "out", "--strict")
        assert outcome.code == 3
        assert "fixed: C28" in outcome.out
        assert " fixed: C10 warning" in outcome.out

    def test_causality_that_is_not_stated_stays_unstated(self, tmp_path: Path) -> None:
        """Only the trainer knows it. A copy for readers that would take another causality is refused."""
        shape = support.Shape(windows=(16, 16))
        draft = support.make_native(tmp_path / "draft", shape, is_causal=support.REMOVED, tie_word_embeddings=True)
        out, command = tmp_path / "out", ("validate", draft, "--json", "--fix-out")
        repaired = json.loads(invoke(*command, out).out)["repaired"]
        assert (repaired["fixed"], [item["id"] for item in repaired["left"]]) == (["C28"], ["C19"])
        written = json.loads((out / "config.json").read_text())
        assert "is_causal" not in written
        assert "causal" not in written["dflash_config"]
        spec = support.make_speculators(
            tmp_path / "spec", shape, sliding_window_non_causal=support.REMOVED, num_target_layers=4
        )
        outcome = invoke("validate", spec, "-e", "sglang", "--fix-out", tmp_path / "native")
        assert (outcome.code, outcome.error_id, outcome.field) == (5, "causality-not-stated", "causal")
        assert not (tmp_path / "native").exists()

    def test_an_id_map_that_contradicts_its_mask_stays(self, tmp_path: Path) -> None:
        shape = support.REDUCED
        extra = support.reduced_arrays(shape, support.target_arrays(shape))
        extra["t2d"] = ~extra["t2d"]
        draft = support.make_speculators(tmp_path / "draft", shape, extra=extra, model_type="qwen3")
        out = tmp_path / "out"
        outcome = invoke("validate", draft, "--level", "weights", "-e", "vllm", "--fix-out", out, "--json")
        repaired = json.loads(outcome.out)["repaired"]
        assert repaired["fixed"] == ["C30"]
        assert "M06" in {item["id"] for item in repaired["left"]}
        support.assert_same_tensors(draft, out)

    def test_nothing_is_written_if_nothing_can_be_fixed(self, tmp_path: Path) -> None:
        nested = {"mask_token_id": 31, "target_layer_ids": [0, 3]}
        draft, out = support.make_native(tmp_path / "draft", dflash_config=nested), tmp_path / "out"
        outcome = invoke("validate", draft, "--fix-out", out)
        assert f"{out}: not written" in outcome.out
        assert "not fixed: C10 warning" in outcome.out
        assert not out.exists()

    def test_a_draft_that_cannot_be_read_is_refused(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", block_size=support.REMOVED)
        outcome = invoke("validate", draft, "--fix-out", tmp_path / "out")
        assert outcome.code == 3
        assert "block_size" in outcome.err
        assert not (tmp_path / "out").exists()

    def test_an_existing_checkpoint_is_replaced_on_demand_but_never_the_draft_itself(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", tie_word_embeddings=True)
        old = support.make_native(tmp_path / "out", support.Shape(vocab=40, draft_vocab=40))
        assert invoke("validate", draft, "--fix-out", old).code == 2
        assert invoke("validate", draft, "--fix-out", old, "--force").code == 0
        assert json.loads((old / "config.json").read_text())["vocab_size"] == 32
        outcome = invoke("validate", draft, "--fix-out", draft, "--force")
        assert outcome.code == 2
        assert f"error: {draft}: " in outcome.err
        assert (draft / "config.json").is_file()

    def test_an_existing_directory_is_refused(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft", tie_word_embeddings=True)
        assert invoke("validate", draft, "--fix-out", draft).code == 2

    def test_nothing_is_written_where_there_is_nothing_to_fix(self, tmp_path: Path) -> None:
        """Also if all findings are faults that a copy cannot fix, such as another target in training."""
        draft, out = support.make_native(tmp_path / "draft"), tmp_path / "out"
        outcome = invoke("validate", draft, "--fix-out", out)
        assert outcome.code == 0
        assert f"{out}: not written" in outcome.out
        named = support.make_speculators(tmp_path / "named")
        target = support.make_target(tmp_path / "other-target")
        outcome = invoke("validate", named, "--target", target, "--fix-out", out, "--json")
        document = json.loads(outcome.out)
        assert [item["id"] for item in document["findings"]] == ["P08"]
        assert document["repaired"] is None
        assert outcome.code == 0
        assert not out.exists()
