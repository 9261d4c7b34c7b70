"""A conversion removes only files that conversions and checkpoints have."""

from pathlib import Path

import pytest

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion import staging
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_runtime.errors import UsageError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import Outcome, invoke
from dflash_testing.refusals import refuses

OLD = support.Shape(vocab=40, draft_vocab=40)


def force(source: Path, destination: Path | str) -> Outcome:
    return invoke("convert", source, destination, "--to", "native", "--force")


class TestForce:
    @pytest.mark.parametrize("config", ["{}", '{"name": "my project"}', "not JSON"])
    def test_a_project_with_a_config_is_not_a_draft(self, config: str, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        (tmp_path / "project").mkdir()
        (tmp_path / "project" / "config.json").write_text(config)
        outcome = force(source, tmp_path / "project")
        assert (outcome.code, outcome.error_id) == (2, "destination-not-a-draft")
        assert (tmp_path / "project" / "config.json").read_text() == config

    @pytest.mark.parametrize("is_converted", [False, True])
    def test_files_that_no_checkpoint_has_are_listed(self, is_converted: bool, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        out = support.make_native(tmp_path / "out", OLD)
        if is_converted:
            (out / "config.json").write_text("{}")
            (out / "conversion.json").write_text('{"tool": "dflash"}')
        (out / "thesis.txt").write_text("x")
        (out / "runs").mkdir()
        outcome = force(source, out)
        assert (outcome.code, outcome.error_id) == (2, "destination-has-other-files")
        assert outcome.error is not None
        assert (outcome.error.path, outcome.error.found) == (out, ["runs", "thesis.txt"])
        assert (out / "thesis.txt").read_text() == "x"

    def test_a_link_to_the_config_of_another_draft_marks_nothing(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").symlink_to(source / "config.json")
        outcome = force(source, tmp_path / "out")
        assert (outcome.code, outcome.error_id) == (2, "destination-not-a-draft")

    def test_a_target_is_not_a_draft(self, tmp_path: Path) -> None:
        outcome = force(support.make_native(tmp_path / "source"), support.make_target(tmp_path / "target"))
        assert (outcome.code, outcome.error_id) == (2, "destination-not-a-draft")
        assert (tmp_path / "target" / "model.safetensors").exists()

    def test_files_of_a_checkpoint_are_replaced(self, tmp_path: Path) -> None:
        source, out = support.make_native(tmp_path / "source"), support.make_native(tmp_path / "out", OLD)
        (out / "model.safetensors").rename(out / "weights.safetensors")
        for name in ("README.md", "LICENSE", "tokenizer.json", "mask_embedding.pt", ".gitattributes"):
            (out / name).write_text("{}")
        assert force(source, out).code == 0
        assert sorted(item.name for item in out.iterdir()) == ["config.json", "conversion.json", "model.safetensors"]

    def test_an_empty_directory_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        assert force(support.make_native(tmp_path / "source"), tmp_path / "out").code == 0

    @pytest.mark.parametrize("to", ["draft", "nowhere", "file"])
    def test_a_link_is_not_replaced(self, to: str, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        support.make_native(tmp_path / "draft", OLD)
        (tmp_path / "file").write_text("")
        (tmp_path / "out").symlink_to(to)
        outcome = force(source, tmp_path / "out")
        assert (outcome.code, outcome.error_id) == (2, "destination-is-link")
        assert (tmp_path / "out").readlink() == Path(to)

    @pytest.mark.parametrize("where", [".", "..", "sub/..", ""])
    def test_the_working_directory_stays(self, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source, out = support.make_native(tmp_path / "source"), support.make_native(tmp_path / "out", OLD)
        (out / "sub").mkdir()
        monkeypatch.chdir(out / "sub" if where == ".." else out)
        outcome = force(source, where or out)
        assert outcome.code == 2, outcome
        assert open_draft(out).config.vocab_size == 40

    def test_a_mount_point_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "volume").mkdir()
        monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "volume")
        outcome = force(support.make_native(tmp_path / "source"), tmp_path / "volume")
        assert (outcome.code, outcome.error_id) == (2, "destination-is-mount-point")

    @pytest.mark.parametrize("name", ["source/out", "source/deep/out", "link/out"])
    def test_a_destination_in_the_source_is_refused(self, name: str, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        (source / "deep").mkdir()
        (tmp_path / "link").symlink_to(source)
        outcome = invoke("convert", source, tmp_path / name, "--to", "native")
        assert (outcome.code, outcome.error_id) == (2, "destination-in-source")

    def test_a_source_behind_a_link_is_not_replaced(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        (tmp_path / "link").symlink_to(source)
        outcome = force(tmp_path / "link", source)
        assert (outcome.code, outcome.error_id) == (2, "destination-holds-source")

    def test_the_blobs_of_a_source_are_not_replaced(self, tmp_path: Path) -> None:
        """The hub's cache has the files of a checkpoint in one directory, and links to them in another."""
        snapshot = support.make_native(tmp_path / "models--a--b" / "snapshots" / "0123")
        blobs = support.make_native(tmp_path / "models--a--b" / "blobs")
        for item in list(snapshot.iterdir()):
            item.unlink()
            item.symlink_to(Path("../../blobs") / item.name)
        outcome = force(snapshot, blobs)
        assert (outcome.code, outcome.error_id) == (2, "destination-holds-source")


@pytest.mark.parametrize("has_system_call", [True, False])
class TestAppearing:
    """A destination that appears while the conversion runs. `has_system_call`: the system has renameat2."""

    @pytest.fixture(autouse=True)
    def _system(self, has_system_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not has_system_call:
            monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: object())

    def convert(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, id: str, *, force: bool) -> None:
        """Convert while another process puts a file at the destination."""
        source, out = support.make_native(tmp_path / "source"), tmp_path / "out"

        def appear(*args: object) -> None:
            out.mkdir(exist_ok=True)
            (out / "thesis.txt").write_text("x")

        monkeypatch.setattr("dflash_cli.conversion.execute.verify_roundtrip", appear)
        plan = plan_conversion(open_draft(source), ConversionSpec(to="native"))
        with refuses(UsageError, id, path=out):
            convert_draft(plan, out, force=force)
        assert (out / "thesis.txt").read_text() == "x"
        assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []

    @pytest.mark.parametrize(
        ("old", "is_forced", "id"),
        [
            ("nothing", False, "destination-appeared"),
            ("nothing", True, "destination-not-a-draft"),
            ("empty", True, "destination-not-a-draft"),
            ("draft", True, "destination-has-other-files"),
        ],
    )
    def test_the_new_destination_is_left_unchanged(
        self, old: str, is_forced: bool, id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if old == "empty":
            (tmp_path / "out").mkdir()
        if old == "draft":
            support.make_native(tmp_path / "out", OLD)
        self.convert(tmp_path, monkeypatch, id, force=is_forced)

    def test_a_used_name_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "new").mkdir()
        for name in ("file", "full", "empty", "link"):
            (tmp_path / name).mkdir() if name in ("full", "empty") else None
        (tmp_path / "file").write_text("x")
        (tmp_path / "full" / "x").write_text("x")
        (tmp_path / "link").symlink_to("nowhere")
        for name in ("file", "full", "empty", "link"):
            with pytest.raises(FileExistsError):
                staging.move_new(tmp_path / "new", tmp_path / name)
        staging.move_new(tmp_path / "new", tmp_path / "free")
        assert sorted(item.name for item in tmp_path.iterdir()) == ["empty", "file", "free", "full", "link"]
