"""A grammar that an answer must follow.

llguidance parses grammars. It is an optional dependency (extra: grammar), imported when a grammar is first used.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from dflash_runtime.errors import RequestError, UnsupportedError

GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may have: JSON by a schema, matches of a regular expression, or a Lark grammar."""

    kind: GrammarKind
    text: str

    def compiled(self) -> str:
        """The grammar in llguidance's own form.

        Raises:
            RequestError: the schema, the expression or the grammar is malformed, or uses what llguidance lacks.
            UnsupportedError: llguidance is not installed.
        """
        matcher = import_llguidance().LLMatcher
        try:
            made = str(getattr(matcher, f"grammar_from_{self.kind}")(self.text))
            is_wrong, messages = matcher.validate_grammar_with_warnings(made)
        except ValueError as error:
            is_wrong, messages = True, [str(error)]
        if is_wrong:
            raise RequestError(
                f"the grammar cannot be used: {_reason(messages[0])}",
                id="grammar-refused", field=self.kind, found=self.text,
                hint="llguidance's documentation lists the parts of JSON Schema, regular expressions and Lark it reads",
            )  # fmt: skip
        return made


def _reason(message: str) -> str:
    """The first line of a message, with the reason that a parser of expressions gives below its quotation."""
    first, *rest = message.splitlines()
    reason = next((line.removeprefix("error:") for line in rest if line.startswith("error:")), "")
    return f"{first}{reason}"


def import_llguidance() -> Any:
    """The module llguidance.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise UnsupportedError(
            "a grammar needs the package llguidance", id="grammar-not-installed", field="grammar",
            hint="pip install 'dflash-cli[grammar]'",
        ) from error  # fmt: skip
