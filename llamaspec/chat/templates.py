"""Render a conversation with the chat template that a GGUF file carries.

The template is a program from the internet and the messages are text from anybody, so two things are kept apart here:

- The template runs in Jinja's sandbox, with a limit on loops, on sizes and on time.
- Control tokens count only where the template wrote them. Text in a message that spells one ("<|im_end|>") comes back
  as a piece of its own, marked as plain text.

The second is done with sentinels: before rendering, each control token spelled in a message is replaced by one
private-use character that occurs nowhere else. One character survives trimming, splitting and slicing. Afterwards the
text is cut at the sentinels and they turn back into what they stood for.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, Literal, NoReturn, TypedDict

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llamaspec.errors import UsageError

Role = Literal["system", "user", "assistant", "tool"]

_ROLES = ("system", "user", "assistant", "tool")
_RESERVED = ("bos_token", "eos_token", "raise_exception")
_FILE = "<chat template>"

_MAX_STEPS = 1_000_000
_MAX_SECONDS = 10.0
_MAX_SIZE = 16_000_000
_MAX_BITS = 4096

_SYSTEM_MOVED = "The chat template takes no system message; its text was put into a user message."
_TURNS_JOINED = "The chat template does not take these roles in this order; messages of one role in a row were joined."


class Message(TypedDict):
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text.

    Attributes:
        text: the text, never empty.
        special: whether control tokens spelled in it are control tokens. False: plain text, whatever it spells.
    """

    text: str
    special: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model is to read it.

    Attributes:
        pieces: the text in pieces, to be tokenized one by one; a single one unless a message spells a control token.
        text: the pieces joined.
        starts_with_bos: whether the template itself wrote the beginning-of-text token.
        notices: sentences about what was changed or left out to make the conversation fit the template.
    """

    pieces: tuple[Piece, ...]
    text: str
    starts_with_bos: bool
    notices: tuple[str, ...] = ()


class _RefusedError(TemplateError):
    """The template called raise_exception."""


class _LimitError(TemplateError):
    """The template asked for too much work or too much text."""


class _RenderError(Exception):
    """A rendering failed; the message is what to tell the user."""


@dataclass(frozen=True)
class _Turn:
    role: str
    content: str

    @property
    def blank(self) -> bool:
        return not self.content.strip()


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text, as in a GGUF file's `tokenizer.chat_template`.
        bos_token: the text of the beginning-of-text token, or "".
        eos_token: the text of the end-of-text token, or "".
        special_tokens: the texts of all control tokens. Blank ones are ignored.

    Raises:
        UsageError: the template does not compile.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str, special_tokens: Sequence[str]) -> None:
        if not source.strip():
            raise UsageError("the chat template is empty")
        self._bos = bos_token
        self._eos = eos_token
        self._tokens = _TokenFinder([*special_tokens, bos_token, eos_token])
        env = _Environment()
        try:
            tree = env.parse(source)
            # What the template may look for in a message ("</think>"), as opposed to the text it only writes.
            self._literals = {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
            tree = _Limiter().visit(tree)
            tree.set_environment(env)
            self._template = Template.from_code(env, env.compile(tree, filename=_FILE), env.make_globals(None))
        except TemplateSyntaxError as error:
            message = f"the chat template does not compile: line {error.lineno}: {_one_line(error.message or '')}"
            raise UsageError(message) from error
        except Exception as error:
            message = f"the chat template does not compile: {type(error).__name__}: {_one_line(str(error))}"
            raise UsageError(message) from error
        # Used to choose sentinels; a template's own private-use characters must not be taken for them.
        self._alphabet = frozenset(source).union(*self._tokens.texts)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **extra: object,
    ) -> Rendered:
        """Render a conversation.

        A system message or an order of roles that the template refuses or drops is rewritten to fit, with a notice.

        Args:
            messages: the conversation, each a `Message`.
            add_generation_prompt: end with the beginning of an assistant turn.
            continue_final: end right after the content of the last message, which must be the assistant's, so that
                the model continues it. There is no generation prompt then.
            extra: further template variables, such as `tools` or `enable_thinking`. Control tokens spelled in them
                are plain text too.

        Raises:
            UsageError: the messages are malformed, or the template refuses them or fails.
        """
        turns = _turns(messages)
        for name in _RESERVED:
            if name in extra:
                raise UsageError(f"the template variable {name} cannot be set")
        if continue_final and turns[-1].role != "assistant":
            raise UsageError(f"only an assistant message can be continued, and the last one is of role {turns[-1].role}")
        strings = chain((turn.content for turn in turns), _strings(extra))
        marks = _Marks(self._tokens, self._alphabet.union(*strings))
        variables = {
            "tools": None,
            "documents": None,
            **{name: marks.hide(value) for name, value in extra.items()},
            "bos_token": self._bos,
            "eos_token": self._eos,
            "add_generation_prompt": add_generation_prompt and not continue_final,
        }
        job = _Job(self._template, variables, marks, marks.fresh() if continue_final else "")

        best: tuple[list[_Turn], list[str], list[_Turn], str] | None = None
        failure: _RenderError | None = None
        try:
            for way, notices in _ways(turns):
                try:
                    page = job.page(way, marks.hide_text)
                except _RenderError as error:
                    failure = failure or error
                    continue
                lost = job.lost(way, page)
                if best is None or len(lost) < len(best[2]):
                    best = way, notices, lost, page
                if not lost:
                    break
            if best is None:
                raise failure or AssertionError
            way, notices, lost, page = best
            pieces = self._safe_pieces(job, way, page)
        except (_RenderError, _LimitError) as error:
            raise UsageError(_one_line(marks.restore(str(error)))) from error
        if not pieces:
            raise UsageError("the chat template renders these messages to nothing")
        return Rendered(
            pieces=pieces,
            text="".join(piece.text for piece in pieces),
            starts_with_bos=bool(self._bos) and pieces[0].special and pieces[0].text.startswith(self._bos),
            notices=(*notices, *(_left_out(turn) for turn in lost)),
        )

    def _safe_pieces(self, job: _Job, turns: list[_Turn], page: str) -> tuple[Piece, ...]:
        """The page in pieces, safe also from control tokens that the template's editing puts together.

        A template that removes "/think" from a message turns "<|im_/thinkend|>" into a control token that no
        sentinel stands for. So the page is rendered again with the first and last characters of all control tokens
        hidden in the messages: if that gives the same text with fewer control tokens, the difference was typed.
        """
        marks = job.marks
        if any(not self._tokens.edges.isdisjoint(turn.content) for turn in turns):
            try:
                strict = job.page(turns, self._hide_edges(marks))
            except _RenderError:
                strict = page
            if self._tokens.count(strict) < self._tokens.count(page) and marks.restore(strict) == marks.restore(page):
                page = strict
        return marks.pieces(page)

    def _hide_edges(self, marks: _Marks) -> Callable[[str], str]:
        sought = sorted((text for text in self._literals if len(text) > 1 and self._tokens.edges & set(text)), key=len)
        either = re.compile("|".join((*map(re.escape, reversed(sought)), _any_of(self._tokens.edges))))

        def hide_one(match: re.Match[str]) -> str:
            return match[0] if len(match[0]) > 1 else marks.sentinel(match[0])

        return lambda text: either.sub(hide_one, marks.hide_text(text))


class _Job:
    """One call of render: the template with everything but the messages."""

    def __init__(self, template: Template, variables: dict[str, object], marks: _Marks, end: str) -> None:
        self.marks = marks
        self._template = template
        self._variables = variables
        self._end = end

    def page(self, turns: list[_Turn], dress: Callable[[str], str]) -> str:
        """The rendered text, each content passed through `dress`; cut where the last message ends if asked to."""
        contents = [dress(turn.content) for turn in turns]
        contents[-1] += self._end
        messages = [{"role": turn.role, "content": text} for turn, text in zip(turns, contents, strict=True)]
        text = self._run({**self._variables, "messages": messages})
        if not self._end:
            return text
        head, found, _ = text.rpartition(self._end)
        if not found:
            raise _RenderError("the chat template leaves out the last assistant message, so it cannot be continued")
        return head

    def lost(self, turns: list[_Turn], page: str) -> list[_Turn]:
        """The system and user messages that do not reach the page.

        Looking for the content itself would be wrong both ways: templates edit it, and short ones occur by chance.
        """
        tracked = {i: self.marks.fresh() for i, t in enumerate(turns) if t.role in ("system", "user") and not t.blank}
        if not tracked:
            return []
        order = iter(range(len(turns)))

        def dress(text: str) -> str:
            mark = tracked.get(next(order), "")
            return f"{mark}{self.marks.hide_text(text)}{mark}"

        try:
            probe = self.page(turns, dress)
        except _RenderError:
            return [turns[i] for i in tracked if self.marks.hide_text(turns[i].content.strip()) not in page]
        return [turns[i] for i, mark in tracked.items() if mark not in probe]

    def _run(self, variables: dict[str, object]) -> str:
        parts: list[str] = []
        size = 0
        token = _budget.set(_Budget(_MAX_STEPS, time.monotonic() + _MAX_SECONDS))
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > _MAX_SIZE:
                    raise _LimitError("the chat template writes too much text")
        except _LimitError:
            raise
        except _RefusedError as error:
            raise _RenderError(f"the chat template refuses these messages: {error.message}") from error
        except Exception as error:
            line = _line_of(error)
            where = f" at line {line}" if line else ""
            raise _RenderError(f"the chat template fails{where}: {type(error).__name__}: {error}") from error
        finally:
            _budget.reset(token)
        return "".join(parts)


class _TokenFinder:
    """Finds the texts of control tokens: leftmost first, and of those the longest."""

    def __init__(self, texts: Iterable[str]) -> None:
        # A blank token cannot open a turn, and hiding line breaks would keep templates from trimming.
        self.texts = frozenset(text for text in texts if text.strip())
        self.edges = frozenset(char for text in self.texts for char in (text[0], text[-1]) if not char.isspace())
        lengths: dict[str, set[int]] = {}
        seconds: dict[str, set[str]] = {}
        for text in self.texts:
            lengths.setdefault(text[0], set()).add(len(text))
            seconds.setdefault(text[0], set()).add(text[1:2])
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        starts = (re.escape(char) + ("" if "" in found else f"(?={_any_of(found)})") for char, found in seconds.items())
        self._start = re.compile("|".join(starts)) if seconds else None

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """The spans of the control tokens in a text, not overlapping."""
        at = 0
        while self._start and (match := self._start.search(text, at)):
            start = match.start()
            at = start + 1
            for length in self._lengths[text[start]]:
                if text[start : start + length] in self.texts:
                    at = start + length
                    yield start, at
                    break

    def count(self, text: str) -> int:
        """How many control tokens are in a text."""
        return sum(1 for _ in self.find(text))


class _Marks:
    """The private-use characters of one rendering, and what they stand for."""

    def __init__(self, tokens: _TokenFinder, taken: frozenset[str]) -> None:
        self._tokens = tokens
        planes = chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        self._free = (char for char in map(chr, planes) if char not in taken)
        self._chars: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def fresh(self) -> str:
        """A character that occurs nowhere else."""
        char = next(self._free, None)
        if char is None:
            raise UsageError("the messages use too many private-use characters")
        return char

    def sentinel(self, text: str) -> str:
        """The character that stands for a text."""
        if text not in self._chars:
            char = self.fresh()
            self._chars[text] = char
            self._texts[char] = text
        return self._chars[text]

    def hide_text(self, text: str) -> str:
        """The text with a sentinel for every control token in it."""
        parts: list[str] = []
        done = 0
        for start, stop in self._tokens.find(text):
            parts += text[done:start], self.sentinel(text[start:stop])
            done = stop
        return "".join((*parts, text[done:]))

    def hide(self, value: object) -> object:
        """The same for every string in a value of lists and mappings."""
        if isinstance(value, str):
            return self.hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def pieces(self, page: str) -> tuple[Piece, ...]:
        """The page cut at the sentinels, with what they stand for in their place."""
        if not self._texts:
            return (Piece(page, True),) if page else ()
        pieces: list[Piece] = []
        for part in re.split(f"({_any_of(self._texts)}+)", page):
            if part:
                plain = part[0] in self._texts
                pieces.append(Piece(self.restore(part) if plain else part, not plain))
        return tuple(pieces)

    def restore(self, text: str) -> str:
        """The text with every sentinel turned back."""
        return text.translate({ord(char): literal for char, literal in self._texts.items()})


def _turns(messages: Sequence[Mapping[str, object]]) -> list[_Turn]:
    """The messages, checked."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(f"the messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise UsageError("there are no messages")
    turns: list[_Turn] = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} must be a mapping, not {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise UsageError(f"message {number} has no {key}")
        for key in message:
            if key not in ("role", "content"):
                raise UsageError(f"message {number} has an unknown key {key!r}; only role and content are known")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in _ROLES:
            raise UsageError(f"message {number} has an unknown role {role!r}; known are {', '.join(_ROLES)}")
        if not isinstance(content, str):
            raise UsageError(f"message {number} must have text as its content, not {type(content).__name__}")
        turns.append(_Turn(role, content))
    return turns


def _ways(turns: list[_Turn]) -> Iterator[tuple[list[_Turn], list[str]]]:
    """The conversation as it is, then rewritten more and more, each with the notices it needs."""
    moved = _system_moved(turns)
    moved_notice = [_SYSTEM_MOVED] if any(t.role == "system" and not t.blank for t in turns) else []
    ways = [
        (turns, []),
        (_joined(turns), [_TURNS_JOINED]),
        (moved, moved_notice),
        (_joined(moved), [*moved_notice, _TURNS_JOINED]),
    ]
    seen: list[list[_Turn]] = []
    for way, notices in ways:
        if way and way not in seen:
            seen.append(way)
            yield way, notices


def _joined(turns: list[_Turn]) -> list[_Turn]:
    """Messages of one role in a row made one; results of tools stay apart."""
    joined: list[_Turn] = []
    for turn in turns:
        if joined and joined[-1].role == turn.role != "tool":
            turn = _Turn(turn.role, _glued(joined.pop().content, turn.content))
        joined.append(turn)
    return joined


def _system_moved(turns: list[_Turn]) -> list[_Turn]:
    """Each system message put in front of the next user message, or behind the last one, or made one."""
    moved: list[_Turn] = []
    waiting = ""
    for turn in turns:
        if turn.role == "system":
            waiting = _glued(waiting, turn.content)
        elif turn.role == "user":
            moved.append(_Turn("user", _glued(waiting, turn.content)))
            waiting = ""
        else:
            moved.append(turn)
    if waiting.strip():
        users = [index for index, turn in enumerate(moved) if turn.role == "user"]
        if users:
            moved[users[-1]] = _Turn("user", _glued(moved[users[-1]].content, waiting))
        else:
            moved.insert(0, _Turn("user", waiting))
    return moved


def _glued(first: str, second: str) -> str:
    if not first.strip():
        return second
    return f"{first}\n\n{second}" if second.strip() else first


def _left_out(turn: _Turn) -> str:
    start = _one_line(turn.content, 40)
    return f'The chat template leaves out a {turn.role} message; the model does not see "{start}".'


def _strings(value: object) -> Iterator[str]:
    """Every string in a value of lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_strings, chain(value, value.values())))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_strings, value))


def _any_of(chars: Iterable[str]) -> str:
    return f"[{''.join(map(re.escape, chars))}]"


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _line_of(error: BaseException) -> int | None:
    """The line of the template where an error arose, if it did in one."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


# What a template gets from its surroundings, and what keeps it from running away.


@dataclass
class _Budget:
    steps: int
    deadline: float


_budget: ContextVar[_Budget] = ContextVar("budget")

# A field of a format string that is padded to a great or a computed width.
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\*|\d{6})|\{[^}]*(\d{6}|\{)")


def _bounded(value: Any) -> Any:
    """The value itself, unless it is too big to go on with."""
    if isinstance(value, (str, bytes, list, tuple)):
        if len(value) > _MAX_SIZE:
            raise _LimitError("the chat template builds too much text")
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise _LimitError("the chat template builds too big a number")
    return value


def _concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    if sum(map(len, parts)) > _MAX_SIZE:
        raise _LimitError("the chat template builds too much text")
    return "".join(parts)


def _check_growth(operation: str, subject: object, args: Sequence[object]) -> None:
    """Refuse the text operations whose result can be far bigger than what goes into them."""
    size = 0
    if operation == "replace" and isinstance(subject, str) and len(args) >= 2:
        size = subject.count(str(args[0])) * len(str(args[1]))
    elif operation == "format" or operation == "%":
        size = _MAX_SIZE + 1 if isinstance(subject, str) and _WIDE_FIELD.search(subject) else 0
    elif operation == "join" and isinstance(subject, str) and args and isinstance(args[0], (list, tuple)):
        size = len(subject) * len(args[0]) + sum(len(part) for part in args[0] if isinstance(part, str))
    else:
        size = max((arg for arg in args if isinstance(arg, int)), default=0)
    if size > _MAX_SIZE:
        raise _LimitError("the chat template builds too much text")


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Filters that take the environment or the evaluation context take it first.
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        own = [*args[skip + 1 :], *kwargs.values()]
        subject = args[skip]
        if name == "join":
            # A filter joins any iterable; list it, so that it can be measured and still be joined.
            subject = list(subject)
            own, measured = [subject], str(own[0]) if own else ""
            _check_growth(name, measured, own)
        else:
            _check_growth(name, subject, own)
        return _bounded(function(*args[:skip], subject, *args[skip + 1 :], **kwargs))

    return limited


class _GenerationTag(Extension):
    """`{% generation %}` marks what a training run learns from; for rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it without ClassVar)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limiter(NodeTransformer):
    """Puts a count into every loop, macro and block, and a size check around every `~`."""

    def visit_counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = visit_Block = visit_counted  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("check_size"), [node], [], None, None)
        return call.set_lineno(node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox that templates run in."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _to_json
        for name in ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap"):
            self.filters[name] = _limited_filter(name, self.filters[name])

    def count_step(self) -> None:
        """Count one turn of a loop."""
        budget = _budget.get()
        budget.steps -= 1
        if budget.steps < 0 or time.monotonic() > budget.deadline:
            raise _LimitError("the chat template does not come to an end")

    def check_size(self, value: Any) -> Any:
        """Refuse a value that has grown too big."""
        return _bounded(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_growth(getattr(method, "__name__", ""), owner, (*args, *kwargs.values()))
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for times, value in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, (str, bytes, list, tuple)):
                    _check_growth(operator, value, (times * len(value),))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_BITS:
                raise _LimitError("the chat template builds too big a number")
        elif operator == "%":
            _check_growth(operator, left, ())
        return _bounded(super().call_binop(context, operator, left, right))


def _raise_exception(message: object = "") -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; unlike Jinja's own filter it does not escape for HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        # Not by json.dumps: it would escape the sentinels.
        text = re.sub(r"[^\x00-\x7f\ue000-\uf8ff\U000f0000-\U0010ffff]", lambda m: json.dumps(m[0])[1:-1], text)
    return text
