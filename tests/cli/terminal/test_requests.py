"""Request classes: one declaration for flags, typed text, Python values, settings and the signature that Typer sees."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from dflash_cli.main import COMMANDS
from dflash_cli.terminal.command_line import (
    BY_FLAG,
    COMMON,
    JSON,
    Entry,
    _for_typer,
    load_command,
    parameters_of_command,
    read_request,
    request_class,
)
from dflash_cli.terminal.options import parse_object
from dflash_cli.terminal.parameters import SIZE, Argument, Option, Parameter, parse_size
from dflash_cli.terminal.requests import Request, Verb, parameters_of, verb
from dflash_runtime.errors import UsageError
from dflash_testing.refusals import refuses


@dataclass(frozen=True, kw_only=True)
class Sizes(Request):
    size: Annotated[int, Option(min=1, help="A size.")] = 3


@dataclass(frozen=True, kw_only=True)
class Toy(Sizes):
    """A toy."""

    draft: Annotated[str, Argument(flag="--draft", short="-d", help="Draft: a directory.")]
    other: Annotated[str | None, Argument(help="Another.")] = None
    dialect: Annotated[Literal["native", "speculators"], Option(help="Dialect.")] = "native"
    share: Annotated[float, Option(short="-s", min=0, max=1, help="Share.")] = 0.5
    open_share: Annotated[float, Option(above=0, below=1, help="Share.")] = 0.5
    ids: Annotated[tuple[int, ...], Option(flag="--id", help="Ids.")] = ()
    out: Annotated[Path | None, Option(is_setting=False, help="File.")] = None
    chat: Annotated[bool, Option(off="--raw", help="Chat.")] = False
    adapt: Annotated[bool | None, Option(off="--no-adapt", help="Adapt.")] = None
    memory: Annotated[int | None, Option(parse=parse_size, expected=SIZE, help="Memory.")] = None
    keywords: Annotated[Mapping[str, Any] | None, Option(parse=parse_object, expected="an object", help="JSON.")] = None


def named(name: str) -> Parameter:
    return next(item for item in parameters_of(Toy) if item.name == name)


def read(**typed: Any) -> Toy:
    request = read_request(Toy, {item.name: None for item in parameters_of(Toy)} | {"draft": "d"} | typed)
    assert isinstance(request, Toy)
    return request


def test_arguments_come_first_and_flags_follow_from_names() -> None:
    names = [item.name for item in parameters_of(Toy)]
    assert names[:3] == ["draft", "other", "dialect"]
    assert names[-1] == "size", "inherited options come last"
    assert named("open_share").flags == ("--open-share",)
    assert named("share").flags == ("--share", "-s")
    assert named("ids").flags == ("--id",)
    assert (named("out").metavar, named("ids").metavar, named("dialect").metavar) == (
        "FILE", "N,...", "native|speculators",
    )  # fmt: skip


def test_text_is_read_by_type() -> None:
    found = read(size="7", share="0.25", ids=["1,2", "3"], out="x/y", chat=True, memory="2M", keywords='{"a": 1}')
    assert (found.size, found.share, found.ids, found.out) == (7, 0.25, (1, 2, 3), Path("x/y"))
    assert (found.chat, found.other, found.adapt, found.memory, found.keywords) == (True, None, None, 2**21, {"a": 1})


WRONG = [
    ("size", "0", "--size"),
    ("size", "many", "--size"),
    ("share", "2", "--share"),
    ("share", "nan", "--share"),
    ("size", str(2**63), "--size"),
    ("open_share", "0", "--open-share"),
    ("open_share", "1", "--open-share"),
    ("dialect", "speculator", "--dialect"),
    ("memory", "5 apples", "--memory"),
    ("memory", "0", "--memory"),
    ("keywords", "[1]", "--keywords"),
    ("keywords", "{", "--keywords"),
]


@pytest.mark.parametrize(("name", "text", "field"), WRONG)
def test_a_wrong_text_names_its_field(name: str, text: str, field: str) -> None:
    with refuses(UsageError, field=field) as caught:
        read(**{name: text})
    assert str(caught.value.found) in (text, str(float(text)) if field.endswith("share") else text)
    assert caught.value.expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 0), ("size", "7"), ("size", True), ("share", float("nan")), ("dialect", "speculator"), ("draft", None),
     ("draft", 3), ("ids", 1), ("ids", "1"), ("ids", [1, "2"]), ("chat", 1), ("memory", 1.5)],
)  # fmt: skip
def test_python_values_are_checked_as_texts_are(name: str, value: Any) -> None:
    with refuses(UsageError, field=named(name).title):
        Toy(**{"draft": "d", name: value})


def test_python_values_are_converted() -> None:
    found = Toy(draft=Path("a/b"), ids=[1, 2], out="x", memory="1K", share=1)  # type: ignore[arg-type]
    assert (found.draft, found.ids, found.out, found.memory, found.share) == ("a/b", (1, 2), Path("x"), 1024, 1)


def test_settings_are_the_fields_that_decide_the_result() -> None:
    found = Toy(draft="d", ids=(1,), out=Path("x")).settings()
    assert set(found) == {item.name for item in parameters_of(Toy)} - {"out"}
    assert (found["ids"], found["draft"], found["keywords"]) == ([1], "d", None)


def test_changed_fields_are_those_that_differ_from_the_default() -> None:
    assert [item.name for item in Toy(draft="d", size=4, chat=False).changed()] == ["draft", "size"]


def test_a_missing_argument_names_itself() -> None:
    with refuses(UsageError, "missing-argument", field="DRAFT"):
        read(draft=None)


def test_a_draft_given_by_its_flag_moves_the_arguments_up() -> None:
    found = read(**{BY_FLAG + "draft": "mine", "draft": "second"})
    assert (found.draft, found.other) == ("mine", "second")
    with refuses(UsageError, "draft-given-twice", field="--draft", found="mine"):
        read(**{BY_FLAG + "draft": "mine", "draft": "a", "other": "b"})


def test_a_field_that_text_cannot_give_is_a_fault_of_the_class() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Request):
        items: Annotated[dict[str, str] | None, Option(help="Items.")] = None

    with pytest.raises(TypeError):
        parameters_of(Wrong)


@verb(Toy)
def play(request: Toy) -> str:
    """Play."""
    return f"{request.draft} {request.size}"


def test_a_verb_takes_its_request_or_the_fields() -> None:
    assert play(Toy(draft="d", size=2)) == play(draft="d", size=2) == "d 2"
    assert play.__doc__ == "Play."
    with pytest.raises(TypeError):
        play(drat="d")  # type: ignore[call-overload]


def run_with_typer(*typed: str) -> dict[str, Any]:
    app, seen = typer.Typer(), dict[str, Any]()

    def run(**arguments: Any) -> None:
        seen.update(arguments)

    parameters = [part for item in (*parameters_of(Toy), JSON, *COMMON) for part in _for_typer(item)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    app.command()(run)
    result = CliRunner().invoke(app, list(typed))
    assert result.exit_code == 0, result.output
    return seen


def test_typer_hands_over_texts() -> None:
    seen = run_with_typer("mine", "--chat", "--id", "1", "--id", "2,3", "-s", "0.1")
    assert (seen["draft"], seen["chat"], seen["ids"], seen["share"]) == ("mine", True, ["1", "2,3"], "0.1")


@pytest.mark.parametrize(("typed", "value"), [([], None), (["--adapt"], True), (["--no-adapt"], False)])
def test_a_switch_without_a_default_says_whether_it_was_typed(typed: list[str], value: bool | None) -> None:
    seen = run_with_typer("d", *typed)
    request = read_request(Toy, {name: seen[name] for name in seen if name != "as_json"})
    assert isinstance(request, Toy)
    assert request.adapt is value


def test_every_option_says_its_flags_to_typer() -> None:
    """Releases of Typer derive different flags from a metavar, so every flag is given."""
    for item in parameters_of(Toy):
        for parameter in _for_typer(item):
            (info,) = parameter.annotation.__metadata__
            if not isinstance(info, typer.models.ArgumentInfo):
                given = (info.default, *info.param_decls)
                assert all(isinstance(text, str) and text.startswith("-") for text in given), item.name


@pytest.mark.parametrize(("name", "entry"), COMMANDS.items(), ids=COMMANDS)
def test_a_command_and_its_python_function_have_one_request_class(name: str, entry: Entry) -> None:
    """The options of the command line, the keywords of the Python function and the settings are the same fields."""
    import importlib

    import dflash_cli

    module = importlib.import_module(f"dflash_cli.commands.{name.replace('-', '_')}")
    kind = request_class(module.command)
    assert load_command(name, entry).kind is kind
    verbs = [value for value in vars(module).values() if isinstance(value, Verb) and value.kind is kind]
    if name in ("schema", "docs"):
        assert not verbs
        return
    (function,) = verbs
    assert function in [getattr(dflash_cli, item, None) for item in dflash_cli.__all__]
    assert getattr(dflash_cli, kind.__name__) is kind
    names = {item.name for item in parameters_of(kind)}
    assert names == {item.name for item in inspect.signature(kind).parameters.values()}
    assert kind.__doc__


def test_one_idea_has_one_flag() -> None:
    """A flag means the same field in every command, and a field has the same flag."""
    flags: dict[str, set[str]] = {}
    fields: dict[str, set[str]] = {}
    for name, entry in COMMANDS.items():
        for item in parameters_of(load_command(name, entry).kind):
            for flag in item.flags:
                flags.setdefault(flag, set()).add(item.name)
            fields.setdefault(item.name, set()).add(item.flag)
    drafts = {"draft", "reference", "source"}
    several = {flag: names for flag, names in flags.items() if len(names) > 1}
    assert several == {"--draft": drafts, "-d": drafts}
    assert {name for name, found in fields.items() if len(found - {""}) > 1} == set()
    gone = {
        "--batches", "--batch-sizes", "--max-num-requests", "--max-num-seqs", "--out", "--rows", "--report",
        "--verifier", "--base-model", "--model", "--bootstrap", "--adaptive-width",
        "--num-speculative-tokens-list", "--kv-transfer",
    }  # fmt: skip
    assert not gone & flags.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("2mb", 2 * 2**20),
        ("512M", 512 * 2**20),
        ("5GB", 5 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("1T", 2**40),
    ],
)
def test_every_unit_is_a_power_of_1024(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "0", "24", "-5GB", "5 apples", "GB", "nan", "1e30G"])
def test_texts_that_are_not_sizes(text: str) -> None:
    with refuses(UsageError, field="--memory", found=text, expected=SIZE):
        named("memory").read(text)


GATES = {
    "strict",
    "ignore",
    "min_acceptance",
    "min_speedup",
    "tolerance",
    "gate",
    "allow_failed",
    "allow_unlike",
    "gate_out",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_come_in_the_order_in_which_a_user_needs_them(name: str) -> None:
    """Under every heading: arguments, the pair, the work, where results go, how a run continues, gates."""
    members: dict[str, list[Parameter]] = {}
    for item in parameters_of_command(name):
        members.setdefault(item.option.group, []).append(item)

    def stage(item: Parameter) -> int:
        stages = ({"output", "format", "force"}, {"resume", "dry_run", "yes"}, GATES)
        late = next((at for at, names in enumerate(stages, 3) if item.name in names), 2)
        return 0 if item.is_argument else 1 if item.name in ("draft", "target") else late

    for group in members.values():
        stages = [stage(item) for item in group if not item.is_required]
        assert stages == sorted(stages), [item.name for item in group]
