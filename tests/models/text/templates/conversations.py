"""Conversations in the form of client requests, with the other variables of chat templates."""

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One request: its messages and the other variables."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    opens: bool = True  # with the text that opens the model's answer
    continues: bool = False  # the model continues the last message


def system(content: Any, **more: Any) -> Message:
    return {"role": "system", "content": content, **more}


def user(content: Any, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def result(content: Any, call: str = "call12345", **more: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call, **more}


def call(name: str, arguments: Any, call_id: str = "call12345") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def calls(*made: dict[str, Any], content: Any = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(made), **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def function(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    told = {"name": name, "description": f"Tells the {name}.", "parameters": schema}
    return {"type": "function", "function": told}


WEATHER = function(
    "weather",
    {"city": {"type": "string", "description": "a <city>"}, "days": {"type": "integer"}},
    "city",
)
NOW = function("now", {})
SEARCH = function(
    "search",
    {
        "kinds": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "where": {"type": "object", "additionalProperties": {"type": "number"}},
        "limit": {"type": ["integer", "null"], "default": None},
        "é": {"type": "boolean"},
    },
)
TOOLS = [WEATHER, NOW, SEARCH]
PARIS = call("weather", {"city": "Paris", "days": 2})
DOCUMENTS = [
    {"title": "Two", "text": "Grass is green and there is much of it in spring."},
    {"title": "One", "text": "The sky is blue."},
]
HI, THERE, MORE = user("Hi"), assistant("Hello there."), user("Tell me more")
ASKED = [HI, THERE, MORE]
CALLED = [user("Weather in Paris?"), calls(PARIS), result("22 degrees")]
THOUGHT = assistant("It is 4.", reasoning_content="2 + 2 makes 4")

_PLAIN = [
    Conversation([HI]),
    Conversation([HI], opens=False),
    Conversation(ASKED),
    Conversation(ASKED, opens=False),
    Conversation([HI, THERE], opens=False),
    Conversation([HI, THERE]),
    Conversation([system("Be kind."), HI]),
    Conversation([system("Be kind."), *ASKED]),
    Conversation([system("Be kind."), HI, THERE], opens=False),
    Conversation([system(" \n trimmed? \n"), user("  spaces  "), assistant("\n\nlines\n"), HI]),
    Conversation([HI, system("From now on in French."), MORE]),
    Conversation([HI, THERE, system("Stop."), MORE, assistant("No.")], opens=False),
    Conversation([system("One."), system("Two."), HI]),
    Conversation([system("Only this.")]),
    Conversation([HI, user("Still there?")]),
    Conversation([THERE, HI]),
    Conversation([user("")]),
    Conversation([system(""), user(""), assistant(""), user("x")]),
    Conversation([user("日本語 👋🏽 é \u200b \u0301 \u2028")]),
    Conversation([user("<b>&amp; \"quoted\" 'single' \\n {{ braces }} {% tag %}</b>")]),
    Conversation([user("a-b-c\td\r\ne"), assistant("x-y"), user("-" * 300)]),
    Conversation([HI, assistant("a\nb\n"), user("c\n\n\nd")]),
    Conversation([user("/no_think what is 2+2?"), assistant("4"), user("/think why?")]),
    Conversation([user(f"turn {i}") if i % 2 == 0 else assistant(f"turn {i}") for i in range(21)]),
    Conversation([user("https://example.com/?a=b&c=d www.example.com 12345678901234567890")]),
    Conversation([user("<tool_response>no</tool_response>")]),
]
_REASONING = [
    Conversation([HI, THOUGHT, MORE]),
    Conversation([HI, THOUGHT], opens=False),
    Conversation([HI, assistant("4", reasoning="two and two"), MORE]),
    Conversation([HI, assistant("4", thinking="two and two"), MORE]),
    Conversation([HI, assistant("4", reasoning="", reasoning_content="both"), MORE]),
    Conversation([HI, assistant("<think>\nhm\n</think>\n\n4"), MORE]),
    Conversation([HI, assistant("a</think>b<answer>c</answer>")], opens=False),
    Conversation([HI, calls(PARIS, reasoning_content="it asks"), result("22")], TOOLS),
    Conversation([HI, calls(PARIS, content="Let me see.", reasoning="it asks"), result("22")]),
    Conversation([HI, assistant(None, reasoning_content="only thoughts")], opens=False),
]
_TOOLS = [
    Conversation([HI], TOOLS),
    Conversation([system("Be kind."), HI], [WEATHER]),
    Conversation([system("Be kind."), *ASKED], [NOW], opens=False),
    Conversation(CALLED, TOOLS),
    Conversation(CALLED),
    Conversation([*CALLED, assistant("It is warm."), MORE], TOOLS),
    Conversation([HI, calls(PARIS, content="Let me look."), result("22")], TOOLS),
    Conversation([HI, calls(PARIS, content=""), result("22")], TOOLS),
    Conversation([HI, calls(call("now", {})), result("noon", name="now"), THERE, HI], [NOW]),
    Conversation(
        [HI, calls(PARIS, call("now", {}, "call67890")), result("22"), result("noon", "call67890")],
        TOOLS,
    ),
    Conversation(
        [HI, calls(call("search", {"kinds": ["a", "b"], "where": {"x": 1.5}, "é": True}))], TOOLS
    ),
    Conversation([HI, calls(call("search", {"limit": None, "é": "<é> & 'q' \"d\""})), result("")]),
    Conversation([*CALLED, calls(PARIS), result('{"degrees": 22}')], TOOLS, opens=False),
    Conversation([HI, calls(PARIS), result(parts("22", "degrees"))], TOOLS),
]
_PARTS = [
    Conversation([user(parts("one"))]),
    Conversation([user(parts("one", "two"))]),
    Conversation([system(parts("Be", "kind.")), user(parts("one", "two", ""))]),
    Conversation([HI, assistant(parts("Hello ", "there.")), user(parts("alone"))]),
    Conversation([user(parts("one", "two"))], TOOLS),
    Conversation([user(parts("Hi\n", "\n you")), assistant(parts("x"))], opens=False),
]
_MORE = [
    Conversation([user("Hi", name="ann"), assistant("Hello", name="bob"), user("Who?", name="cy")]),
    Conversation([system("Sir.", name="boss"), user("x")]),
    Conversation([user("Hi", weight=0.5, metadata={"a": [1, None]})]),
    Conversation([{"role": "developer", "content": "Be brief."}, HI]),
    Conversation([HI, {"role": "developer", "content": "Be brief."}, MORE]),
    Conversation([HI, {"role": "assistant"}, MORE]),
    Conversation([HI], kwargs={"documents": DOCUMENTS}),
    Conversation([HI], TOOLS, {"documents": DOCUMENTS, "citation_mode": "accurate"}),
    Conversation(ASKED, kwargs={"enable_thinking": False, "thinking": False}),
    Conversation([HI, THOUGHT, MORE], kwargs={"enable_thinking": True, "thinking": True}),
    Conversation([HI, THOUGHT, MORE], kwargs={"clear_thinking": False}),
    Conversation([HI], kwargs={"reasoning_effort": "high", "model_identity": "You are it."}),
    Conversation([HI], kwargs={"thinking_budget": 700, "date_string": "1 Jan 2030"}),
    Conversation([HI], kwargs={"thinking_budget": 0, "controls": {"length": "long"}}),
    Conversation([HI], TOOLS, {"tools_in_user_message": False, "nobody_asks": [1, {"a": None}]}),
    Conversation([HI], kwargs={"builtin_tools": ["search", "code_interpreter"]}),
]
_BEGUN = [
    Conversation(messages, tools, opens=False, continues=True)
    for messages, tools in (
        ([HI, assistant("Well, the")], None),
        ([HI, assistant("  blanks stay \n")], None),
        ([system("Be kind."), *ASKED, assistant('{"a": ')], None),
        ([HI, assistant(parts("one", "two "))], None),
        ([HI, THOUGHT, MORE, assistant("So", reasoning_content="hm")], None),
        ([*CALLED, assistant("It is")], TOOLS),
        ([HI, assistant("")], None),
        ([HI, user("Tell me a")], None),
    )
]
CONVERSATIONS = [*_PLAIN, *_REASONING, *_TOOLS, *_PARTS, *_MORE, *_BEGUN]
