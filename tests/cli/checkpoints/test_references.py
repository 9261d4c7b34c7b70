"""References name a directory, else the bundled pair, else a hub repository. Each refusal of the hub has its own id."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.hub import explained
from dflash_cli.checkpoints.references import (
    TINY,
    Role,
    fetch_directory,
    find_checkpoint,
    is_bundled,
    is_hub_id,
    tiny_directory,
)
from dflash_cli.checkpoints.slow_answers import HubUnreachable
from dflash_runtime.errors import CheckpointNotFound, UsageError
from dflash_testing import checkpoints as support
from dflash_testing import hub_server as hub
from dflash_testing.command_line import launch
from dflash_testing.refusals import refuses

DOWNLOAD = ("--fix-out", "nowhere")
"""Options with which `validate` downloads a whole repository. A sound draft needs no copy, so it writes nothing."""


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
    """One in a process of its own, as a user sets the hub's variables. The others replace the library's constants."""
    run = launch if reference == "acme/draft@v2" else hub.run
    outcome = run("validate", reference, *DOWNLOAD, "--json", env=environment)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["dialect"] == "native"
    assert Path(document["draft"]).name == hub.COMMIT
    assert not list((tmp_path / "home").rglob("modeling.py"))


def test_a_conversion_never_replaces_the_cached_copy_it_reads(environment: dict[str, str], tmp_path: Path) -> None:
    assert hub.run("validate", "acme/draft", *DOWNLOAD, env=environment).code == 0
    (cached,) = (tmp_path / "home").rglob(hub.COMMIT)
    before = sorted(item.name for item in cached.iterdir())
    found = hub.refusal("convert", "acme/draft", cached, "--to", "native", "--force", env=environment)
    assert (found["code"], found["id"], found["path"]) == (2, "destination-holds-source", str(cached))
    assert sorted(item.name for item in cached.iterdir()) == before


def test_a_download_says_its_size_and_a_second_one_nothing(environment: dict[str, str]) -> None:
    first, again = (hub.run("validate", "acme/draft", *DOWNLOAD, env=environment) for _ in range(2))
    (line,) = [line for line in first.err.splitlines() if line.startswith("downloading ")]
    assert re.fullmatch(r"downloading acme/draft: [\d.]+ (bytes|kB|MB) in \d+ files?", line)
    assert "Fetching" not in first.err
    assert "downloading" not in again.err
    assert "downloading" not in hub.run("validate", "acme/draft", *DOWNLOAD, "-q", env=environment).err


REFUSALS = {
    "acme/gated": "hub-gated",
    "acme/absent": "not-on-the-hub",
    "acme/draft@v9": "no-revision",
    "acme/broken": "hub-refused",
    "acme/not-here": "hub-refused",
    "acme/login-page": "not-a-hub",
    "acme/listing": "not-a-hub",
    "acme/nothing-said": "not-a-hub",
    "acme/bad-request": "hub-refused",
    "acme/proxy": "hub-refused",
    "acme/limit": "hub-rate-limit",
    "acme--x/draft": "not-a-reference",
    "no such thing": "not-a-reference",
}
FOR_HEADERS = (
    "acme/gated",
    "acme/absent",
    "acme--x/draft",
    "no such thing",
    "acme/login-page",
    "acme/not-here",
    "acme/limit",
    "acme/draft@v9",
)
FOR_DOWNLOADS = ("acme/gated", "acme/draft@v9", "acme/broken", "acme/login-page", "acme/listing", "acme/proxy")


def refusals() -> list[Any]:
    """Each refusal in at least one way of reading by default. The other combinations are slow."""
    return [
        pytest.param(
            reference, id, how, id=f"{reference}-{way}", marks=() if reference in default else pytest.mark.slow
        )
        for way, how, default in (("headers", (), FOR_HEADERS), ("download", DOWNLOAD, FOR_DOWNLOADS))
        for reference, id in REFUSALS.items()
    ]


@pytest.mark.parametrize(("reference", "id", "how"), refusals())
def test_each_refusal_has_its_id(reference: str, id: str, how: tuple[str, ...], environment: dict[str, str]) -> None:
    found = hub.refusal("validate", reference, *how, env=environment)
    assert (found["code"], found["id"], found["path"]) == (4, id, reference.partition("@")[0])
    assert ("again" in found["hint"]) == ("broken" in reference)
    assert ("HTTPS_PROXY" in found["hint"]) == ("proxy" in reference)
    assert ("wait" in found["hint"]) == ("limit" in reference)
    assert ("branch" in found["hint"]) == (id == "no-revision")
    assert found["hint"]


@pytest.mark.parametrize("kind", ["HTTPError", "InvalidURL"])
def test_errors_of_the_http_library_are_refusals(kind: str) -> None:
    """The library raises `InvalidURL`, which is no `HTTPError`, for a redirect to `mailto:` or to 70,000 characters."""
    import huggingface_hub.errors

    assert huggingface_hub.errors
    library = next(sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules)
    with pytest.raises(HubUnreachable) as refused, explained("acme/draft"):
        raise getattr(library, kind)("no address")
    assert refused.value.id == {"HTTPError": "hub-unreachable", "InvalidURL": "not-a-hub"}[kind]


def test_an_answer_in_two_lines_is_printed_whole(environment: dict[str, str]) -> None:
    line = hub.run("validate", "acme/bad-request", env=environment).err.splitlines()[0]
    assert not line.rstrip().endswith(":")


def test_a_cache_that_cannot_be_made_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        cache = tmp_path / "file" / "hub"
        found = hub.refusal("validate", "acme/draft", *DOWNLOAD, env={**environment, name: str(cache)})
        assert (found["code"], found["id"]) == (2, "parent-is-a-file")
        assert found["path"].startswith(str(tmp_path / "file"))


@pytest.mark.parametrize("reference", ["acme/gated", "acme/absent", "acme/other-token", "acme/limit"])
def test_hints_know_whether_a_token_is_set(reference: str, environment: dict[str, str]) -> None:
    """Without a token a hint says where to get one. With a token it says what the token lacks."""
    without, given = (
        hub.refusal("validate", reference, env={**environment, "HF_TOKEN": token})["hint"] for token in ("", "hf_x" * 9)
    )
    assert "HF_TOKEN" in without
    assert ("token" in given) == (reference != "acme/limit")
    assert given != without
    assert "hf_x" not in given


@pytest.mark.parametrize("how", [(), DOWNLOAD], ids=["headers", "download"])
def test_offline(how: tuple[str, ...], environment: dict[str, str]) -> None:
    found = hub.refusal("validate", "acme/draft", *how, env={**environment, "HF_HUB_OFFLINE": "1"})
    assert (found["code"], found["id"], found["path"]) == (4, "not-cached", "acme/draft")
    assert "HF_HUB_OFFLINE" in found["hint"]


@pytest.mark.parametrize("how", [(), DOWNLOAD], ids=["headers", "download"])
def test_an_unreachable_hub(how: tuple[str, ...], environment: dict[str, str]) -> None:
    nobody = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    found = hub.refusal("validate", "acme/draft", *how, env=nobody)
    assert (found["code"], found["path"]) == (4, "acme/draft")
    assert found["id"] in ("hub-unreachable", "not-cached") if how else found["id"] == "hub-unreachable"
    assert "HF_ENDPOINT" in found["hint"]


def test_a_proxy_and_a_certificate_have_hints_of_their_own() -> None:
    """The errors as the HTTP library raises them."""
    importlib.import_module("huggingface_hub.hf_api")  # imports the HTTP library, under either name
    httpx: Any = sys.modules.get("httpx2") or sys.modules["httpx"]
    for error, id, variable in (
        (httpx.ProxyError("403 Forbidden"), "proxy-unreachable", "HTTPS_PROXY"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "certificate-refused", "SSL_CERT_FILE"),
    ):
        with pytest.raises(CheckpointNotFound) as caught, explained("acme/draft"):
            raise error
        assert (caught.value.id, caught.value.path) == (id, "acme/draft")
        assert variable in (caught.value.hint or "")


def test_a_proxy_that_is_not_there(environment: dict[str, str]) -> None:
    """In a process of its own, which reads the variable of the proxy."""
    given = {**environment, "HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    done = launch("validate", "acme/draft", env={**given, "http_proxy": given["HTTP_PROXY"], "no_proxy": ""})
    assert done.code == 4
    assert "HTTP_PROXY" in done.err.splitlines()[-1].split("hint: ")[1]


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
    for name in ("reduced", "dflash2", "dspark"):
        assert fetch_directory(f"tiny:{name}", Role.DRAFT) == tiny_directory() / f"draft-{name}"
        with refuses(UsageError, "draft-as-target", field="--target", found=f"tiny:{name}"):
            fetch_directory(f"tiny:{name}", Role.TARGET)


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("https://huggingface.co/org/repo", "org/repo"),
        ("https://huggingface.co/org/repo/tree/v2", "org/repo@v2"),
        ("hf://org/repo/config.json", "org/repo"),
        ("https://huggingface.co/datasets/org/repo", None),
    ],
)
def test_the_address_of_a_repository_is_read_for_a_hint(address: str, meant: str | None) -> None:
    with refuses(CheckpointNotFound, "not-a-reference", path=address) as refused:
        fetch_directory(address, Role.DRAFT)
    assert (f"{meant}?" in (refused.value.hint or "")) is (meant is not None)


@pytest.mark.parametrize("reference", ["", "~nobody/x/y", "org/repo/extra", "../up/there", "org//repo", "http://x/y"])
def test_other_texts_are_not_references(reference: str) -> None:
    with refuses(CheckpointNotFound, "not-a-reference", path=reference or "''"):
        fetch_directory(reference, Role.DRAFT)


def test_a_directory_without_a_checkpoint_does_not_hide_the_bundled_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(TINY).mkdir()
    assert is_bundled(TINY)
    assert fetch_directory(TINY, Role.DRAFT) == tiny_directory() / "draft"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("tiny:dflsh2", "tiny:dflash2"), ("tiny:x", "tiny:dspark"), ("runs/drft", "runs/draft"),
     ("./runs/drft", "runs/draft")],
)  # fmt: skip
def test_a_mistyped_reference_is_guessed(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs/drft` may also name a repository of the hub, which is turned off here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "runs" / "draft").mkdir(parents=True)
    for find in (fetch_directory, find_checkpoint):
        with pytest.raises(CheckpointNotFound) as caught:
            find(typed, Role.DRAFT)
        assert meant in (caught.value.hint or "")
