"""The one place where Jinja environments are made: sandboxed, bounded, and marking what the template itself wrote.

A chat template is code from a model file, so it runs in jinja2's immutable sandbox with, on top: every loop turn, call and
operation counted; results bounded before they are made (`"a" * 10**9`, `center`, `replace`, huge powers, nested lists that
compare for ever); only the filters and attributes templates use; and literals compiled into `Marked` strings. Rendering in
the caller's process cannot be interrupted from outside, so each primitive must be short by itself. Used by `template.py`.
"""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from jinja2 import filters as jinja_filters
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from .marked import LimitReached, Marked, concat, current_budget, from_template

__all__ = ["ChatEnvironment", "TemplateRefusal", "weigh"]

MAX_LIST: Final = 100_000
MAX_INT_BITS: Final = 4_096


class TemplateRefusal(Exception):
    """The template called raise_exception: it refuses these messages, in its own words."""


def weigh(value: Any) -> int:
    """Characters and members of a value, counted through all levels; refuses what is too large to print or compare.

    Containers the caller passed in have been weighed before; only those a template made can share members and explode.
    """
    budget = current_budget()
    limit, total, stack = 4 * budget.chars + 1_000_000, 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item) + 2
        elif isinstance(item, (list, tuple, set, frozenset, Mapping)):
            known = budget.inputs.get(id(item))
            if known is not None:
                total += known
            else:
                total += 16 * (len(item) + 1)
                if total <= limit:
                    stack.extend(item)
                    stack.extend(item.values() if isinstance(item, Mapping) else ())
                    budget.tick(1 + len(item) // 16)
        elif isinstance(item, range):
            total += 8 * len(item)
        else:
            total += 8
        if total > limit:
            raise LimitReached(f"it makes a value of more than {limit:,} characters and members")
    return total


def _text(value: Any) -> str:
    """str() of any value, weighed first."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (int, float, type(None), Undefined)):
        budget = current_budget()
        budget.fits(weigh(value) if isinstance(value, (list, tuple, set, frozenset, Mapping, range)) else 0)
    return str(value)


class _Counted:
    """An iterable whose turns are counted; keeps its length, which loop.last and loop.length ask for."""

    def __init__(self, items: Any):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        tick = current_budget().tick
        for item in self._items:
            tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)


# compiling ---------------------------------------------------------------------------------------------------------------


class _Bounds(NodeTransformer):
    """Routes loops, comparisons, slices and dictionary keys through the environment's checks."""

    def __init__(self, environment: ChatEnvironment):
        self._environment = environment

    def _call(self, name: str, node: Any) -> Any:
        if isinstance(node, nodes.Const):
            return node
        place = {"lineno": node.lineno, "environment": self._environment}
        return nodes.Call(nodes.EnvironmentAttribute(name, **place), [node], [], None, None, **place)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[assignment]
        node.iter = self._call("counted", node.iter)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[assignment]
        node.expr = self._call("comparable", node.expr)
        for operand in node.ops:
            operand.expr = self._call("comparable", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[assignment]
        return self._call("sliced", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[assignment]
        for pair in node.items:
            pair.key = self._call("comparable", pair.key)
        return node


class _MarkingGenerator(CodeGenerator):
    """Writes every literal text of the template as `environment.own(…)`, and `~` as a joining that keeps marks."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(map(str, group))!r})"

    def visit_Const(self, node: nodes.Const, frame: Any) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Any) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


# run time ----------------------------------------------------------------------------------------------------------------


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_width(format_spec)
        return format(value if isinstance(value, (int, float)) else _text(value), format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        weigh(value)
        return super().convert_field(value, conversion)


def _check_width(spec: str) -> None:
    if re.search(r"\d{5}|\*", spec):
        raise LimitReached("it formats to a width of 10,000 characters or more")


_STR_METHODS: Final = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace "
    "rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill".split()
)
_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, _STR_METHODS),
    (Mapping, frozenset(("items", "keys", "values", "get", "copy"))),
    (list, frozenset(("index", "count", "copy"))),
    (tuple, frozenset(("index", "count"))),
    (LoopContext, frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0", "previtem",
                             "nextitem", "cycle", "changed"))),
    (Cycler, frozenset(("next", "current", "reset"))),
)  # fmt: skip


class _TemplateNamespace(Namespace):
    """`namespace()`, which refuses attributes that begin with an underscore (they reach into Python)."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("attributes that begin with an underscore cannot be set")
        super().__setitem__(name, value)


def _namespace(*args: Any, **values: Any) -> Namespace:
    space = _TemplateNamespace()
    for name, value in dict(*args, **values).items():
        space[str(name)] = value
    return space


def _raise_exception(message: Any = "") -> None:
    raise TemplateRefusal(_text(message)[:1000])


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"%[^A-Za-z%]*\d", form):
        raise LimitReached("it asks for a date format with widths")
    return datetime.now().strftime(form)


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > current_budget().max_steps:
        raise LimitReached(f"range({', '.join(map(str, args))[:80]}) has more than {current_budget().max_steps:,} members")
    return numbers


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of all chat templates. Options as transformers sets them: blocks trimmed, loop controls, no escaping."""

    code_generator_class = _MarkingGenerator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_text,
            optimized=False,
            autoescape=False,
        )
        self.filters = _bounded_filters()
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _bounded(test, deep=True) for name, test in tests.items()}
        self.globals = {
            "range": _range,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.own = functools.lru_cache(maxsize=4096)(from_template)  # a template has few literals, used again and again

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Bounds(self).visit(tree)

    def counted(self, items: Any) -> Any:
        """The iterable of a loop, each turn counted."""
        return items if isinstance(items, Undefined) else _Counted(items)

    def comparable(self, value: Any) -> Any:
        """An operand of a comparison: containers are weighed, because comparing shared ones can take for ever."""
        if isinstance(value, (list, tuple, dict)):
            weigh(value)
        return value

    def sliced(self, value: Any) -> Any:
        """The result of a slice, counted."""
        if isinstance(value, str):
            return value if isinstance(value, Marked) else Marked(value)
        current_budget().tick(1 + len(value) // 16)
        return value

    def joined(self, items: Iterable[Any]) -> Marked:
        """The `~` operator."""
        current_budget().tick()
        return concat([_text(item) for item in items])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, bounded before it is done."""
        budget = current_budget()
        budget.tick()
        texts = isinstance(left, str), isinstance(right, str)
        if operator == "+" and all(texts):
            return concat((left, right))
        if operator == "*" and any(texts):
            text, times = (left, right) if texts[0] else (right, left)
            return (text if isinstance(text, Marked) else Marked(text)) * times
        if operator == "%" and texts[0]:
            return _percent(left, right)
        sizes = [len(side) if isinstance(side, (list, tuple)) else None for side in (left, right)]
        if operator == "+" and None not in sizes:
            budget.tick(1 + (sizes[0] + sizes[1]) // 16)  # type: ignore[operator]
        elif operator == "*" and any(size is not None for size in sizes):
            times = right if sizes[0] is not None else left
            if isinstance(times, int) and times * (sizes[0] or sizes[1] or 0) > MAX_LIST:
                raise LimitReached(f"it makes a list of more than {MAX_LIST:,} members")
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INT_BITS:
                raise LimitReached(f"it makes a number of more than {MAX_INT_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template: counted; methods of texts go through `Marked`, which bounds them."""
        current_budget().tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, LoopContext) and args:
            args = (self.counted(args[0]), *args[1:])
        elif isinstance(obj, types.BuiltinMethodType) and isinstance(owner, str):
            obj = getattr(Marked(owner), obj.__name__)
        elif isinstance(owner, (list, tuple, dict)):
            for value in (owner, *args):
                self.comparable(value) if obj.__name__ in ("index", "count", "get") else None
        return super().call(context, obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscripts; a key is weighed before it is hashed."""
        return super().getitem(obj, self.comparable(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Attributes of texts and containers: only the methods templates use."""
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return not isinstance(obj, (int, float, bytes, range, type)) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`text.format(…)`: sandboxed, with bounded widths; plain `{}` holes keep the marks."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or getattr(value, "__name__", "") not in ("format", "format_map"):
            return None
        by_name = value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            try:
                if args and not kwargs and not by_name:
                    return (owner if isinstance(owner, Marked) else Marked(owner))._fill("{}", [_text(v) for v in args])
            except ValueError:
                pass
            _check_width(owner)
            values = args[0] if by_name else kwargs
            return Marked(_Formatter(self).vformat(owner, () if by_name else args, values))

        return bounded


def _percent(text: str, values: Any) -> Marked:
    values = values if isinstance(values, (tuple, Mapping)) else (values,)
    weigh(list(values.values()) if isinstance(values, Mapping) else values)
    marked = text if isinstance(text, Marked) else Marked(text)
    if isinstance(values, tuple):
        try:
            return marked._fill("%s", values)
        except ValueError:
            pass
    _check_width(text)
    return Marked(str.__mod__(str.__str__(text), values))


# filters -----------------------------------------------------------------------------------------------------------------

_SHALLOW: Final = "batch count d default first items last length list map reject rejectattr reverse select selectattr slice"
_DEEP: Final = (
    "abs capitalize dictsort e escape float groupby int lower max min sort title trim truncate unique upper urlencode wordcount"
)


def _bounded(function: Callable[..., Any], deep: bool) -> Callable[..., Any]:
    """A filter or test, counted; arguments weighed if it looks into them; results that are texts or generators bounded."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.tick()
        for value in (*args, *kwargs.values()):
            if isinstance(value, range):
                budget.tick(len(value))
            elif isinstance(value, (list, tuple, dict)):
                weigh(value) if deep else budget.tick(len(value) // 64)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            return result if isinstance(result, Marked) else Marked(result)
        return _Counted(result) if isinstance(result, types.GeneratorType) else result

    return run


def _int_up_to(value: Any, limit: int, what: str) -> int:
    if not isinstance(value, int) or value > limit:
        raise LimitReached(f"it uses {what} of more than {limit:,}")
    return value


def _center(value: Any, width: int = 80) -> Marked:
    return Marked(_text(value)).center(_int_up_to(width, current_budget().chars, "a width"))


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Marked:
    text = _text(value)
    pad = width if isinstance(width, str) else " " * _int_up_to(width, 1000, "a width")
    current_budget().fits(len(text) + (text.count("\n") + 1) * len(pad))
    lines = (text if isinstance(text, Marked) else Marked(text)).split("\n")
    padded = [line if not (n or first) or not (line or blank or not n) else concat((pad, line)) for n, line in enumerate(lines)]
    return Marked("\n").join(padded)


def _join(value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> Marked:
    weigh(value) if isinstance(value, (list, tuple, dict)) else None
    if attribute is not None:
        value = [item[attribute] if isinstance(item, Mapping) else getattr(item, "", Undefined(name=str(attribute))) for item in value]
    separator = _text(d)
    marked = separator if isinstance(separator, Marked) else Marked(separator)
    return marked.join(_text(item) for item in value)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> Marked:
    text = _text(value)
    return (text if isinstance(text, Marked) else Marked(text)).replace(_text(old), _text(new), -1 if count is None else count)


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    return jinja_filters.do_round(value, _int_up_to(precision, 30, "a precision"), method)  # type: ignore[arg-type]


def _sum(value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise TypeError("sum adds numbers only")
    items = [item[attribute] for item in value] if attribute is not None else value
    return sum((item for item in items if isinstance(item, (int, float))), start)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> Marked:
    """JSON as transformers writes it for templates: no HTML escaping, non-ASCII kept."""
    if indent is not None:
        indent = indent[:16] if isinstance(indent, str) else _int_up_to(indent, 16, "an indent")
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    current_budget().fits(weigh(value) // 16 * (2 if indent is None else 4))
    separators = tuple(separators) if separators is not None else None
    return Marked(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))


def _string(value: Any) -> str:
    return _text(value)


def _format(value: Any, *args: Any, **kwargs: Any) -> Marked:
    return _percent(_text(value), kwargs or args)


def _bounded_filters() -> dict[str, Callable[..., Any]]:
    table = {name: _bounded(jinja_filters.FILTERS[name], deep=False) for name in _SHALLOW.split()}
    table |= {name: _bounded(jinja_filters.FILTERS[name], deep=True) for name in _DEEP.split()}
    for name in ("batch", "slice"):
        table[name] = _bounded(_with_small_count(jinja_filters.FILTERS[name]), deep=False)
    own: dict[str, Callable[..., Any]] = {
        "center": _center, "format": _format, "indent": _indent, "join": _join, "replace": _replace, "round": _round,
        "safe": _string, "string": _string, "sum": _sum, "tojson": _tojson,
    }  # fmt: skip
    return table | {name: _bounded(function, deep=False) for name, function in own.items()}


def _with_small_count(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(value: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        return function(value, _int_up_to(count, 1000, "a group size"), *args, **kwargs)

    return run
