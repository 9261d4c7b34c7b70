"""References: a directory wins, then the bundled pair, then the hub; each way the hub can say no reads differently."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import TINY, TINY_REDUCED, Role, fetch_directory, is_hub_id, tiny_directory
from dflash_runtime.errors import CheckpointNotFound, UsageError
from dflash_testing import checkpoints as support
from dflash_testing import hub_server as hub

DOWNLOAD = ("--fix-out", "nowhere")
"""What makes `validate` fetch a whole repository; of a sound draft it writes nothing. `--level weights` takes torch."""


@pytest.fixture(scope="module")
def local_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub.LocalHub]:
    """A hub that holds one draft and a stray file."""
    draft = support.make_native(tmp_path_factory.mktemp("hub") / "draft")
    (draft / "modeling.py").write_text("raise SystemExit")
    with hub.serving() as server:
        server.add("acme/draft", draft)
        yield server


@pytest.fixture
def environment(local_hub: hub.LocalHub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(local_hub, tmp_path / "home")


@pytest.mark.parametrize("reference", ["acme/draft", "acme/draft@v2", f"acme/draft@{hub.COMMIT}"])
def test_from_the_hub(reference: str, environment: dict[str, str], tmp_path: Path) -> None:
    """In a process of its own, as a user sets the hub's variables. The other tests replace the library's constants."""
    outcome = support.launch("validate", reference, *DOWNLOAD, "--json", env=environment)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["dialect"] == "native"
    assert Path(document["draft"]).name == hub.COMMIT
    assert not list((tmp_path / "home").rglob("modeling.py"))


def test_a_conversion_never_replaces_the_cached_copy_it_reads(environment: dict[str, str], tmp_path: Path) -> None:
    assert hub.run("validate", "acme/draft", *DOWNLOAD, env=environment).code == 0
    (cached,) = (tmp_path / "home").rglob(hub.COMMIT)
    before = sorted(item.name for item in cached.iterdir())
    outcome = hub.run("convert", "acme/draft", cached, "--to", "native", "--force", env=environment)
    assert outcome.code == 2
    assert "is or contains the source" in outcome.err
    assert sorted(item.name for item in cached.iterdir()) == before


def test_a_download_says_its_size_and_a_second_one_nothing(environment: dict[str, str]) -> None:
    first, again = (hub.run("validate", "acme/draft", *DOWNLOAD, env=environment) for _ in range(2))
    (line,) = [line for line in first.err.splitlines() if line.startswith("downloading ")]
    assert re.fullmatch(r"downloading acme/draft: [\d.]+ (bytes|kB|MB) in \d+ files?", line)
    assert "Fetching" not in first.err
    assert "downloading" not in again.err
    assert "downloading" not in hub.run("validate", "acme/draft", *DOWNLOAD, "-q", env=environment).err


REFUSALS = {
    "acme/gated": "acme/gated: access is gated",
    "acme/absent": "acme/absent: not found on the hub",
    "acme/draft@v9": "acme/draft: no revision 'v9'",
    "acme/broken": "acme/broken: the hub answered: ",
    "acme--x/draft": "not a valid name of a hub repository",
    "no such thing": "no such thing: no such directory, and not a hub repository",
}
FOR_HEADERS = ("acme/gated", "acme/absent", "acme--x/draft", "no such thing")
FOR_DOWNLOADS = ("acme/gated", "acme/draft@v9", "acme/broken")


def refusals() -> list[Any]:
    """Every refusal in at least one way of reading, and each way with what the hub says in it; the rest is slow."""
    return [
        pytest.param(
            reference, message, how, id=f"{reference}-{way}", marks=() if reference in default else pytest.mark.slow
        )
        for way, how, default in (("headers", (), FOR_HEADERS), ("download", DOWNLOAD, FOR_DOWNLOADS))
        for reference, message in REFUSALS.items()
    ]


@pytest.mark.parametrize(("reference", "message", "how"), refusals())
def test_each_refusal_reads_differently(
    reference: str, message: str, how: tuple[str, ...], environment: dict[str, str]
) -> None:
    outcome = hub.run("validate", reference, *how, env=environment)
    assert outcome.code == 4, outcome.err
    assert message in outcome.err
    assert ("try again later" in outcome.err) == ("broken" in reference)
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("how", [(), DOWNLOAD], ids=["headers", "download"])
def test_offline(how: tuple[str, ...], environment: dict[str, str]) -> None:
    outcome = hub.run("validate", "acme/draft", *how, env={**environment, "HF_HUB_OFFLINE": "1"})
    assert outcome.code == 4
    assert "not in the local cache, and the hub cannot be reached" in outcome.err
    assert outcome.err.splitlines()[-1] == "hint: HF_HUB_OFFLINE turns the hub off: unset it"


@pytest.mark.parametrize("how", [(), DOWNLOAD], ids=["headers", "download"])
def test_nobody_answers(how: tuple[str, ...], environment: dict[str, str]) -> None:
    nobody = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    outcome = hub.run("validate", "acme/draft", *how, env=nobody)
    assert outcome.code == 4
    assert "the hub cannot be reached" in outcome.err
    assert outcome.err.splitlines()[-1] == "hint: check the network and HF_ENDPOINT"
    assert "Traceback" not in outcome.err


def test_a_directory_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support.make_native(tmp_path / "acme" / "draft")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("acme/draft")
    assert fetch_directory("acme/draft", Role.DRAFT) == Path("acme/draft")


def test_a_directory_wins_over_the_bundled_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert fetch_directory(TINY, Role.DRAFT) == Path("tiny")


def test_the_bundled_pair() -> None:
    assert fetch_directory(TINY, Role.DRAFT) == tiny_directory() / "draft"
    assert fetch_directory(TINY, Role.TARGET) == tiny_directory() / "target"
    assert fetch_directory(TINY_REDUCED, Role.DRAFT) == tiny_directory() / "draft-reduced"
    with pytest.raises(UsageError, match="names a draft"):
        fetch_directory(TINY_REDUCED, Role.TARGET)


@pytest.mark.parametrize("reference", ["", "~nobody/x/y", "org/repo/extra", "../up/there", "org//repo", "http://x/y"])
def test_what_is_no_reference(reference: str) -> None:
    with pytest.raises(CheckpointNotFound, match="not a hub repository"):
        fetch_directory(reference, Role.DRAFT)
