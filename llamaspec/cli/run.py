"""`llamaspec run`: one answer to stdout."""

from __future__ import annotations

import platform
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from llamaspec._version import __version__
from llamaspec.cli import arguments, output, summary
from llamaspec.cli.arguments import option
from llamaspec.cli.output import DIM, DRAFTED, ExitCode
from llamaspec.errors import LlamaspecError, UsageError
from llamaspec.options import Sampling, Speculation

if TYPE_CHECKING:
    from llamaspec import LoadOptions, Pair, Round, Stats
    from llamaspec.hardware.sampler import Sampler, Usage

_prompt_options = arguments.section(
    "Prompt",
    option("-s", "--system", metavar="TEXT", help="The system message."),
    option("--raw", is_flag=True, help="Complete the prompt as it is, without the chat template; control tokens in it count."),
    option("--chat-template", metavar="TEXT|FILE", help="A Jinja chat template in place of the model's own."),
    option("-n", "--max-tokens", "--n-predict", type=int, metavar="N",
           callback=arguments.minus_one_is_none,
           help="Tokens to generate at most. [default: -1, as many as the context holds]"),
    option("--stop", "-r", "--reverse-prompt", multiple=True, metavar="TEXT",
           help="End the answer before this text; repeatable."),
)  # fmt: skip

_output_options = arguments.section(
    "Output",
    option("--json", is_flag=True, help="Print one JSON object in place of the text."),
    option("--show-draft", is_flag=True,
           help="Show which tokens were drafted: in green, or where there is no colour in [brackets]."),
    option("--baseline", is_flag=True, help="Answer once more with drafting off, and print both speeds and the speedup."),
    option("--explain", is_flag=True, help="Say what was drafted how far and why, and what limits the speed most."),
    option("-q", "--quiet", is_flag=True, help="No notes and no summary."),
    option("-v", "--verbose", is_flag=True, help="llama.cpp's log, on stderr, at the end."),
)  # fmt: skip


@click.command("run", cls=arguments.SectionedCommand, short_help="One answer to stdout.")
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]")
@_prompt_options
@arguments.model_options
@arguments.drafting_options
@arguments.sampling_options
@_output_options
def command(words: tuple[str, ...], **given: Any) -> ExitCode:
    """Answer PROMPT with MODEL, a GGUF file, faster by drafting.

    Without PROMPT, or with "-", it is read from stdin, a line feed at its end left out. The answer goes to stdout, everything
    else to stderr. Ctrl+C stops the answer and keeps what is there.
    """
    arguments.hub_spellings(given)
    given["model"], prompt = _model_and_prompt(words, given["model"])
    _exclusive(given, "json", "show_draft")
    _exclusive(given, "raw", "system")
    template = arguments.chat_template(given["chat_template"])
    text = _prompt_text(prompt, given["raw"])
    sampling, speculation = arguments.sampling(given), arguments.speculation(given)
    arguments.find_files(given, wants_draft=speculation.drafter in ("auto", "model") and speculation.n_draft != 0)
    speculation = arguments.speculation(given)
    if given["baseline"] and speculation.drafter == "none":
        raise UsageError("--baseline has nothing to compare with when nothing is drafted", "leave out --no-draft")
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(31))  # one that can be told, and used again by the baseline
    with _log_shown(given["verbose"]):
        options = arguments.load_options(given)
        with _load(given, options, speculation, template) as pair:
            return _Run(pair, given, sampling, speculation, text).answer()


