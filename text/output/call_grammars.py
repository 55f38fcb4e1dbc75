"""Grammars (Lark) that hold a model to its family's form of tool calls, with arguments that fit the tools' schemas.

`lazy` gives what follows each marker: an answer is free text until it opens a call, and then the call is held. `required` gives whole answers
of one call or several. Markers that are special tokens are written as their ids, others as text. A schema that a form cannot hold (raw text
in XML forms has no pattern, a Python call no `anyOf` of arguments) raises `Unheld`; schemas that the library cannot hold are found when it compiles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .formats import FORMATS
from .forms import DEEPSEEK, KIMI

__all__ = ["Lexicon", "Trigger", "Unheld", "lazy", "required"]

BLANK: Final = r"/[ \t\n\r]{1,8}/"
ANYTHING: Final = r"/(.|\n)*/"
COMMA: Final = '", "'
SEMICOLON: Final = 'WS? ";" WS?'
LINE: Final = r'"\n"'
PYTHON_ESCAPES: Final = '"\\nrt'  # of JSON strings that Python reads alike
Raw = Mapping[str, tuple[str, str]]
NO_RAW: Final[Raw] = {}
CONSTRAINED: Final = ("pattern", "minLength", "maxLength", "format", "not", "allOf", "oneOf", "contentEncoding")


class Unheld(ValueError):
    """This form cannot hold such a schema."""


@dataclass(frozen=True)
class Trigger:
    """What opens a call. marker: the text; keep: characters at its end that belong to the grammar; source: the grammar of what follows. head: a regular
    expression of what only a call says: before that, the marker may be prose; "": the marker alone is enough. at_start: the marker counts
    only where the answer starts."""

    marker: str
    keep: int
    source: str
    head: str = ""
    at_start: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Lexicon:
    """Texts that are special tokens of a model: text -> id. ends: ids that end an answer, which no call can hold."""

    specials: Mapping[str, int]
    ends: Collection[int] = ()

    def __call__(self, text: str) -> str:
        """A text as Lark terms."""
        terms, names = [], sorted((s for s in self.specials if s in text), key=len, reverse=True)
        pieces = re.split("(" + "|".join(re.escape(n) for n in names) + ")", text) if names else [text]
        for piece in pieces:
            if piece in self.specials:
                terms += [] if self.specials[piece] in self.ends else [f"<[{self.specials[piece]}]>"]
            elif piece:
                terms.append(json.dumps(piece, ensure_ascii=False))
        return " ".join(terms)


class _Rules:
    """A grammar in the making. schemas: name -> schema of the parameters; raw: functions whose input is a text: name -> (lark or regex,
    definition)."""

    def __init__(self, schemas: Mapping[str, Any], words: Lexicon, one: bool, raw: Raw):
        self.schemas, self.words, self.one, self.raw = schemas, words, one, raw
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """A rule; its name."""
        self._rules[name] = body
        return name

    def source(self, start: str) -> str:
        """The whole grammar, in the library's own JSON: grammars of others stand beside it."""
        lark = "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items()), f"WS: {BLANK}"])
        made = [{"name": "calls", "lark_grammar": lark}]
        for number, (syntax, definition) in enumerate(self.raw.values()):
            lark = _lark_of(definition) if syntax == "regex" else definition
            made.append({"name": f"raw_{number}", "lark_grammar": lark})
        return json.dumps({"grammars": made}, ensure_ascii=False)

    def json(self, name: str, schema: Any, top: Any, escapes: str | None = None) -> str:
        """A rule of JSON that fits a schema, which is a part of `top`."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        options = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]{0,8}"}
        if escapes is not None:
            options["json_allowed_escapes"] = escapes
        shared = {key: top[key] for key in ("$defs", "definitions") if isinstance(top, Mapping) and key in top}
        held = {**shared, **schema, "x-guidance": options}
        return self.add(name, "%json " + json.dumps(held, ensure_ascii=False))

    def each(self, make: Callable[[int, str, Any], str]) -> str:
        """A rule: one call of any function; make(number, name, schema) -> its terms."""
        for i, (name, schema) in enumerate(self.schemas.items()):
            self.add(f"call_{i}", make(i, name, schema))
        return self.add("call", " | ".join(f"call_{i}" for i in range(len(self.schemas))))

    def arguments(self, i: int, schema: Any) -> str:
        """A rule: the arguments as JSON."""
        return self.json(f"args_{i}", {**schema, "type": "object"}, schema)

    def named(self, *keys: str) -> str:
        """A rule: {"name": …, "arguments": …}, or one of these keys."""
        key = " | ".join(json.dumps(json.dumps(key)) for key in keys or ("arguments",))

        def make(i: int, name: str, schema: Any) -> str:
            if name in self.raw:
                number = list(self.raw).index(name)
                return f"{json.dumps(f'<custom name={json.dumps(name)}>')} @raw_{number} {json.dumps('</custom>')}"
            head = f'"{{" WS? "\\"name\\"" WS? ":" WS? {json.dumps(json.dumps(name))} WS? ","'
            return f'{head} WS? ({key}) WS? ":" WS? {self.arguments(i, schema)} WS? "}}"'

        return self.each(make)

    def list(self) -> str:
        """Terms: [{"name": …, "arguments": …}, …]"""
        call = self.named()
        return f'"[" WS? {call} WS? "]"' if self.one else f'"[" WS? {call} (WS? "," WS? {call})* WS? "]"'

    def many(self, call: str, between: str = "WS?") -> str:
        """Terms: the rule once, or also several times."""
        return call if self.one else f"{call} ({between} {call})*"


def _lark_of(pattern: str) -> str:
    """A regular expression as Lark, quoted by the library."""
    from llguidance import LLMatcher

    return str(json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]) if pattern else 'start: ""'


def _parameters(rules: _Rules, i: int, schema: Any, before: Callable[[str], str], after: str) -> str:
    """Terms: arguments one by one as raw text or JSON, in the order of the schema; those that must be there, are. before(key): terms."""
    properties, needed = _properties(schema)
    terms = []
    for k, (key, part) in enumerate(properties.items()):
        value = _raw_value(rules, f"value_{i}_{k}", part, schema, after)
        terms.append(f"({before(key)} {value} WS?)" + ("" if key in needed else "?"))
    return " ".join(terms)


def _properties(schema: Any) -> tuple[Mapping[str, Any], set[str]]:
    if any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "if", "not", "patternProperties", "minProperties", "dependentRequired")):
        raise Unheld("this form writes arguments one by one, and cannot hold a schema of alternatives")
    properties, needed = schema.get("properties") or {}, set(schema.get("required") or ())
    if not isinstance(properties, Mapping) or not needed <= set(properties):
        raise Unheld("an argument is required that is not among the properties")
    if any(re.search(r"[<>\s\"=]", key) for key in properties):
        raise Unheld("the name of an argument holds markup")
    return properties, needed


def _raw_value(rules: _Rules, name: str, schema: Any, top: Any, after: str) -> str:
    """Terms: a value up to its closing marker. Strings are raw text, everything else is JSON."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = {kinds} if isinstance(kinds, str) else set(kinds or ())
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        if any(c != c.strip() or after in c for c in choices):
            raise Unheld("a choice has blanks around it")
        rules.add(name, " | ".join(rules.words(c) or '""' for c in choices))
        line = r'"\n"?' if after == "</parameter>" else ""  # which belongs to the markup, in those forms
        return f"{line} {name} {line} {rules.words(after)}"
    if choices is None and (not allowed or "string" in allowed):
        if isinstance(schema, Mapping) and any(key in schema for key in CONSTRAINED):
            raise Unheld("raw text has no pattern and no length")
        if rules.words(after).startswith("<["):
            return f"{rules.add(name.upper(), ANYTHING)} {rules.words(after)}"
        return rules.add(f"{name}[suffix={json.dumps(after)}]", ANYTHING).partition("[")[0]
    return f"WS? {rules.json(name, schema, top)} WS? {rules.words(after)}"


