"""What models write when they call tools, as recorded from them, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from router.tools.parser import CallParser
from router.tools.parts import ParsedPiece, Part, WholeAnswer, whole_answer
from router.tools.registry import FORMATS

NAMES = frozenset({"get_weather", "get_current_temperature", "add"})


@dataclass(frozen=True)
class Recorded:
    form: str
    text: str
    content: str
    calls: tuple[tuple[str, str], ...]


def pushed(form: str, pieces: list[str], max_calls: int = 0) -> tuple[Part, ...]:
    numbers = count()
    parser = CallParser(FORMATS[form], NAMES, max_calls, lambda: f"call_{next(numbers)}")
    parts: tuple[Part, ...] = ()
    for piece in pieces:
        parts += parser.push(piece)
    return parts + parser.flush()


def read(form: str, pieces: list[str], max_calls: int = 0) -> WholeAnswer:
    return whole_answer([ParsedPiece("", 0, None, pushed(form, pieces, max_calls))])


def told(answer: WholeAnswer) -> tuple[str, tuple[tuple[str, str], ...]]:
    return answer.content, tuple((call.name, call.arguments) for call in answer.calls)


_DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"location": "杭州"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
    '{"location": "北京"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
RECORDED = {
    "Qwen 2.5": Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris", "days": [1, 2.5e1, -0], "now": true, "x": null}}\n'
        "</tool_call>",
        "",
        (
            ("get_current_temperature", '{"location": "San Francisco, CA, USA"}'),
            ("get_weather", '{"location": "Paris", "days": [1, 2.5e1, -0], "now": true, "x": null}'),
        ),
    ),
    "Hermes 2 Pro, arguments first": Recorded(
        "hermes",
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n</tool_call>\n',
        "",
        (("get_stock_fundamentals", '{"symbol": "TSLA"}'),),
    ),
    "Qwen 3, text before": Recorded(
        "hermes",
        'Let me look that up.\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "Let me look that up.",
        (("add", '{"a": 1, "b": 2}'),),
    ),
    "Llama 3.1": Recorded(
        "llama3", '{"name": "get_weather", "parameters": {"city": "Seattle"}}', "", (("get_weather", '{"city": "Seattle"}'),)
    ),
    "Llama 3.2, several": Recorded(
        "llama3",
        '{"type": "function", "name": "add", "parameters": {"a": "1", "b": "2"}}; {"name": "get_weather", "parameters": {}}',
        "",
        (("add", '{"a": "1", "b": "2"}'), ("get_weather", "{}")),
    ),
    "Llama 3.1, tagged": Recorded(
        "llama3",
        'I will look.<|python_tag|>{"name": "find", "parameters": {"q": "x"}}',
        "I will look.",
        (("find", '{"q": "x"}'),),
    ),
    "Mistral 7B v0.3": Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "add", "arguments": {"a": 1}}]',
        "",
        (("get_weather", '{"city": "Paris"}'), ("add", '{"a": 1}')),
    ),
    "Mistral Small 3.1": Recorded(
        "mistral",
        '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]add{"a": {"b": []}}',
        "",
        (("get_weather", '{"city": "Paris"}'), ("add", '{"a": {"b": []}}')),
    ),
    "Mistral Small 3.2": Recorded(
        "mistral",
        'Sure. [TOOL_CALLS]get_weather[CALL_ID]d9f2XkLm1[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{}',
        "Sure.",
        (("get_weather", '{"city": "Paris"}'), ("add", "{}")),
    ),
    "DeepSeek V3": Recorded(
        "deepseek", _DEEPSEEK_V3, "", (("get_weather", '{"location": "杭州"}'), ("get_weather", '{"location": "北京"}'))
    ),
    "DeepSeek R1, outer marks left out": Recorded(
        "deepseek",
        'I check.\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
        "I check.",
        (("add", '{"a": 1}'),),
    ),
    "DeepSeek V3.1": Recorded(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        (("add", '{"a": 1}'), ("get_weather", "{}")),
    ),
}
