"""The options that several verbs share, and what they become: LoadOptions, Sampling, Speculation.

An option is named after the field it fills (`--temp` fills Sampling.temperature); one that is not given leaves the field's
own default in force.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from llamaspec.cli import output
from llamaspec.errors import NotFoundError, UsageError
from llamaspec.options import DrafterName, Sampling, Speculation

if TYPE_CHECKING:
    from llamaspec.catalog import HubRef
    from llamaspec.engine import LoadOptions
    from llamaspec.gguf_header import ModelInfo
    from llamaspec.plan import Wishes

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# As in llamaspec.llama, which cannot be imported before a command runs.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
SPLIT_MODES = ("none", "layer", "row")
FLASH_ATTENTION = ("auto", "on", "off")


class Option(click.Option):
    """An option with the heading it stands under in the help."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for param in sorted(options, key=lambda param: not isinstance(param, Option)):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(param.section if isinstance(param, Option) else "Other", []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _layers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """A number of layers, "all" (-1) or "auto" (None)."""
    if value in (None, "auto"):
        return None
    if value == "all":
        return -1
    if value.isascii() and value.isdigit():
        return int(value)
    raise click.BadParameter(f"{value!r} is not a number of layers, all or auto")


def _draft_length(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    if value is None or value == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number of tokens, or auto") from None


def minus_one_is_none(_ctx: click.Context, _param: click.Parameter, value: int | None) -> int | None:
    """The callback of an option whose -1 stands for "not set"."""
    return None if value == -1 else value


def section(heading: str, *options: tuple[tuple[str, ...], dict[str, Any]]) -> Callable[[Decorated], Decorated]:
    """Decorate a command with options under one heading."""

    def decorate(command: Decorated) -> Decorated:
        for names, settings in reversed(options):
            command = click.option(*names, cls=Option, section=heading, **settings)(command)
        return command

    return decorate


def option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """One option for `section`."""
    return names, settings


def _default_of(settings: type[Sampling | Speculation], name: str) -> str:
    default = next(field.default for field in fields(settings) if field.name == name)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _number(kind: type, names: str, name: str, text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An option for a number of Sampling or Speculation, its default told in the help."""
    home = Sampling if name in Sampling.__slots__ else Speculation
    return option(*names.split(), name, type=kind, metavar="N", help=f"{text} [default: {_default_of(home, name)}]")


model_options = section(
    "Models",
    option("-m", "--model", metavar="MODEL",
           help="The target: a GGUF file, a pair of models.toml, user/repo:QUANT, or a name that `llamaspec list` shows."),
    option("-md", "--model-draft", "--spec-draft-model", metavar="MODEL", help="A draft model: a smaller one of its kind."),
    option("-hf", "-hfr", "--hf-repo", "hub_model", metavar="REPO[:QUANT]", help="The target, on the Hugging Face Hub."),
    option("-hfd", "-hfrd", "--hf-repo-draft", "hub_draft", metavar="REPO[:QUANT]", help="The draft model, on the Hub."),
    option("--pull", is_flag=True, help="Pull what is not here yet, without asking."),
    option("-c", "--ctx-size", "n_ctx", type=int, metavar="N",
           help="Tokens of the context; 0: all it was trained on. [default: 4096, or what it was trained on or fits if less]"),
    option("-ngl", "--gpu-layers", "gpu_layers", callback=_layers, metavar="N|all|auto",
           help="Layers on the GPU. [default: auto, as many as fit]"),
    option("-ngld", "--gpu-layers-draft", "--spec-draft-ngl", "draft_gpu_layers", callback=_layers, metavar="N|all|auto",
           help="The draft's layers on the GPU. [default: auto]"),
    option("-mg", "--main-gpu", type=int, metavar="N", help="The GPU of a model that is not split. [default: 0]"),
    option("-sm", "--split-mode", type=click.Choice(SPLIT_MODES),
           help="How the target is spread over several GPUs. [default: layer]"),
    option("-t", "--threads", type=int, metavar="N", help="CPU threads. [default: the physical cores]"),
    option("-fa", "--flash-attn", "flash_attention", type=click.Choice(FLASH_ATTENTION),
           help="Flash attention. [default: auto]"),
    option("-ctk", "--cache-type-k", type=click.Choice(CACHE_TYPES), metavar="TYPE",
           help=f"Type of the cache's keys: {', '.join(CACHE_TYPES)}. [default: f16]"),
    option("-ctv", "--cache-type-v", type=click.Choice(CACHE_TYPES), metavar="TYPE", help="Of its values. [default: f16]"),
    option("-ctkd", "--cache-type-k-draft", "draft_cache_type_k", type=click.Choice(CACHE_TYPES), metavar="TYPE",
           help="Of the draft's keys; a quantized type can ruin acceptance. [default: f16]"),
    option("-ctvd", "--cache-type-v-draft", "draft_cache_type_v", type=click.Choice(CACHE_TYPES), metavar="TYPE",
           help="Of the draft's values. [default: f16]"),
    option("--mmap/--no-mmap", default=None, help="Map the files into memory, or read them. [default: as llama.cpp sees fit]"),
    option("--mlock", is_flag=True, default=None, help="Keep the weights in memory, never swapped."),
)  # fmt: skip