# forms --------------------------------------------------------------------------------------------------------------------

Body = Callable[[_Rules, str], str]
"""(rules, marker) -> terms of what follows a marker."""


def _hermes(rules: _Rules, marker: str) -> str:
    return f"WS? {rules.named()} WS? {rules.words('</tool_call>')}"


def _llama3(rules: _Rules, marker: str) -> str:
    return f"WS? {rules.many(rules.named('parameters', 'arguments'), SEMICOLON)}"


def _pythonic(rules: _Rules, marker: str) -> str:
    def make(i: int, name: str, schema: Any) -> str:
        properties, needed = _properties(schema)
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name) or not all(key.isidentifier() for key in properties):
            raise Unheld("this name is none in Python")
        first, later = '")"', '")"'  # what may follow before the first argument, and after one
        for k, (key, part) in reversed(list(enumerate(properties.items()))):
            value = f'"{key}=" {_python_value(rules, f"value_{i}_{k}", part, schema)} {rules.add(f"later_{i}_{k}", later)}'
            first = value if key in needed else f"{value} | {rules.add(f'first_{i}_{k}', first)}"
            later = f'", " {value}' if key in needed else f'", " {value} | {rules.add(f"skip_{i}_{k}", later)}'
        return f"{json.dumps(name + '(')} {rules.add(f'rest_{i}', first)}"

    call = rules.each(make)
    end = rules.words("<|python_end|>") if marker.startswith("<") else ""
    return f'"[" {rules.many(call, COMMA)} "]" {end}'