class _Run:
    """One answer, from the first note to the summary."""

    def __init__(self, pair: Pair, given: Mapping[str, Any], sampling: Sampling, speculation: Speculation, prompt: str) -> None:
        self._pair = pair
        self._given = given
        self._sampling = sampling
        self._speculation = speculation
        self._prompt = prompt
        self._notices: list[str] = []
        self._text: list[str] = []
        self._arrivals: list[tuple[float, int]] = []
        self._usage: Usage | None = None

    def answer(self) -> ExitCode:
        """Generate, print, sum up. What was written before a failure or Ctrl+C stays, and is summed up too."""
        from llamaspec import Stats
        from llamaspec.hardware.sampler import Sampler

        for text in (*arguments.notes(self._given), *self._pair.notices):
            self._note(text)
        stats = Stats()
        baseline: summary.Baseline | None = None
        failure: KeyboardInterrupt | LlamaspecError | None = None
        sampler = Sampler().start()
        try:
            for one in self._generate(self._speculation):
                stats = stats.add(one)
                self._arrivals.append((time.monotonic(), len(one.tokens)))
                self._show(one)
            self._end_line()
            self._look_back(sampler)
            if self._given["baseline"]:
                baseline = self._measure_baseline(stats)
        except (KeyboardInterrupt, LlamaspecError) as error:
            if not stats.generated_tokens:
                raise
            self._end_line()
            failure = error
        finally:
            self._look_back(sampler)
        self._sum_up(stats, baseline)
        if isinstance(failure, LlamaspecError):
            raise failure
        return ExitCode.OK if failure is None else ExitCode.INTERRUPTED

    def _look_back(self, sampler: Sampler) -> None:
        """Stop looking at the machine, and say what slowed the answer down if something did. A second call does nothing."""
        from llamaspec.hardware.sampler import Usage, slowdown

        sampler.stop()
        if self._usage is None:
            self._usage = Usage.of(sampler.samples)
            blame = slowdown(sampler.samples, self._arrivals)
            if blame is not None:
                self._note(blame)

    def _generate(self, speculation: Speculation) -> Iterator[Round]:
        messages = [{"role": "system", "content": self._given["system"]}] if self._given["system"] else []
        messages.append({"role": "user", "content": self._prompt})
        return self._pair.generate(
            self._prompt if self._given["raw"] else messages,
            sampling=self._sampling,
            speculation=speculation,
            max_tokens=self._given["max_tokens"],
            stop=self._given["stop"],
        )

    def _measure_baseline(self, stats: Stats) -> summary.Baseline:
        from llamaspec import Stats

        self._pair.reset()
        text, alone = "", Stats()
        with output.Progress(not self._given["quiet"]) as progress:
            progress.show("measuring the baseline: the same prompt without drafting")
            for one in self._generate(replace(self._speculation, drafter="none")):
                text, alone = text + one.text, alone.add(one)
        return summary.Baseline.of(stats, "".join(self._text), alone, text)

    def _show(self, one: Round) -> None:
        for text in one.notices:
            self._note(text)
        self._text.append(one.text)
        if self._given["json"] or not one.text:
            return
        if not self._given["show_draft"]:
            output.write(one.text)
            return
        drafted, own = "".join(one.pieces[: one.accepted]), "".join(one.pieces[one.accepted :])
        if drafted and output.has_colour(sys.stdout):
            output.write(drafted, DRAFTED)
        elif drafted:
            output.write(f"[{drafted}]")
        output.write(own)

    def _end_line(self) -> None:
        last = next((text for text in reversed(self._text) if text), "\n")
        if not last.endswith("\n") and not self._given["json"]:
            output.write("\n")

    def _note(self, text: str) -> None:
        self._notices.append(text)
        if not self._given["quiet"]:
            output.notice(text)

    def _sum_up(self, stats: Stats, baseline: summary.Baseline | None) -> None:
        if not self._given["quiet"] and output.is_terminal(sys.stderr):
            output.narrate("")
        cut = summary.ending(self._pair, stats)
        if cut is not None:
            self._note(cut)
        text = "".join(self._text)
        if self._given["json"]:
            output.write_json(self._report(stats, text, baseline))
        if not self._given["quiet"]:
            for line in summary.lines(self._pair, self._sampling, self._speculation, stats, text, baseline):
                output.narrate(line, DIM)
        if self._given["explain"]:
            self._explain(stats)

    def _explain(self, stats: Stats) -> None:
        from llamaspec.cli import explain
        from llamaspec.decoding.explain import causes

        decisions, drafters = self._pair.decisions(), self._pair.drafters(self._speculation)
        decided = decisions is not None and bool(drafters) and self._speculation.n_draft is None
        vocabulary = self._pair.vocabulary
        found = causes(
            stats,
            self._speculation,
            undraftable=len(vocabulary.undraftable) / max(self._pair.draft.vocab_size, 1)
            if vocabulary and self._pair.draft
            else 0,
            memory_used=self._usage.fullest if self._usage is not None else None,
        )
        if not decided and not found:
            self._note("--explain has nothing to tell: how far to draft was not decided here")
        elif decided and decisions is not None:
            for line in explain.lines(stats, stats.decisions or decisions, has_model="model" in drafters):
                output.narrate(line, DIM)
        for line in found:
            output.narrate(f"  {line}", DIM)

    def _report(self, stats: Stats, text: str, baseline: summary.Baseline | None) -> dict[str, Any]:
        from llamaspec.llama import library

        settings = self._pair.settings(self._sampling, self._speculation)
        asked = {name: self._given[name] for name in ("max_tokens", "stop", "raw")}
        versions = {"llamaspec": __version__, "python": platform.python_version(), **library.versions()}
        return {
            "text": text,
            "finish_reason": stats.finish_reason,
            "stats": stats.to_dict(),
            "baseline": baseline.to_dict() if baseline is not None else None,
            "usage": asdict(self._usage) if self._usage is not None else None,
            "settings": settings | asked,
            "versions": versions,
            "notices": self._notices,
        }


