"""Chat templates, rendered in the sandbox and with the names that transformers gives them, without importing it."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ARGUMENTS = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Options that transformers reads itself instead of giving them to the template."""

CHANGED_FIELDS = frozenset({"reasoning_content", "thinking", "reasoning"})
"""Fields of messages that some releases of transformers rename."""

TRACKED = re.compile(r"\bendgeneration\b")
"""The tag with which a template marks the assistant's text. transformers adds it to jinja."""


def is_rendered_here(template: object, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> bool:
    """Whether every release of transformers renders a conversation as `render_template` does."""
    return (
        isinstance(template, str)
        and not TRACKED.search(template)
        and not options.keys() & ARGUMENTS
        and _is_plain([*messages, dict(options)])
        and bool(messages)
        and all(not message.keys() & CHANGED_FIELDS and None not in message.values() for message in messages)
    )


def render_template(template: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> str:
    """The text of a conversation that ends where the assistant answers. The template sees `names` too.

    Raises:
        jinja2.TemplateError: the template is malformed or refuses the conversation.
    """
    known = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    return _compile(template).render(**known, **names)


def _is_plain(value: object) -> bool:
    """Whether a value consists of JSON's types only. The sandbox knows the methods of these types."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the template stores {name!r} in a namespace")


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach Python's own attributes."""

    def __init__(*args: Any, **values: Any) -> None:
        itself, *given = args
        checked = dict(*given, **values)
        for name in checked:
            _check_name(name)
        Namespace.__init__(itself, checked)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


class _Dict:
    """The function `dict` without the attributes of Python's class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def _compile(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace)
    return environment.from_string(text)