drafting_options = section(
    "Drafting (changes the speed, never what the text can be)",
    option("--drafter", "--spec-type", type=click.Choice(get_args(DrafterName)),
           help="Who drafts: the draft model, n-gram lookup in prompt and answer, or whichever pays. [default: auto]"),
    option("--no-draft", is_flag=True, help="Draft nothing: the target alone."),
    option("--draft-length", "--spec-draft-n-max", "n_draft", callback=_draft_length, metavar="N|auto",
           help="Tokens drafted in a round, always as many. [default: auto, as far as it pays]"),
    _number(float, "--p-min --spec-draft-p-min", "p_min", "Stop before a token the draft model gives less probability."),
    _number(float, "--draft-temp", "draft_temperature", "Temperature of the draft model; 0 takes its likeliest token."),
    option("--ngram-min", type=int, metavar="N",
           help="Tokens that must match before lookup proposes what followed. [default: 2; 3 with a fixed draft length]"),
    option("--reference", metavar="FILE", help="A text that the answer may copy from, for lookup, besides the prompt."),
)  # fmt: skip

sampling_options = section(
    "Sampling (llama.cpp's names, meaning and defaults)",
    _number(float, "--temp --temperature", "temperature", "Temperature; 0 is greedy."),
    _number(int, "--top-k", "top_k", "Keep the N likeliest tokens; 0 keeps all."),
    _number(float, "--top-p", "top_p", "Keep the likeliest tokens up to this probability; 1 keeps all."),
    _number(float, "--min-p", "min_p", "Drop tokens less likely than this share of the likeliest; 0 drops none."),
    _number(float, "--typical", "typical_p", "Locally typical sampling; 1 is off."),
    _number(float, "--xtc-probability", "xtc_probability", "How often XTC excludes the top choices; 0 is off."),
    _number(float, "--xtc-threshold", "xtc_threshold", "The probability that makes a top choice, for XTC."),
    _number(float, "--repeat-penalty", "repeat_penalty", "Repetition penalty; 1 is off."),
    _number(float, "--frequency-penalty", "frequency_penalty", "Penalty by how often a token occurred; 0 is off."),
    _number(float, "--presence-penalty", "presence_penalty", "Penalty for having occurred; 0 is off."),
    _number(int, "--repeat-last-n", "penalty_last_n", "Tokens the penalties look back on; -1: the context."),
    _number(float, "--dry-multiplier", "dry_multiplier", "Strength of the DRY repetition penalty; 0 is off."),
    _number(float, "--dry-base", "dry_base", "DRY's base."),
    _number(int, "--dry-allowed-length", "dry_allowed_length", "Repetitions up to this length are free of DRY."),
    _number(int, "--dry-penalty-last-n", "dry_penalty_last_n", "Tokens DRY looks back on; -1: the context."),
    option("--dry-sequence-breaker", "dry_sequence_breakers", multiple=True, metavar="TEXT",
           help='A text no repetition reaches over, for DRY; repeatable; "none" for none. [default: line feed : " *]'),
    option("--logit-bias", multiple=True, metavar="ID=BIAS",
           help="Add BIAS to a token's logit; -inf forbids it. Repeatable; 42=1.5, 42+1.5, 42-1.5."),
    option("--seed", type=int, metavar="N", callback=minus_one_is_none,
           help="Of the random numbers; same seed and settings, same text. [default: -1, a new one]"),
    option("--grammar", metavar="GBNF", help="A grammar that the answer follows."),
    option("--grammar-file", metavar="FILE", help="The same from a file."),
    option("-j", "--json-schema", metavar="JSON", help="A JSON schema: the answer is JSON that follows it."),
    option("--json-schema-file", metavar="FILE", help="The same from a file."),
)  # fmt: skip


