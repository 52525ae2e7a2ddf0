"""`llamaspec pull`: bring a pair here, after everything that can be known before the first byte was looked at."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llamaspec.cli import output
from llamaspec.cli.output import human_bytes
from llamaspec.errors import NotFoundError, NotPulledError, UnfitError, UsageError

if TYPE_CHECKING:
    from llamaspec.catalog import HubRef
    from llamaspec.find import Place
    from llamaspec.gguf_header import ModelInfo
    from llamaspec.hub import Pending, Remote

Result = TypeVar("Result")

_LINE_SECONDS = 10.0


@click.command("pull", short_help="Bring a pair or a model here.")
@click.argument("name", metavar="NAME|REPO[:QUANT]", required=False)
@click.option("-hf", "--hf-repo", metavar="REPO[:QUANT]", help="The same as the argument, as llama.cpp spells it.")
@click.option("--draft", "-hfd", "-hfrd", "--hf-repo-draft", metavar="REPO[:QUANT]", help="The draft to bring with it.")
@click.option("--no-draft", is_flag=True, help="The target alone.")
@click.option("--file", metavar="FILE", help="The file of the repository, instead of a quantization.")
@click.option("--revision", metavar="REV", help="A branch, a tag or a commit. [default: the newest]")
@click.option("--dry-run", is_flag=True, help="Look at everything, bring nothing.")
@click.option("--force", is_flag=True, help="Bring a model that does not fit into this machine's memory, too.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing but errors and the paths.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str | None, hf_repo: str | None, draft: str | None, **given: Any) -> None:
    """Bring a pair of models.toml, or a model of the Hugging Face Hub, here.

    First, from the headers alone: do the two share their vocabulary, do they fit into memory and onto the disk? A pull that was
    cut goes on where it stopped. The paths go to stdout, target first.
    """
    if (name is None) == (hf_repo is None):
        raise UsageError("name one pair or repository", "llamaspec pull qwen2.5-coder-7b, or user/repo:Q4_K_M")
    word = name if name is not None else f"hf:{(hf_repo or '').removeprefix('hf:')}"
    pull(word, draft, **given)


def or_pull(find: Callable[[], Result], given: Mapping[str, Any]) -> Result:
    """What `find` finds; what it lacks is pulled first where --pull was given or the user agrees in a terminal."""
    try:
        return find()
    except NotPulledError as error:
        if not error.missing or not (given.get("pull") or _agreed(f"{error.message}. Pull it?")):
            raise
        for name in error.missing:
            pull(name, None, quiet=bool(given.get("quiet")), to_stdout=False, no_draft=given.get("model_draft") is not None)
        return find()


def pull(
    word: str,
    draft_word: str | None,
    *,
    no_draft: bool = False,
    file: str | None = None,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
    as_json: bool = False,
    to_stdout: bool = True,
) -> None:
    """Look, tell, ask, fetch."""
    from llamaspec import hub

    if draft_word is not None and no_draft:
        raise UsageError("--draft and --no-draft exclude each other", "give one of them")
    told = _Told(quiet)
    target_place, draft_places = _places(word, draft_word, file, revision, no_draft)
    if hub.offline():
        _tell_what_is_here(target_place, draft_places)
        return
    with output.Progress(not quiet) as progress:
        progress.show(f"asking for {target_place}")
        target = _choose(target_place, quiet) if not isinstance(target_place, Path) else None
        draft = _first(draft_places, told)
        remotes = [remote for remote in (target, draft) if remote is not None]
        pending = hub.prepare(remotes)
        progress.show("reading the headers")
        ours = _header(target_place, target)
        drafts = [place for place in draft_places if isinstance(place, Path)]
        theirs = hub.remote_model(draft) if draft is not None else _header(drafts[0], None) if drafts else None
    for label, remote in (("target", target), ("draft", draft)):
        if remote is not None:
            told.row(label, _facts(remote, pending))
    verdict = _vocabulary(ours, theirs, told)
    _memory(ours, theirs, told, force or dry_run)
    left = sum(one.left for one in pending)
    told.row("disk", f"{human_bytes(left)} to come" + ("" if left else ": all is here"))
    hub.require_disk(pending)
    paths = [] if dry_run else _fetch(pending, quiet)
    here = [path for path in (target_place, *drafts) if isinstance(path, Path)]
    firsts = [path for one, path in zip(pending, paths, strict=False) if one.file.path == one.remote.variant.path]
    if as_json:
        report = {"pulled": not dry_run, "paths": [str(path) for path in [*here, *firsts]], "vocabulary": verdict}
        output.write_json(report | {"models": [_plain(remote, pending) for remote in remotes]})
    elif to_stdout and not dry_run:
        output.write_lines(str(path) for path in [*here, *firsts])
    if not dry_run and to_stdout and not quiet:
        second = f" -md {draft.name}" if draft_word is not None and draft is not None else ""
        output.narrate(f"It is here. llamaspec run {word}{second} 'the prompt'")


def _places(
    word: str, draft_word: str | None, file: str | None, revision: str | None, no_draft: bool
) -> tuple[Place, tuple[Place, ...]]:
    """Where target and drafts are."""
    from llamaspec.catalog import HubRef
    from llamaspec.find import meaning

    meant = meaning(word, revision)
    place: Place = meant.target
    if isinstance(place, Path) and meant.entry is None:
        raise UsageError(f"{word} is a file", "pull takes the name of a pair, or user/repo:QUANT")
    if isinstance(place, HubRef):
        place = replace(place, revision=revision or place.revision)
        if file is not None:
            place = replace(place, file=file, quant=None)
    elif file is not None or revision is not None:
        raise UsageError(f"{word} is a file of your own: it has no --file and no --revision")
    if no_draft:
        return place, ()
    if draft_word is not None:
        return place, (meaning(draft_word).target,)
    return place, meant.drafts if meant.entry is not None else ()


def _tell_what_is_here(target: Place, drafts: Sequence[Place]) -> None:
    """Without a network: the paths, where the cache holds the pair.

    Raises:
        DownloadError: it does not.
    """
    from llamaspec.errors import DownloadError
    from llamaspec.find import locate

    here = [locate(target)] + ([next(filter(None, map(locate, drafts)), None)] if drafts else [])
    if None in here:
        missing = target if here[0] is None else drafts[0]
        raise DownloadError(f"{missing} is not here, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to pull it")
    output.write_lines(map(str, here))


def _choose(ref: HubRef, quiet: bool) -> Remote:
    """The model of a repository; a person at a terminal who named no quantization may choose."""
    from llamaspec import hub

    repo = hub.open_repo(ref)
    memory = _all_memory()
    chosen = hub.select(repo, ref, memory)
    if ref.quant or ref.file or quiet or len(repo.models) < 2 or not _asks():
        return chosen
    for number, variant in enumerate(repo.models, 1):
        fits = "" if variant.total_bytes <= memory else "  larger than this machine's memory"
        label = output.one_line(variant.quant or variant.path)
        output.narrate(f"{number:>3}  {label:<12} {human_bytes(variant.total_bytes):>10}{fits}")
    default = repo.models.index(chosen.variant) + 1
    number = click.prompt("Which", type=click.IntRange(1, len(repo.models)), default=default, err=True)
    return hub.Remote(repo, repo.models[number - 1], ref)


def _first(places: Sequence[Place], told: _Told) -> Remote | None:
    """The first draft that is still there."""
    from llamaspec import hub

    for number, place in enumerate(places):
        if isinstance(place, Path):
            return None
        try:
            return hub.select(hub.open_repo(place), place)
        except NotFoundError as error:
            if number == len(places) - 1:
                raise
            told.note(f"{error.message}: the next draft is taken")
    return None


def _header(place: Place, remote: Remote | None) -> ModelInfo:
    from llamaspec import hub
    from llamaspec.gguf_header import read_model

    model = hub.remote_model(remote) if remote is not None else read_model(place)  # type: ignore[arg-type]
    model.require_runnable()
    return model


def _facts(remote: Remote, pending: Sequence[Pending]) -> str:
    mine = [one for one in pending if one.remote is remote]
    here = sum(one.here for one in mine)
    total = sum(one.file.size for one in mine)
    parts = [remote.name, human_bytes(total), remote.repo.licence or "licence not told"]
    if remote.repo.gated:
        parts.append("gated")
    if here:
        parts.append("here" if here == total else f"{here / total:.0%} of it here")
    return output.one_line(", ".join(parts))


def _vocabulary(ours: ModelInfo, theirs: ModelInfo | None, told: _Told) -> dict[str, Any] | None:
    """Tell the verdict; stop at a mismatch.

    Raises:
        VocabularyMismatchError: nothing was brought.
    """
    from llamaspec.vocab import compare, pair_warnings

    if theirs is None:
        return None
    theirs.require_runnable()
    report = compare(ours, theirs)
    report.require_usable()
    shared = f"{report.verdict.value}, {report.shared:,} tokens shared"
    told.row("vocabulary", shared + (f", {len(report.undraftable):,} never drafted" if report.undraftable else ""))
    for warning in pair_warnings(ours, theirs):
        told.note(warning)
    return report.to_dict()


def _memory(ours: ModelInfo, theirs: ModelInfo | None, told: _Told, anyway: bool) -> None:
    """Tell whether the pair fits; ask where it does not.

    Raises:
        UnfitError: it does not, and nobody wants it anyway.
    """
    from llamaspec.hardware import room
    from llamaspec.plan import Wishes, propose

    plan = propose(ours, theirs, Wishes(), room.here(measure=False))
    if plan.fits:
        told.row("memory", f"fits, with a context of {plan.n_ctx} tokens")
        return
    lacks = ", ".join(f"{human_bytes(size)} too much on {device}" for device, size in plan.missing.items())
    told.row("memory", f"does not fit: {lacks}")
    if not anyway and not _agreed("It does not fit into this machine's memory now. Pull it anyway?"):
        raise UnfitError(f"it does not fit into this machine's memory: {lacks}", "a smaller quantization, or --force")


def _all_memory() -> int:
    """Bytes that a model may take here, the GPUs' and the system's."""
    from llamaspec.hardware import room

    here = room.here(measure=False)
    return here.ram_bytes + sum(gpu.free_bytes or 0 for gpu in here.gpus)


def _fetch(pending: Sequence[Pending], quiet: bool) -> list[Path]:
    """Bring all files, one after the other, under one progress display."""
    from llamaspec import hub

    paths = []
    with _progress(pending, quiet) as progress:
        for number, one in enumerate(pending):
            paths.append(hub.fetch(one, lambda here, number=number: progress.set(number, here)))  # type: ignore[misc]
    return paths


class _Told:
    """The rows that are shown before a download."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def row(self, label: str, value: str) -> None:
        if not self._quiet:
            output.narrate(f"{label:<11} {value}")

    def note(self, text: str) -> None:
        if not self._quiet:
            output.notice(text)


