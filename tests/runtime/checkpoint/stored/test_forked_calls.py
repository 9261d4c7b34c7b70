"""Limits of calls in a forked process, and chat templates that go past them."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.stored.forked_calls import CallFailed, ForkedCalls
from dflash_runtime.checkpoint.text import tokenizer
from dflash_runtime.checkpoint.text.tokenizer import Tokenizer
from dflash_runtime.errors import CheckpointError, RequestError
from dflash_testing.deadline import deadline
from dflash_testing.refusals import refuses

MESSAGES = [{"role": "user", "content": "a"}]

ENDLESS = {
    "a loop": "[x for x in iter(int, 1)]",
    "one long operation": "str(2 ** 10 ** 9)",
    "much memory": "'a' * 10 ** 10",
    "a long text": "'a' * 2 ** 27",
    "its own end": "__import__('os')._exit(3)",
}


@pytest.fixture
def calls() -> ForkedCalls:
    return ForkedCalls(lambda text: str(eval(text)), seconds=0.3, max_bytes=1 << 26)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_call_past_its_limits_fails_and_the_next_one_succeeds(name: str, calls: ForkedCalls) -> None:
    with deadline(20), pytest.raises(CallFailed):
        calls(ENDLESS[name])
    assert calls("'ü' * 3") == "üüü"


def test_an_error_is_told_on_one_line(calls: ForkedCalls) -> None:
    with pytest.raises(CallFailed, match=r"^two$"):
        calls("exec('raise ValueError(\"two\\\\nlines\")')")
    assert calls("1 + 1") == "2"


def test_threads_share_the_process(calls: ForkedCalls) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(calls("__import__('os').getpid()"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({*found}) == 1
    assert str(os.getpid()) not in found


def test_the_process_holds_no_other_file(calls: ForkedCalls, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w"):
        held = calls("[__import__('os').readlink(f'/proc/self/fd/{n}') for n in range(99) if n != 2 and "
                     "__import__('os').path.exists(f'/proc/self/fd/{n}')]")  # fmt: skip
    assert str(tmp_path) not in held


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_directory() / "target", tmp_path / "target"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 2 ** (10 ** 9) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ messages[0].content.__class__ }}{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_chat_template_past_its_limits_is_refused(
    template: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "RENDER_S", 0.3)
    (target / "chat_template.jinja").write_text(template)
    with deadline(20), refuses(RequestError, "template-refuses", field="row 1"):
        Tokenizer(target).render(MESSAGES, where="row 1")


def test_a_template_renders_as_transformers_renders_it(target: Path) -> None:
    found = Tokenizer(target)
    text = found._hosted.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert found._plain_texts([MESSAGES, {}]) == text


def test_a_pipe_as_a_file_of_the_tokenizer_is_refused(target: Path) -> None:
    (target / "chat_template.jinja").unlink()
    os.mkfifo(target / "chat_template.jinja")
    with deadline(20), refuses(CheckpointError, "not-a-regular-file"):
        Tokenizer(target).encode("a")


@pytest.mark.parametrize("setting", [{"model_max_length": [1]}, {"eos_token": {"content": [1]}}, {"bos_token": 5}])
def test_settings_that_fail_in_use_are_named(target: Path, setting: dict[str, Any]) -> None:
    """The fuzzer found a TypeError of transformers at the first text."""
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "unknown": 1, **setting}))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(target).encode("a")
    assert caught.value.id in ("tokenizer-not-loaded", "tokenizer-not-used")


@pytest.mark.parametrize("text", ["\ud800", "a\udcff", "\udcff\ud800b"])
@pytest.mark.parametrize("setting", [{}, {"unknown": 1}], ids=["plain", "by transformers"])
def test_a_text_that_is_not_utf8_is_refused(target: Path, text: str, setting: dict[str, Any]) -> None:
    """An argument of a command that is not UTF-8 has half surrogate pairs."""
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **setting}))
    with refuses(RequestError, "text-not-utf8", field="prompt"):
        Tokenizer(target).encode(text)