def _python_value(rules: _Rules, name: str, schema: Any, top: Any) -> str:
    """A rule: Python's own words where they differ from JSON; what is inside of lists and objects is JSON, which reads alike."""
    kind = schema.get("type") if isinstance(schema, Mapping) and not {"enum", "const", *CONSTRAINED} & set(schema) else None
    if kind == "boolean":
        return rules.add(name, '"True" | "False" | "true" | "false"')
    json_value = rules.json(name, schema, top, PYTHON_ESCAPES)
    if kind == "string":
        rules.add("QUOTED", r"/'([^'\\\r\n\x00]|\\['\\\\nrt])*'/")
        return rules.add(f"{name}_any", f"{json_value} | QUOTED")
    return json_value


def _mistral(rules: _Rules, marker: str) -> str:
    listed = rules.list()
    named = [f"{json.dumps(name)} {rules.words('[ARGS]')} args_{i}" for i, name in enumerate(rules.schemas)]
    return f"WS? ({listed} | {' | '.join(named)})"


def _deepseek(rules: _Rules, marker: str, fenced: bool) -> str:
    _, begin, separator, call_end, end = (rules.words(text) for text in DEEPSEEK)

    def make(i: int, name: str, schema: Any) -> str:
        if fenced:
            return f'{begin} "function" {separator} {json.dumps(name)} "\\n```json\\n" {rules.arguments(i, schema)} "\\n```" {call_end}'
        return f"{begin} {json.dumps(name)} {separator} {rules.arguments(i, schema)} {call_end}"

    return f"WS? {rules.many(rules.each(make))} WS? {end}"


def _kimi(rules: _Rules, marker: str) -> str:
    _, begin, arguments, call_end, end = (rules.words(text) for text in KIMI)
    rules.add("NUMBER", "/:[0-9]{1,3}/")
    call = rules.each(
        lambda i, name, schema: f"{begin} {json.dumps('functions.' + name)} NUMBER {arguments} {rules.arguments(i, schema)} {call_end}"
    )
    return f"WS? {rules.many(call)} WS? {end}"


def _qwen3_coder(rules: _Rules, marker: str) -> str:
    def make(i: int, name: str, schema: Any) -> str:
        inner = _parameters(rules, i, schema, lambda key: rules.words(f"<parameter={key}>"), "</parameter>")
        return f"{rules.words(f'<function={name}>')} WS? {inner} {rules.words('</function>')}"

    return f"WS? {rules.each(make)} WS? {rules.words('</tool_call>')}"


def _glm(rules: _Rules, marker: str) -> str:
    def make(i: int, name: str, schema: Any) -> str:
        inner = _parameters(rules, i, schema, lambda key: f"{rules.words(f'<arg_key>{key}</arg_key>')} WS? {rules.words('<arg_value>')}", "</arg_value>")
        return f"{json.dumps(name)} WS? {inner} {rules.words('</tool_call>')}"

    return f"WS? {rules.each(make)}"


def _minimax(rules: _Rules, marker: str) -> str:
    if marker == "<tool_calls>":
        return f"WS? {rules.many(rules.named(), LINE)} WS? {rules.words('</tool_calls>')}"

    def make(i: int, name: str, schema: Any) -> str:
        inner = _parameters(rules, i, schema, lambda key: rules.words(f'<parameter name="{key}">'), "</parameter>")
        return f"{rules.words(f'<invoke name={json.dumps(name)}>')} WS? {inner} {rules.words('</invoke>')}"

    return f"WS? {rules.many(rules.each(make))} WS? {rules.words('</minimax:tool_call>')}"