def hub_spellings(given: dict[str, Any]) -> None:
    """Let -hf and -hfd stand for -m and -md."""
    for plain, name, flag in (("model", "hub_model", "-hf"), ("model_draft", "hub_draft", "-hfd")):
        word = given.pop(name, None)
        if word is None:
            continue
        if given[plain] is not None:
            raise UsageError(f"{flag} and -m{flag[3:]} name the same model", "give one of them")
        given[plain] = f"hf:{word.removeprefix('hf:')}"


def find_files(given: dict[str, Any], *, wants_draft: bool) -> None:
    """Put the files in the place of the words for target and draft, pulled first where the user agrees, and the settings that
    models.toml has for the pair in the place of options that were not given.

    Raises:
        NotPulledError: a model is not here, and was not to be pulled.
    """
    from llamaspec.cli.pull import or_pull
    from llamaspec.find import pair_here

    draft = given["model_draft"] if wants_draft else None
    found = or_pull(lambda: pair_here(given["model"], draft, wants_draft=wants_draft, note=output.notice), given)
    given["model"] = str(found.target)
    if wants_draft:
        given["model_draft"] = str(found.draft) if found.draft is not None else None
    if found.entry is not None:
        for name, value in found.entry.tuned.settings().items():
            if given.get(name) is None and (wants_draft or name not in ("n_draft", "p_min", "draft_temperature")):
                given[name] = value


def load_options(given: Mapping[str, Any]) -> LoadOptions:
    """The LoadOptions among the given options. `-c 0` takes the context the target was trained on."""
    from llamaspec.engine import LoadOptions
    from llamaspec.gguf_header import read_model

    values = {f.name: given[f.name] for f in fields(LoadOptions) if given.get(f.name) is not None}
    if values.get("n_ctx") == 0:
        values["n_ctx"] = read_model(given["model"]).context_length
    return LoadOptions(**values)


def target_and_draft(words: tuple[str, ...], given: Mapping[str, Any], verb: str) -> tuple[str, str | None]:
    """The two models that a report is about: -m and -md, or else the words in their order."""
    rest = list(words)
    target = given["model"] if given["model"] is not None else rest.pop(0) if rest else None
    if target is None:
        raise UsageError("no model", f"llamaspec {verb} target.gguf draft.gguf")
    draft = given["model_draft"] if given["model_draft"] is not None else rest.pop(0) if rest else None
    if rest:
        raise UsageError(f"one model too many: {rest[0]}", "a report is about a target and a draft")
    return target, draft


def pair_headers(words: tuple[str, ...], given: dict[str, Any], verb: str) -> tuple[ModelInfo, ModelInfo | None]:
    """The headers of the two models that a report is about; both can be run. What is not here is read on the Hub."""
    hub_spellings(given)
    word, draft_word = target_and_draft(words, given, verb)
    target, drafts = target_header(word)
    draft = header(draft_word) if draft_word else drafts()
    for model in (target, draft):
        if model is not None:
            model.require_runnable()
    return target, draft


def header(word: str) -> ModelInfo:
    """The header of the model that a word means, from the file or, where that is not here, from the Hub."""
    return target_header(word)[0]


def target_header(word: str) -> tuple[ModelInfo, Callable[[], ModelInfo | None]]:
    """The header of the target that a word means; and what reads the draft's that models.toml knows for it, if any."""
    from llamaspec.find import meaning

    meant = meaning(word)
    return _header_at(meant.target), lambda: _header_at(meant.drafts[0]) if meant.entry is not None and meant.drafts else None


def _header_at(place: HubRef | Path) -> ModelInfo:
    from llamaspec.find import locate
    from llamaspec.gguf_header import read_model

    path = locate(place)
    if path is not None:
        return read_model(path)
    from llamaspec import hub

    assert not isinstance(place, Path)
    with output.Progress(True) as progress:
        progress.show(f"reading the header of {place}")
        return hub.remote_model(hub.select(hub.open_repo(place), place))


def wishes(given: Mapping[str, Any], target: ModelInfo) -> Wishes:
    """The placement asked for among the given options. `-c 0` takes the context the target was trained on."""
    from llamaspec.options import MAX_DRAFT
    from llamaspec.plan import Wishes

    values = {name: given[name] for name in Wishes.__slots__ if given.get(name) is not None}
    if values.get("n_ctx") == 0:
        values["n_ctx"] = target.context_length
    if values.get("n_ctx", 8) < 8:
        raise UsageError(f"a context of {values['n_ctx']} tokens", "-c takes 8 or more, or 0 for all it was trained on")
    return Wishes(outputs=MAX_DRAFT + 1, **values)


