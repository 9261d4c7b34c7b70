"""A file that the system does not read ends a command in one line, which names this file and never an output."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.checkpoint.text.tokenizer import Tokenizer
from dflash_runtime.errors import CapacityError, FileUnreadable
from dflash_testing import checkpoints as support
from dflash_testing.command_line import Outcome, run_main
from dflash_testing.paths import ROOT

CODES = {errno.EIO: 4, errno.ENOMEM: 6}
"""Error number of the system -> exit code."""

ids = [errno.errorcode[number] for number in CODES]


class Lost:
    """An open file that fails when it is read. With `is_after_seek`, it fails only after a seek."""

    def __init__(self, stream: Any, number: int, *, is_after_seek: bool) -> None:
        self._stream, self._number, self._is_lost = stream, number, not is_after_seek

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> "Lost":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def seek(self, *args: int) -> Any:
        self._is_lost = True
        return self._stream.seek(*args)

    def read(self, *args: int) -> Any:
        if self._is_lost:
            raise OSError(self._number, os.strerror(self._number))
        return self._stream.read(*args)

    readinto = peek = read


def lose(patch: pytest.MonkeyPatch, file: Path, number: int, *, is_after_seek: bool = False) -> None:
    """Let no read of a file succeed."""
    real = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = real(path, mode, *args, **kwargs)
        is_meant = os.path.realpath(path) == os.path.realpath(file)
        return Lost(stream, number, is_after_seek=is_after_seek) if is_meant and mode == "rb" else stream

    patch.setattr(Path, "open", opened)


def refuse(number: int) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


def names(done: Outcome, file: Path, number: int) -> None:
    """The outcome is one line about the file, with the documented code."""
    assert done.error is not None, done
    assert done.code == CODES[number], done
    assert str(done.error.path) == str(file), done
    assert "\n" not in done.error.message


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert sorted(item.name for item in tmp_path.iterdir() if item.name.startswith(("out", "."))) == []


@pytest.mark.parametrize("number", CODES, ids=ids)
@pytest.mark.parametrize("to", ["native", "gguf"])
def test_weights_that_are_copied(to: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system copies from file to file, and its error tells neither which file fails."""
    source = support.make_native(tmp_path / "source")
    for call in ("copy_file_range", "sendfile", "pread"):
        monkeypatch.setattr(os, call, refuse(number), raising=False)
    done = run_main("convert", source, "out.gguf" if to == "gguf" else "out", "--to", to, "--verify", "none")
    names(done, source / "model.safetensors", number)


@pytest.mark.parametrize("number", CODES, ids=ids)
def test_files_beside_the_weights(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = support.make_native(tmp_path / "source")
    (source / "README.md").write_text("# a draft\n")
    lose(monkeypatch, source / "README.md", number)
    names(run_main("convert", source, "out", "--to", "native"), source / "README.md", number)


@pytest.mark.parametrize("number", CODES, ids=ids)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    "arguments",
    [("inspect",), ("validate",), ("lock", "-t", "target"), ("convert", "out", "--to", "native")],
    ids=lambda arguments: arguments[0],
)
def test_files_of_a_draft(
    arguments: tuple[str, ...], name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = support.make_native(tmp_path / "source"), support.make_target(tmp_path / "target")
    lose(monkeypatch, source / name, number)
    command, *rest = arguments
    names(run_main(command, source, *rest), source / name, number)


@pytest.mark.parametrize("number", CODES, ids=ids)
def test_numbers_that_a_conversion_computes_with(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header was read before."""
    source = support.make_native(
        tmp_path / "source",
        dflash_config={"mask_token_id": support.SMALL.mask, "target_layer_ids": [*reversed(support.SMALL.taps)]},
    )
    lose(monkeypatch, source / "model.safetensors", number, is_after_seek=True)
    done = run_main("convert", source, "out", "--to", "native", "--normalise-taps")
    names(done, source / "model.safetensors", number)


@pytest.mark.parametrize(
    ("raised", "number"),
    [(OSError("Input/output error (os error 5)"), errno.EIO), (MemoryError("Cannot allocate"), errno.ENOMEM)],
    ids=["EIO", "ENOMEM"],
)
def test_weights_that_are_mapped(
    raised: Exception, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors sets neither number nor file."""
    source = support.make_native(tmp_path / "source")

    def refused(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr("safetensors.safe_open", refused)
    names(run_main("validate", source, "--level", "weights"), source / "model.safetensors", number)


@pytest.mark.parametrize("number", CODES, ids=ids)
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_files_of_a_tokenizer(name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "dflash_cli" / "tiny" / "target", tmp_path / "target")
    lose(monkeypatch, tmp_path / "target" / name, number)
    with pytest.raises(FileUnreadable if number == errno.EIO else CapacityError) as caught:
        _ = Tokenizer(tmp_path / "target").eos_token_id
    assert caught.value.path == tmp_path / "target" / name
