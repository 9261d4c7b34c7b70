"""The target of a draft, in every command that takes a pair."""

from pathlib import Path

import pytest

from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import TINY, TINY_REDUCED, fetch_directory
from dflash_runtime.errors import CheckpointNotFound, UsageError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses


def named(path: Path, target: object) -> Path:
    """A speculators draft that names a target."""
    draft = support.make_speculators(path)
    config = support.speculators_config()
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    support.write_config(draft, config)
    return draft


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        (None, None, (TINY, TINY)),
        (TINY, None, (TINY, TINY)),
        (TINY_REDUCED, None, (TINY_REDUCED, TINY)),
        (TINY, "org/target", (TINY, "org/target")),
    ],
)
def test_the_bundled_pair_fills_in(draft: str | None, target: str | None, expected: tuple[str, str]) -> None:
    pair = complete_pair(draft, target, find=fetch_directory)
    assert (pair.draft, pair.target) == expected
    assert pair.note is None


def test_a_target_alone_decodes_plainly_or_is_refused() -> None:
    pair = complete_pair(None, "org/target", find=fetch_directory, needs_draft=False)
    assert (pair.draft, pair.draft_location, pair.target) == (None, None, "org/target")
    with refuses(UsageError, "target-without-draft", field="--draft"):
        complete_pair(None, "org/target", find=fetch_directory)


def test_a_draft_alone_takes_the_target_it_names(tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target")
    pair = complete_pair(str(named(tmp_path / "draft", target)), None, find=fetch_directory)
    assert pair.find_target(fetch_directory) == target
    assert pair.note is not None
    assert (pair.note.id, str(target) in pair.note) == ("target-named-by-draft", True)


def test_errors_say_who_named_the_target(tmp_path: Path) -> None:
    draft = named(tmp_path / "draft", tmp_path / "absent")
    with refuses(CheckpointNotFound, "named-target-not-found", found=str(tmp_path / "absent")) as error:
        complete_pair(str(draft), None, find=fetch_directory).find_target(fetch_directory)
    assert str(draft) in error.value.message
    with refuses(CheckpointNotFound, "not-a-reference", path=tmp_path / "typed") as error:
        complete_pair(str(draft), str(tmp_path / "typed"), find=fetch_directory).find_target(fetch_directory)
    assert str(draft) not in error.value.message


def test_a_draft_that_does_not_name_its_target(tmp_path: Path) -> None:
    pair = complete_pair(str(support.make_native(tmp_path / "draft")), None, find=fetch_directory)
    assert pair.target is None
    with refuses(UsageError, "target-not-named", field="--target"):
        pair.find_target(fetch_directory)


class TestValidate:
    """A target that only the draft names is a help. Its faults are notes."""

    def test_the_named_target_is_checked_against(self, tmp_path: Path) -> None:
        target = support.make_target(tmp_path / "target", support.Shape(hidden=24))
        outcome = invoke("validate", named(tmp_path / "draft", target))
        assert outcome.code == 3
        assert "P01 error" in outcome.out
        assert f"against {target}" in outcome.out
        assert outcome.notices == ("target-named-by-draft",)

    @pytest.mark.parametrize("more", [(), ("--level", "weights")])
    def test_an_absent_named_target_is_a_note(self, more: tuple[str, ...], tmp_path: Path) -> None:
        draft = named(tmp_path / "draft", "acme/absent")
        outcome = invoke("validate", draft, *more)
        assert outcome.code == 0, outcome.err
        assert "acme/absent" in outcome.err
        assert "against" not in outcome.out

    def test_an_unreadable_named_target_is_a_note(self, tmp_path: Path) -> None:
        target = support.make_target(tmp_path / "target", layer_types=["linear_attention"] * 4)
        outcome = invoke("validate", named(tmp_path / "draft", target))
        assert outcome.code == 0, outcome.err
        assert "linear_attention" in outcome.out

    def test_a_typed_target_must_exist(self, tmp_path: Path) -> None:
        outcome = invoke("validate", named(tmp_path / "draft", tmp_path), "--target", tmp_path / "absent")
        assert outcome.code == 4


@pytest.mark.parametrize("command", [("validate",), ("serve-command", "--engine", "vllm")])
def test_the_draft_is_an_argument_or_an_option(command: tuple[str, ...]) -> None:
    positional = invoke(*command, "tiny")
    assert positional.code == 0
    assert invoke(*command, "--draft", "tiny").out == positional.out
    for arguments, message in ((("tiny", "-d", "tiny"), "the draft is given twice"), ((), "DRAFT is missing")):
        outcome = invoke(*command, *arguments)
        assert outcome.code == 2
        assert message in outcome.err