def sampling(given: Mapping[str, Any]) -> Sampling:
    """The Sampling among the given options."""
    special = {"grammar", "json_schema", "logit_bias", "dry_sequence_breakers"}
    values = {name: given[name] for name in Sampling.__slots__ if name not in special and given[name] is not None}
    schema = _one_of(given, "json_schema")
    breakers = given["dry_sequence_breakers"]
    if breakers:
        values["dry_sequence_breakers"] = () if breakers == ("none",) else breakers
    return Sampling(
        **values,
        grammar=_one_of(given, "grammar"),
        json_schema=None if schema is None else _schema(schema),
        logit_bias=dict(map(_bias, given["logit_bias"])),
    )


def speculation(given: Mapping[str, Any]) -> Speculation:
    """The Speculation among the given options."""
    if given["no_draft"] and given["drafter"] not in (None, "none"):
        raise UsageError(f"--no-draft and --drafter {given['drafter']} exclude each other", "give one of them")
    if given["drafter"] == "model" and not given["model_draft"]:
        raise UsageError("--drafter model needs a draft model", "name one with -md")
    values = {name: given[name] for name in Speculation.__slots__ if given[name] is not None}
    if given["no_draft"]:
        values["drafter"] = "none"
    if given["reference"] is not None:
        values["reference"] = read_text(given["reference"])
    return Speculation(**values)


def notes(given: Mapping[str, Any]) -> list[str]:
    """One sentence for each drafting option that was given and does nothing beside the others, or harm."""
    asked = "none" if given["no_draft"] or given["n_draft"] == 0 else given["drafter"] or "auto"
    has_model, fixed = bool(given["model_draft"]), given["n_draft"] is not None
    if asked == "auto":
        drafting = {"model"} if fixed and has_model else {"ngram"} if fixed or not has_model else {"model", "ngram"}
    else:
        drafting = {asked}
    told = {"model": "the draft model drafts", "ngram": "n-gram lookup drafts", "none": "nothing is drafted"}
    options = (
        ("--model-draft", "model_draft", "model"),
        ("--p-min", "p_min", "model"),
        ("--draft-temp", "draft_temperature", "model"),
        ("--ngram-min", "ngram_min", "ngram"),
        ("--reference", "reference", "ngram"),
    )
    said = [
        f"{option} has no effect: {' and '.join(told[name] for name in sorted(drafting))}"
        for option, name, meant_for in options
        if meant_for not in drafting and given[name] is not None
    ]
    cache = [given["draft_cache_type_k"], given["draft_cache_type_v"]]
    if "model" in drafting and any(type_ not in (None, "f32", "f16", "bf16") for type_ in cache):
        said.append("a quantized cache of the draft model can ruin acceptance")
    return said


def read_text(path: str) -> str:
    """The text of a file.

    Raises:
        NotFoundError: it is not here.
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return decode(data, path)


def decode(data: bytes, what: str) -> str:
    """Bytes of `what` as text.

    Raises:
        UsageError: they are not UTF-8; it names the first byte that is wrong.
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise UsageError(f"{what} is not UTF-8: {byte}", "convert it, as with iconv -f latin1 -t utf-8") from None


def argument_text(value: str, what: str) -> str:
    """An argument as text: bytes that are not UTF-8 are refused, as in a file."""
    return decode(os.fsencode(value), what)


def chat_template(value: str | None) -> str | None:
    """A chat template given as text or as a file."""
    if value is None or "{%" in value or "{{" in value:
        return value
    return read_text(value)


def _one_of(given: Mapping[str, Any], name: str) -> str | None:
    """An option given as text or as a file."""
    text, file = given[name], given[f"{name}_file"]
    if text is not None and file is not None:
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"{flag} and {flag}-file exclude each other", "give one of them")
    return read_text(file) if file is not None else text


def _schema(text: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise UsageError("the JSON schema is neither an object nor true or false")
    return schema


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"\s*(\d+)\s*(?:=|(?=[+-]))\s*(\S+)\s*", text, re.ASCII)
    try:
        if match is None:
            raise ValueError
        return int(match[1]), float(match[2])
    except ValueError:
        raise UsageError(f"--logit-bias {text} is not ID=BIAS", "for example: --logit-bias 42=-inf") from None
