"""A command's signature as flags, and typed text as values: bounds, choices, lists, and a draft given by --draft."""

import inspect
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from dflash_cli.terminal.lazy_group import read_values
from dflash_cli.terminal.parameters import DRAFT_OPTION, Parameter, Signature, Typed, read_signature
from dflash_runtime.errors import UsageError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Group:
    size: Annotated[int, typer.Option(min=1, metavar="N")] = 3
    dialect: Annotated[Literal["native", "speculators"], typer.Option("--dialect")] = "native"


def toy(
    group: Group,
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Draft: a directory.")],
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]")] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE")] = "auto",
    share: Annotated[float, typer.Option("--share", "-s", min=0.0, max=1.0)] = 0.5,
    ids: Annotated[list[int] | None, typer.Option("--id")] = None,
    out: Annotated[Path | None, typer.Option("--out")] = None,
    colour: Annotated[Colour, typer.Option("--colour")] = Colour.RED,
    chat: Annotated[bool, typer.Option("--chat/--raw")] = False,
    adapt: Annotated[bool | None, typer.Option("--adapt/--no-adapt")] = None,
    files: Annotated[tuple[Path, Path] | None, typer.Option("--files", metavar="A B")] = None,
) -> None:
    """A toy."""


@pytest.fixture(scope="module")
def signature() -> Signature:
    return read_signature(toy, draft="draft")


def named(signature: Signature, name: str) -> Parameter:
    return next(item for item in signature.parameters if item.name == name)


def values(signature: Signature, **typed: Any) -> dict[str, Any]:
    nothing = {item.name: False if item.is_switch else None for item in signature.parameters}
    return read_values(signature, nothing | typed, [])


def test_every_option_says_its_flags_to_typer(signature: Signature) -> None:
    """Releases of Typer derive different flags from a metavar, so none is left to derive."""
    for item in signature.parameters:
        if item.flags:
            (info,) = item.for_typer().annotation.__metadata__
            given = (info.default, *info.param_decls)
            assert all(isinstance(decl, str) and decl.startswith("-") for decl in given), item.name
    assert named(signature, "device").flags == ("--device",)


def test_fields_of_a_group_stand_in_its_place(signature: Signature) -> None:
    assert [item.name for item in signature.parameters[:2]] == ["size", "dialect"]
    seen: list[Any] = []

    def command(group: Group) -> None:
        seen.append(group)

    read_signature(command).call({"size": 4, "dialect": "speculators"})
    assert seen == [Group(size=4, dialect="speculators")]


def test_text_is_read_by_type(signature: Signature) -> None:
    read = values(signature, draft="d", size="7", share="0.25", ids=["1", "2"], out="x/y", colour="blue", chat=True)
    assert (read["size"], read["share"], read["ids"], read["out"]) == (7, 0.25, [1, 2], Path("x/y"))
    assert (read["colour"], read["chat"], read["device"], read["other"]) == (Colour.BLUE, True, "auto", None)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"size": "0"}, "--size 0: expected 1 or more"),
        ({"size": "many"}, "--size many: expected a whole number"),
        ({"share": "2"}, "--share 2: expected 1 or less"),
        ({"share": "nan"}, "--share nan: expected 0 or more"),
        ({"dialect": "speculator"}, "--dialect speculator: expected native or speculators; did you mean speculators?"),
        ({"colour": "green"}, "--colour green: expected red or blue"),
        ({"draft": None}, "DRAFT is missing: draft: a directory"),
    ],
)
def test_a_wrong_value_is_one_line(signature: Signature, typed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        values(signature, **({"draft": "d"} | typed))
    assert raised.value.message == message


def test_a_pair_takes_two_values(signature: Signature) -> None:
    assert values(signature, draft="d", files=("a", "b"))["files"] == (Path("a"), Path("b"))
    assert values(signature, draft="d")["files"] is None
    with pytest.raises(UsageError, match="--files a --share: expected two values, A B"):
        values(signature, draft="d", files=("a", "--share"))


def test_a_message_spells_a_flag_as_it_was_typed(signature: Signature) -> None:
    share = named(signature, "share")
    assert share.spelling(["x", "-s", "2"]) == "-s"
    assert share.spelling(["-s2"]) == "-s"
    assert share.spelling(["--share=2"]) == "--share"


def test_a_draft_given_by_its_option_moves_the_arguments_on(signature: Signature) -> None:
    read = values(signature, **{DRAFT_OPTION: "mine", "draft": "second"})
    assert (read["draft"], read["other"]) == ("mine", "second")
    with pytest.raises(UsageError, match="given twice: a as an argument and mine by --draft"):
        values(signature, **{DRAFT_OPTION: "mine", "draft": "a", "other": "b"})


def test_a_parameter_that_text_cannot_give_is_a_fault_of_the_command() -> None:
    def command(items: Annotated[dict[str, str] | None, typer.Option("--items")] = None) -> None: ...

    with pytest.raises(TypeError, match="cannot be read from text"):
        read_signature(command)


def test_typer_takes_what_it_is_told(signature: Signature) -> None:
    app = typer.Typer()
    seen: dict[str, Any] = {}

    def run(**arguments: Any) -> None:
        seen.update(arguments)

    import inspect

    parameters = [item.for_typer() for item in signature.parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    app.command()(run)
    result = CliRunner().invoke(app, ["mine", "--chat", "--id", "1", "--id", "2", "-s", "0.1"])
    assert result.exit_code == 0, result.output
    assert seen["draft"] == "mine"
    assert seen["chat"] is True
    assert seen["ids"] == ["1", "2"]
    assert seen["share"] == "0.1"


@pytest.mark.parametrize(("typed", "value"), [([], None), (["--adapt"], True), (["--no-adapt"], False)])
def test_a_switch_without_a_default_says_whether_it_was_typed(
    typed: list[str], value: bool | None, signature: Signature
) -> None:
    app, found = typer.Typer(), []

    def run(**given: Any) -> None:
        found.append(read_values(signature, given, typed)["adapt"])

    parameters = [item.for_typer() for item in signature.parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    app.command()(run)
    assert CliRunner().invoke(app, ["somewhere", *typed]).exit_code == 0
    assert found == [value]


def test_a_command_is_told_what_stands_on_its_line() -> None:
    told: list[Typed] = []

    def toy(
        typed: Typed,
        word: Annotated[str, typer.Argument(metavar="WORD")] = "a",
        count: Annotated[int, typer.Option("--count", "-n")] = 3,
        loud: Annotated[bool, typer.Option("--loud/--low")] = False,
    ) -> None:
        told.append(typed)

    signature = read_signature(toy)
    signature.call({"word": "a", "count": 3, "loud": False}, {"count", "word"})
    signature.call({"word": "a", "count": 3, "loud": False})
    assert told == [Typed({"--count", "WORD"}), Typed()]
    assert [item.name for item in signature.parameters][:3] == ["word", "count", "loud"]