class _Silent:
    """Shows nothing."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, number: int, here: int) -> None:
        """So many bytes of this file are here."""


class _Lines(_Silent):
    """A line now and then, for a log."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending
        self._here = [one.here for one in pending]
        self._began, self._at_first = time.monotonic(), sum(self._here)
        self._last = self._began

    def set(self, number: int, here: int) -> None:
        before, self._here[number] = self._here[number], here
        file, now = self._pending[number].file, time.monotonic()
        if now - self._last < _LINE_SECONDS and (here < file.size or before == here):
            return
        self._last = now
        rate = (sum(self._here) - self._at_first) / max(now - self._began, 1e-3)
        total = sum(one.file.size for one in self._pending)
        left = (total - sum(self._here)) / rate if rate > 0 else None
        eta = f", {left:.0f} s left" if left and left >= 1 else ""
        output.narrate(f"{file.path}: {human_bytes(here)} of {human_bytes(file.size)}, {human_bytes(round(rate))}/s{eta}")


class _Bars(_Silent):
    """A bar for each file: bytes, speed, time left."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        names = [escape(output.one_line(Path(one.file.path).name)) for one in pending]
        sizes = [one.file.size for one in pending]
        here = [one.here for one in pending]
        self._tasks = [
            self._bars.add_task(name, total=size, completed=done) for name, size, done in zip(names, sizes, here, strict=True)
        ]

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def set(self, number: int, here: int) -> None:
        self._bars.update(self._tasks[number], completed=here)


def _progress(pending: Sequence[Pending], quiet: bool) -> _Silent:
    if quiet or not any(one.left for one in pending):
        return _Silent()
    return _Bars(pending) if output.is_terminal(sys.stderr) else _Lines(pending)


def _asks() -> bool:
    """Is there somebody to ask?"""
    return output.is_terminal(sys.stdin) and output.is_terminal(sys.stderr)


def _agreed(question: str) -> bool:
    return _asks() and click.confirm(output.one_line(question), err=True)


def _plain(remote: Remote, pending: Sequence[Pending]) -> dict[str, Any]:
    return {
        "name": remote.name,
        "repo": remote.repo.name,
        "commit": remote.repo.commit,
        "quantization": remote.variant.quant or None,
        "licence": remote.repo.licence,
        "gated": remote.repo.gated,
        "total_bytes": remote.variant.total_bytes,
        "left_bytes": sum(one.left for one in pending if one.remote is remote),
    }
