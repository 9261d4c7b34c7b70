"""Ask for a tool call, in one piece and as a stream: are its arguments whole and of the schema, and is it drafted?

A verify step commits several tokens at once. A parser that expects one token at a time then loses text of a stream.
Calls that are broken at times look like either fault in one pair of calls, so a broken call is followed by more. A
call with arguments off the tool's schema, or with a stream that ends early, is followed by more calls, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_cli.probing.asking.chat_findings import find_protocol_faults
from dflash_cli.probing.asking.kind_findings import find_endless, find_slow
from dflash_cli.probing.asking.question import QUESTIONS, CountedCall, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.chat_answers import ServedToolCall, verb_of_stream
from dflash_cli.probing.served.chat_protocol import KINDS
from dflash_cli.probing.servers.inference_server import MEASURED, Variant
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import shorten

ANSWER_LEN, MIN_TOKENS = 192, 16
MIN_OFF, MAX_FAULTS = 2, 4
MORE = (True, False, False, True)
"""Whether each further call is streamed. Each form comes first in turn, for faults of every second call."""
WORDS: Mapping[str, str] = {
    "whole": "sound", "off schema": "off its schema", "broken": "broken", "cut": "not finished", "absent": "absent",
}  # fmt: skip
NAME, REQUIRED = "get_weather", ("city", "days")
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "The weather of the next days in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": list(REQUIRED),
            "additionalProperties": False,
        },
    },
}
MESSAGES = ({"role": "user", "content": "Get the weather in Lisbon for the next three days. Use the tool."},)


@QUESTIONS.register("tool-call")
def ask(session: QuestionSession) -> Outcome:
    """Findings about a tool call."""

    def call(*, is_streamed: bool = False, variant: Variant = MEASURED) -> CountedCall:
        return session.call_tool(
            lambda: session.server.call_tool(
                MESSAGES, TOOL, max_new_tokens=ANSWER_LEN, is_streamed=is_streamed, variant=variant
            )
        )

    try:
        first, second = call(), call(is_streamed=True)
    except RequestError as error:
        raise NotJudged(f"the server takes no tools: {shorten(error.message, 100)}") from error
    whole, streamed = first.call, second.call
    state, streamed_state = _state(whole), _state(streamed)
    protocol = find_protocol_faults([whole], [streamed])
    if state == "cut" and not protocol:
        endless = find_endless("tool-call", "a required tool call", list(map(_begun, (whole, streamed))), lambda: None)
        if endless:
            return Outcome(seen="the call does not end", findings=endless)
        raise NotJudged(f"no tool call within {ANSWER_LEN} tokens")
    calls, streams = [whole], [streamed]
    is_odd = bool({"broken", "off schema"} & {state, streamed_state}) or {state, streamed_state} == {"whole", "absent"}
    if is_odd or streamed.is_cut:
        for is_streamed in MORE:
            (streams if is_streamed else calls).append(call(is_streamed=is_streamed).call)
    states, streamed_states = _states(calls, streams)
    plain = None
    is_broken = bool({"broken", "off schema"} & {*states}) and "whole" not in states
    if is_broken and session.server.can_switch_off:
        plain = _state(call(variant=Variant(is_plain=True)).call)
    seen = f"call {WORDS[states[0]]}, streamed {WORDS[streamed_states[0]]}"
    findings = [
        *protocol,
        *_at_times(states, streamed_states, whole if state == "broken" else streamed),
        *(_broken(whole, plain) if is_broken and "broken" in states else ()),
        *_off_schema(list(zip([*calls, *streams], [*states, *streamed_states], strict=True)), plain),
        *_stream(states, streamed_states, whole, streamed),
        *_drafted(session, whole, first.num_steps),
        *find_slow(
            session, "tool-call-slow", "a tool call", min(first.seconds, second.seconds), whole.num_tokens or ANSWER_LEN
        ),
    ]
    return Outcome(seen=seen, findings=findings)


def _begun(call: ServedToolCall) -> str:
    """The text of a call that was cut by the limit, if it begins as one; otherwise an empty text."""
    is_begun = call.arguments is not None or NAME in call.text or not call.text.strip()
    return call.text + (call.arguments or "") if is_begun and call.finish_reason == "length" else ""


def _state(call: ServedToolCall) -> str:
    """whole, off schema, broken, cut by the length limit or early, or absent: the model wrote something else."""
    arguments = _arguments(call)
    if arguments is not None and call.name == NAME:
        return "off schema" if list(_misfits(arguments)) else "whole"
    if call.finish_reason == "length" or call.is_cut:
        return "cut"
    is_in_text = NAME in call.text and all(name in call.text for name in REQUIRED)
    return "broken" if call.arguments is not None or is_in_text else "absent"


def _states(calls: Sequence[ServedToolCall], streams: Sequence[ServedToolCall]) -> tuple[list[str], list[str]]:
    """The states of both forms. A stream without a key that each call in one piece has is broken: it has lost text."""
    states, streamed_states = ([_state(item) for item in own] for own in (calls, streams))
    if set(states) == {"whole"}:
        found = [_arguments(item) for item in streams]
        lost = [own is not None and set(own) < set(REQUIRED) for own in found]
        streamed_states = ["broken" if gone else state for gone, state in zip(lost, streamed_states, strict=True)]
    return states, streamed_states


def _arguments(call: ServedToolCall) -> Mapping[str, Any] | None:
    """The arguments as an object, or None if their text is broken or cut."""
    try:
        value = loads((call.arguments or "").encode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _misfits(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Differences from the tool's schema, in words."""
    yield from (f"{name} is missing" for name in REQUIRED if name not in arguments)
    yield from (f"{shorten(repr(name), 40)} is an unknown key" for name in arguments if name not in REQUIRED)
    city, days = arguments.get("city", ""), arguments.get("days", 0)
    if not isinstance(city, str):
        yield f"city is {KINDS[type(city)]}, expected a string"
    if isinstance(days, bool) or not (isinstance(days, int) or (isinstance(days, float) and days.is_integer())):
        yield f"days is {KINDS[type(days)] if not isinstance(days, float) else days}, expected an integer"


