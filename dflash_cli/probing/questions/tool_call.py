"""Ask for a tool call, in one piece and as a stream: are its arguments whole, and is it drafted?

A verify step commits several tokens at once. A parser that expects one token at a time then loses text of a stream.
Calls that are broken at times look like either fault in one pair of calls, so a broken call is followed by more.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_cli.probing.inference_server import MEASURED, Variant
from dflash_cli.probing.question import QUESTIONS, CountedCall, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.served_finding import ServedFinding
from dflash_cli.probing.tool_calls import ServedToolCall, find_protocol_faults
from dflash_runtime.checkpoint.strict_json import loads
from dflash_runtime.errors import RequestError
from dflash_runtime.phrases import shorten

ANSWER_LEN, MIN_TOKENS = 192, 16
MORE = (True, False, False, True)
"""Whether each further call is streamed. Each form comes first in turn, for faults of every second call."""
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
        raise NotJudged(f"no tool call within {ANSWER_LEN} tokens")
    states, streamed_states = [state], [streamed_state]
    if "broken" in (state, streamed_state) or (state, streamed_state) == ("whole", "absent"):
        for is_streamed in MORE:
            (streamed_states if is_streamed else states).append(_state(call(is_streamed=is_streamed).call))
    plain = None
    is_broken = "broken" in states and "whole" not in states
    if is_broken and session.server.can_switch_off:
        plain = _state(call(variant=Variant(is_plain=True)).call)
    words = {"whole": "sound", "broken": "broken", "cut": "not finished", "absent": "absent"}
    seen = f"call {words[state]}, streamed {words[streamed_state]}"
    findings = [
        *protocol,
        *_at_times(states, streamed_states, whole if state == "broken" else streamed),
        *(_broken(whole, plain) if is_broken else ()),
        *_stream(states, streamed_states, whole, streamed),
        *_drafted(session, whole, first.num_steps),
        *session.find_slow(
            "tool-call-slow", "a tool call", min(first.seconds, second.seconds), whole.num_tokens or ANSWER_LEN
        ),
    ]
    return Outcome(seen=seen, findings=findings)


def _state(call: ServedToolCall) -> str:
    """whole, broken, cut by the length limit, or absent: the model wrote something else."""
    if call.arguments is not None and call.name == NAME and _fits(call.arguments):
        return "whole"
    if call.finish_reason == "length":
        return "cut"
    is_in_text = NAME in call.text and all(name in call.text for name in REQUIRED)
    return "broken" if call.arguments is not None or is_in_text else "absent"


def _fits(arguments: str) -> bool:
    try:
        value = loads(arguments.encode())
    except ValueError:
        return False
    return isinstance(value, dict) and all(name in value for name in REQUIRED)


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
            follows="the streaming parser loses text; parsers that expect one token at a time do so with drafts. "
            "Whether the draft is the reason is not known",
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
