"""Check types and required fields of chat answers against OpenAI's protocol, in one piece and streamed.

Source: the reference of `chat/completions`. A field that the probe reads is checked, and a field that may be absent is
checked where it is present. Absent lists and absent text count as null.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.phrases import shorten

ENDED = ("tool_calls", "length")
"""Reasons for the end of an answer with a tool call."""
MAX_FAULTS = 4
KINDS: Mapping[type, str] = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number",
    type(None): "null",
}  # fmt: skip


def whole_faults(document: Any) -> tuple[str, ...]:
    """Differences of an answer in one piece from the protocol, in words."""
    choice = _first(as_object(document).get("choices"))
    message = as_object(choice.get("message"))
    faults = list(_text_faults(message))
    if message.get("role") != "assistant":
        faults.append(f"role is {_shown(message.get('role'))}, expected 'assistant'")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        faults.append(f"tool_calls is {_kind(calls)}, expected a list")
    found = list_calls(calls)
    for call in found:
        faults += [*_call_faults(call), *_arguments_faults(as_object(call.get("function")).get("arguments"))]
    faults += [*_id_faults([call.get("id") for call in found]), *_end_faults(choice.get("finish_reason"), found)]
    return _few(faults)


def stream_faults(events: Sequence[Any], *, is_cut: bool = False) -> tuple[str, ...]:
    """Differences of the events of a stream from the protocol, in words. The end of a cut stream is not judged."""
    choices = [choice for event in events for choice in list_calls(as_object(event).get("choices"))]
    deltas = [as_object(choice.get("delta")) for choice in choices]
    faults = [fault for delta in deltas for fault in _text_faults(delta)]
    roles = [delta["role"] for delta in deltas if delta.get("role") is not None]
    faults += [f"role is {_shown(role)}, expected 'assistant'" for role in roles if role != "assistant"]
    pieces = [call for delta in deltas for call in list_calls(delta.get("tool_calls"))]
    if any(not is_int(piece.get("index")) for piece in pieces):
        faults.append("a streamed piece of a tool call lacks its index")
    calls: dict[Any, list[Mapping[str, Any]]] = {}
    for piece in pieces:
        calls.setdefault(repr(piece.get("index")), []).append(piece)
    whole = [_joined(own, faults) for own in calls.values()]
    faults += _id_faults([call.get("id") for call in whole])
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason") is not None]
    ends = [] if is_cut else _end_faults(reasons[-1] if reasons else None, whole)
    return _few([*faults, *ends])


def list_calls(value: object) -> list[Mapping[str, Any]]:
    """The objects of a list; an object alone counts as a list of one."""
    items = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
    return [item for item in items if isinstance(item, dict)]


def _joined(pieces: Sequence[Mapping[str, Any]], faults: list[str]) -> Mapping[str, Any]:
    """A call put together from its pieces. Faults of single pieces are added to `faults`."""
    functions = [as_object(piece.get("function")) for piece in pieces]
    texts = [function.get("arguments") for function in functions]
    wrong = [text for text in texts if text is not None and not isinstance(text, str)]
    name = next((function["name"] for function in functions if function.get("name")), None)
    kinds = {piece["type"] for piece in pieces if isinstance(piece.get("type"), str)} or {"function"}
    call = {
        "id": next((piece["id"] for piece in pieces if piece.get("id")), None),
        "type": next(iter(sorted(kinds, key=lambda kind: kind == "function"))),
        "function": {"name": name},
    }
    faults += _call_faults(call)
    faults += _arguments_faults(wrong[0]) if wrong else []
    return call


def _text_faults(message: Mapping[str, Any]) -> Iterator[str]:
    for name in ("content", "reasoning_content", "reasoning"):
        if not isinstance(message.get(name), str | None):
            yield f"{name} is {_kind(message[name])}, expected a string or null"


def _call_faults(call: Mapping[str, Any]) -> Iterator[str]:
    if call.get("type") != "function":
        yield f"type of a tool call is {_shown(call.get('type'))}, expected 'function'"
    if not isinstance(call.get("function"), dict):
        yield f"function of a tool call is {_kind(call.get('function'))}, expected an object"
    elif not (isinstance(name := call["function"].get("name"), str) and name):
        yield f"function.name is {_shown(name)}, expected the name of the tool"


def _arguments_faults(arguments: object) -> list[str]:
    """A type other than a string, or JSON in JSON. The question itself judges the JSON."""
    if isinstance(arguments, str):
        try:
            inner = loads(arguments.encode())
        except ValueError:
            return []
        return ["function.arguments is JSON of a string, so it is encoded twice"] if isinstance(inner, str) else []
    return [f"function.arguments is {_kind(arguments)}, expected a string of JSON"]


def _id_faults(ids: Sequence[object]) -> list[str]:
    wrong = [id for id in ids if not (isinstance(id, str) and id)]
    if wrong:
        return [f"id of a tool call is {_shown(wrong[0])}, expected a string that is not empty"]
    return ["tool calls of one answer share an id"] if len(set(ids)) < len(ids) else []


def _end_faults(reason: object, calls: Sequence[object]) -> list[str]:
    if reason is None or not isinstance(reason, str):
        return [f"finish_reason is {_shown(reason)}, expected a string"]
    is_odd = calls and reason not in ENDED
    return [f"finish_reason is {_shown(reason)} beside a tool call, expected 'tool_calls'"] if is_odd else []


def _first(choices: object) -> Mapping[str, Any]:
    return next(iter(list_calls(choices)), {})


def _kind(value: object) -> str:
    return KINDS.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    return shorten(repr(value), 40) if isinstance(value, str) else _kind(value)


def _few(faults: Sequence[str]) -> tuple[str, ...]:
    """Each fault once, the first ones only."""
    return tuple(dict.fromkeys(faults))[:MAX_FAULTS]