def _off_schema(calls: Sequence[tuple[ServedToolCall, str]], plain: str | None) -> Iterator[ServedFinding]:
    """A finding if several calls do not fit the schema."""
    off = [call for call, state in calls if state == "off schema"]
    if len(off) < MIN_OFF:
        return
    faults = list(dict.fromkeys(fault for call in off for fault in _misfits(_arguments(call) or {})))[:MAX_FAULTS]
    follows = "a client that trusts the schema fails on them. "
    follows += {
        None: "Whether the draft is the reason is not known",
        "whole": "Without drafts the same call fits: drafting breaks tool calls",
    }.get(plain, "Without drafts the call does not fit either: the draft is not the reason")
    yield ServedFinding(
        id="tool-call-off-schema",
        severity="error" if plain == "whole" else "warning",
        seen=f"the arguments of {len(off)} of {len(calls)} required tool calls do not fit the tool's schema: "
        f"{'; '.join(faults)}, such as {_shown(off[0])}",
        follows=follows,
        next="try another parser of tool calls for this model (--tool-call-parser of vLLM and SGLang), or look for an "
        "option or a release that holds the schema",
    )


def _shown(call: ServedToolCall) -> str:
    return shorten(repr(call.arguments if call.arguments is not None else call.text), 80)


def _at_times(states: list[str], streamed_states: list[str], broken: ServedToolCall) -> Iterator[ServedFinding]:
    """A finding if calls of one form are both sound and broken."""
    for own in (states, streamed_states):
        if "whole" in own and "broken" in own:
            every = [*states, *streamed_states]
            seen = f"{every.count('broken')} of {len(every)} required tool calls are broken, such as {_shown(broken)}"
            yield ServedFinding(
                id="tool-call-broken",
                severity="warning",
                seen=seen,
                follows="calls are broken at times; whether the draft is the reason is not known",
                next="repeat the call with and without the draft; check the server's parser of tool calls",
            )
            return


def _broken(call: ServedToolCall, plain: str | None) -> Iterator[ServedFinding]:
    follows = {
        None: "whether the draft is the reason is not known",
        "whole": "without drafts the same call is sound: drafting breaks tool calls",
    }.get(plain, "without drafts the call is not sound either: the draft is not the reason")
    yield ServedFinding(
        id="tool-call-broken",
        severity="error" if plain == "whole" else "warning",
        seen=f"a required tool call came as {_shown(call)}",
        follows=follows,
        next="start the server without the draft and ask the same; check the server's parser of tool calls",
    )


def _stream(
    states: list[str], streamed_states: list[str], whole: ServedToolCall, streamed: ServedToolCall
) -> Iterator[ServedFinding]:
    if set(states) == {"whole"} and set(streamed_states) <= {"broken", "absent"}:
        yield ServedFinding(
            id="tool-call-stream-broken",
            severity="error",
            seen=f"the call in one piece has {_shown(whole)}, the streamed one {_shown(streamed)}",
            follows=f"the streaming parser {verb_of_stream(whole.letters, streamed.letters)} text; parsers that expect "
            "one token at a time do so with drafts. Whether the draft is the reason is not known",
            next="ask without streaming, and repeat without the draft; report it to the engine",
        )


def _drafted(session: QuestionSession, call: ServedToolCall, num_steps: int | None) -> Iterator[ServedFinding]:
    is_long, has_drafts = (call.num_tokens or 0) >= MIN_TOKENS, session.first.total.counts.num_drafts > 0
    if num_steps == 0 and is_long and has_drafts and session.drafts_usually():
        yield ServedFinding(
            id="tool-call-not-drafted",
            severity="warning",
            seen=f"no verify step in the {call.num_tokens} tokens of a required tool call",
            follows="the server decodes tool calls without the draft",
            next="expect the speed of plain decoding for such requests, or look for a release that drafts them",
        )