def _list(rules: _Rules, marker: str) -> str:
    return f"WS? {rules.list()}"


def _phi(rules: _Rules, marker: str) -> str:
    return f"WS? {rules.list()} WS? {rules.words('<|/tool_call|>')}" if marker.startswith("<") else rules.list()


def _harmony(rules: _Rules, marker: str) -> str:
    def make(i: int, name: str, schema: Any) -> str:
        constrained = f'" "? {rules.words("<|constrain|>")} "json"'
        return f"{json.dumps(name)} ({constrained})? {rules.words('<|message|>')} {rules.arguments(i, schema)}"

    return rules.each(make)


_BODIES: Final[dict[str, Body]] = {
    "hermes": _hermes,
    "qwen3-coder": _qwen3_coder,
    "llama3-json": _llama3,
    "llama-pythonic": _pythonic,
    "mistral": _mistral,
    "deepseek-v3": lambda rules, marker: _deepseek(rules, marker, True),
    "deepseek-v3.1": lambda rules, marker: _deepseek(rules, marker, False),
    "glm4.5": _glm,
    "kimi-k2": _kimi,
    "minimax": _minimax,
    "phi": _phi,
    "granite": _list,
    "gpt-oss": _harmony,
}
_KEEP: Final = {"functools[": 1, "{": 1, "[": 1}  # markers whose last character is the call's own
_NAMED: Final = r'"name"\s*:\s*"(?:[^"\\]|\\.)*"'
_HEADS: Final = {
    "hermes": _NAMED + '|<custom name="[^"]*">',
    "qwen3-coder": "<function=[^>]*>",
    "llama3-json": _NAMED + r'\s*,\s*"(?:parameters|arguments)"\s*:',
    "llama-pythonic": r"\(",
    "mistral": _NAMED + r"|\[ARGS\]",
    "deepseek-v3": DEEPSEEK[2],
    "deepseek-v3.1": DEEPSEEK[2],
    "glm4.5": "<arg_key>|</tool_call>",
    "kimi-k2": re.escape(KIMI[2]),
    "minimax": _NAMED + '|<invoke name="[^"]*">',
    "phi": _NAMED,
    "granite": _NAMED,
    "gpt-oss": r"<\|message\|>",
}
_ONE_REGION: Final = ("llama3-json", "llama-pythonic", "deepseek-v3", "deepseek-v3.1", "kimi-k2", "phi", "granite", "gpt-oss")


def lazy(format: str, schemas: Mapping[str, Any], words: Lexicon, one: bool, raw: Raw = NO_RAW) -> list[Trigger]:
    """What opens a call in this form, and what must follow. one: a region holds one call; raw: of the hermes form. Raises Unheld."""
    found = []
    for marker in FORMATS[format].markers:
        rules = _Rules(schemas, words, one, raw)
        source = rules.source(_BODIES[format](rules, marker))
        head = "" if any(special in marker for special in words.specials) else _HEADS[format]
        found.append(Trigger(marker, _KEEP.get(marker, 0), source, head, len(marker) == 1))
    return found


def required(
    format: str, schemas: Mapping[str, Any], words: Lexicon, one: bool, template: str, otherwise: Sequence[Any] = (), raw: Raw = NO_RAW
) -> str:
    """A grammar: a call, or several, and nothing else. template: tells which of a form's markers the model knows. otherwise: a JSON schema that
    the answer may fit instead. Raises Unheld."""
    markers = FORMATS[format].markers
    known = [marker for marker in markers if len(marker) > 1 and marker in template]
    bare = [marker for marker in markers if len(marker) == 1]
    marker = (bare or known or list(markers))[0] if format != "gpt-oss" else markers[-1]
    rules = _Rules(schemas, words, one, raw)
    body = _BODIES[format](rules, marker)
    keep = _KEEP.get(marker, 0)
    opening = rules.words(marker[: len(marker) - keep])
    region = rules.add("region", f"{opening} {body}")
    calls = region if format in _ONE_REGION else rules.many(region)
    start = f"WS? {calls}"
    for schema in otherwise:
        start = f"{start} | WS? {rules.json('answer', schema, schema)}"
    return rules.source(start)