def _load(given: Mapping[str, Any], options: LoadOptions, speculation: Speculation, template: str | None) -> Pair:
    """Load the pair, without a draft model that would not draft."""
    from llamaspec import load

    with output.Progress(not given["quiet"]) as progress:
        return load(
            given["model"],
            given["model_draft"] if speculation.drafter in ("auto", "model") and speculation.n_draft != 0 else None,
            options=options,
            chat_template=template,
            on_progress=lambda which, done: progress.show(f"loading the {which}: {done:.0%}"),
        )


@contextmanager
def _log_shown(shown: bool) -> Iterator[None]:
    """Print llama.cpp's log when all is done, or has failed."""
    from llamaspec.llama import log

    try:
        yield
    finally:
        for line in log.lines() if shown else ():
            output.narrate(f"llama.cpp: {line}", DIM)


def _model_and_prompt(words: tuple[str, ...], model: str | None) -> tuple[str, str | None]:
    """The target and the prompt; with -m the first word is the prompt already."""
    rest = list(words)
    target = model if model is not None else rest.pop(0) if rest else None
    if target is None:
        raise UsageError("no model", "llamaspec run model.gguf 'the prompt'")
    if len(rest) > 1:
        raise UsageError(f"{len(rest)} prompts: {', '.join(map(repr, rest[:3]))}", "put the prompt in quotes")
    return target, rest[0] if rest else None


def _exclusive(given: Mapping[str, Any], one: str, other: str) -> None:
    if given[one] and given[other]:
        names = (f"--{name.replace('_', '-')}" for name in (one, other))
        raise UsageError(f"{' and '.join(names)} exclude each other", "give one of them")


def _prompt_text(prompt: str | None, raw: bool) -> str:
    """The prompt given, or what stdin holds."""
    if prompt is None and output.is_terminal(sys.stdin):
        raise UsageError("no prompt", "give one behind the model, or pipe it in; - reads what you type, up to Ctrl+D")
    if prompt is None or prompt == "-":
        data = sys.stdin.buffer.read() if sys.stdin is not None else b""
        text = arguments.decode(data, "the prompt on stdin").removesuffix("\n").removesuffix("\r")
    else:
        text = arguments.argument_text(prompt, "the prompt")
    if not (text if raw else text.strip()):
        raise UsageError("the prompt is empty")
    return text
