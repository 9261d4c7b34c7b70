"""Where results may be written: one rule for every command."""

from pathlib import Path

import pytest

from dflash_cli.generation.atomic_file import atomic_text, check_output
from dflash_runtime.errors import UsageError


class TestCheckOutput:
    def test_a_new_name_in_a_folder_that_exists(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_output(tmp_path / "new", force=False)
        monkeypatch.chdir(tmp_path)
        check_output(Path("new"), force=False)

    @pytest.mark.parametrize("force", [False, True])
    def test_a_missing_folder_is_refused(self, force: bool, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="absent: no such directory") as caught:
            check_output(tmp_path / "absent" / "new", force=force)
        assert caught.value.hint == f"make it first: mkdir -p {tmp_path / 'absent'}"
        assert not (tmp_path / "absent").exists()

    def test_what_exists_is_replaced_only_on_demand(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("old")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for name in ("file", "link"):
            with pytest.raises(UsageError, match="exists already") as caught:
                check_output(tmp_path / name, force=False)
            assert caught.value.hint == "pass --force to replace it"
            check_output(tmp_path / name, force=True)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted() -> None:
        with atomic_text(path) as stream:
            stream.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [item.name for item in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with atomic_text(path) as stream:
        stream.write("new")
    assert path.read_text() == "new"
