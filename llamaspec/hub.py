"""The Hugging Face Hub: what a repository holds, headers without the weights, and downloads that go on where they were cut.

Files lie in huggingface_hub's own cache, in its layout and under its locks, shared with every tool that uses it. Its token,
HF_ENDPOINT, HF_HUB_OFFLINE and HF_HUB_CACHE count here too. huggingface_hub (2.4) starts a file from its first byte again
when the process was stopped; so the bytes are fetched here, into `blobs/<etag>.incomplete`, checked against the SHA-256 that
the Hub states, and only then handed to it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors, logging

from llamaspec._version import __version__
from llamaspec.catalog import HubRef
from llamaspec.errors import DownloadError, NotFoundError, UnfitError
from llamaspec.gguf_header import GGUFHeader, HeaderIncomplete, ModelInfo, model_from_headers, parse_header, read_model
from llamaspec.gguf_names import RepoFile, Variant, choose, variants

SPARE_BYTES = 256 << 20
"""Left free on the disk."""

_utils: Any = huggingface_hub.utils  # what is used of it is documented, and not marked as exported

_FIRST_BYTES = 8 << 20
_CHUNK = 1 << 20
_TRIES = 5
_PAUSE = 0.2
_SHA256 = re.compile(r"[0-9a-f]{64}")

logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its warnings would run into the progress display; every failure is told here


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository as it is at one commit.

    Attributes:
        name: as "user/name".
        commit: its hash.
        models: the GGUF models in it, smallest first.
        gated: its owner asks for something before a download.
        licence: its name, None where it is not told.
    """

    name: str
    commit: str
    models: tuple[Variant, ...]
    gated: bool
    licence: str | None


@dataclass(frozen=True, slots=True)
class Remote:
    """One model of a repository, chosen.

    Attributes:
        repo: where it is.
        variant: its files.
        ref: what was asked for.
    """

    repo: Repo
    variant: Variant
    ref: HubRef

    @property
    def name(self) -> str:
        """As messages call it: "user/repo:QUANT"."""
        return f"{self.repo.name}:{self.variant.quant or self.variant.path}"


def open_repo(ref: HubRef) -> Repo:
    """Ask the Hub what a repository holds.

    Raises:
        NotFoundError: there is none of this name, or no such revision.
        DownloadError: it may not be read, or the Hub cannot be reached.
    """
    with _explained(ref.repo):
        info = huggingface_hub.HfApi(library_name="llamaspec", library_version=__version__).model_info(
            ref.repo, revision=ref.revision, files_metadata=True
        )
    files = []
    for sibling in info.siblings or ():
        if _safe(sibling.rfilename):
            lfs = sibling.lfs
            files.append(RepoFile(sibling.rfilename, int(sibling.size or 0), lfs.sha256 if lfs is not None else None))
    card = info.card_data
    licence = card.get("license_name") or card.get("license") if card is not None else None
    if not info.sha or not re.fullmatch(r"[0-9a-f]{7,64}", info.sha):
        raise DownloadError(f"{ref.repo}: the server names no commit", "HF_ENDPOINT may point to something that is no Hub")
    return Repo(ref.repo, info.sha, tuple(variants(files)), bool(info.gated), str(licence) if licence else None)


def select(repo: Repo, ref: HubRef, memory: int | None = None) -> Remote:
    """The model of `repo` that `ref` means; see `gguf_names.choose`.

    Raises:
        NotFoundError: there is none; the hint has near names.
    """
    return Remote(repo, choose(repo.models, repo.name, quant=ref.quant, file=ref.file, memory=memory), ref)


def remote_model(remote: Remote) -> ModelInfo:
    """The header of a model: from the cache where all of it is there, else by range requests: a few MB of the first part.

    Raises:
        ModelFileError: it is damaged, or no model that can be run.
        DownloadError: it may not be read, or the Hub cannot be reached.
    """
    here = cached(HubRef(remote.repo.name, file=remote.variant.path, revision=remote.repo.commit))
    if here is not None:
        return read_model(here)
    return model_from_headers([_remote_header(remote.repo, file) for file in remote.variant.files])


def cached(ref: HubRef) -> Path | None:
    """The first file of a model that is wholly in the cache; None when it is not, or not with all its parts.

    Raises:
        NotFoundError: several models in the cache may be meant.
    """
    folder = Path(constants.HF_HUB_CACHE) / f"models--{ref.repo.replace('/', '--')}"
    for snapshot in _snapshots(folder, ref.revision):
        files = [
            RepoFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
            for path in sorted(snapshot.rglob("*"))
            if path.name.lower().endswith(".gguf") and path.is_file()
        ]
        found = [variant for variant in variants(files) if not variant.missing]
        with suppress(NotFoundError):
            return snapshot / choose(found, ref.repo, quant=ref.quant, file=ref.file).path
    return None


def _snapshots(folder: Path, revision: str | None) -> list[Path]:
    """The snapshots of a repository in the cache, the one that `revision` names first; only that one where it is given."""
    wanted = revision or constants.DEFAULT_REVISION
    with suppress(OSError):
        wanted = (folder / "refs" / wanted).read_text(encoding="utf-8").strip()
    try:
        found = sorted((folder / "snapshots").iterdir(), key=lambda path: (path.name != wanted, -path.stat().st_mtime))
    except OSError:
        return []
    return [path for path in found if revision is None or path.name == wanted]


@dataclass(frozen=True, slots=True)
class Pending:
    """One file of a download: what it is, and how many bytes of it are already here."""

    remote: Remote
    file: RepoFile
    etag: str
    here: int

    @property
    def left(self) -> int:
        """The bytes to fetch."""
        return self.file.size - self.here


def prepare(remotes: Sequence[Remote]) -> list[Pending]:
    """Ask for each file whether it may be read, and see how much of it is here.

    Raises:
        DownloadError: a repository is gated, or the Hub cannot be reached.
        NotFoundError: a file has gone.
    """
    pending: list[Pending] = []
    for remote in remotes:
        for file in remote.variant.files:
            with _explained(remote.repo.name, file.path):
                meta = huggingface_hub.get_hf_file_metadata(
                    _url(remote.repo, file.path), library_name="llamaspec", library_version=__version__, retry_on_errors=True
                )
            if not meta.etag or not re.fullmatch(r"[\w-]+", meta.etag):
                raise DownloadError(f"{remote.repo.name}: the server states no etag of {file.path}")
            size = meta.size if meta.size is not None else file.size
            sha256 = file.sha256 or (meta.etag if _SHA256.fullmatch(meta.etag) else None)
            blob = _blob(remote.repo, meta.etag)
            here = next((_size(path) for path in (blob, _part(blob)) if path.exists()), 0)
            pending.append(Pending(remote, RepoFile(file.path, size, sha256), meta.etag, min(here, size)))
    return pending


def require_disk(pending: Sequence[Pending]) -> None:
    """Refuse a download for which the disk has no room.

    Raises:
        UnfitError: with the figures.
    """
    needed = sum(file.left for file in pending)
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed and needed + SPARE_BYTES > free:
        raise UnfitError(
            f"the disk of {constants.HF_HUB_CACHE} has {free / 2**30:.1f} GiB free, and {needed / 2**30:.1f} GiB are to come",
            "llamaspec list shows what is here and llamaspec rm removes it; HF_HUB_CACHE names another folder",
        )


def fetch(pending: Pending, on_bytes: Callable[[int], None]) -> Path:
    """Bring one file here, from where an earlier try was cut, and check it.

    Args:
        on_bytes: called with the bytes that are here now, as they come.

    Returns:
        The file's path in the cache.

    Raises:
        DownloadError: the network, the server or the disk failed (what is here stays, and a new try goes on from it), or the
            file is not what the Hub states (it is removed).
    """
    repo, file = pending.remote.repo, pending.file
    blob = _blob(repo, pending.etag)
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / blob.parent.parent.name / f"{pending.etag}.lock"
    with _explained(repo.name, file.path):
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        if file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            with _utils.WeakFileLock(str(lock)):
                if not blob.exists():
                    _fetch_blob(pending, _part(blob), on_bytes)
                    os.replace(_part(blob), blob)
        on_bytes(file.size)
        path = huggingface_hub.hf_hub_download(
            repo.name,
            file.path,
            revision=repo.commit,
            library_name="llamaspec",
            library_version=__version__,
        )
        _remember_branch(blob.parent.parent, pending.remote)
    return Path(path)


def _fetch_blob(pending: Pending, part: Path, on_bytes: Callable[[int], None]) -> None:
    """Fill `part` up to the file's size, and compare its hash."""
    url, size = _url(pending.remote.repo, pending.file.path), pending.file.size
    digest = hashlib.sha256()
    if part.exists() and part.stat().st_size > size:
        part.unlink()
    with part.open("a+b") as out:
        out.seek(0)
        while read := out.read(_CHUNK):
            digest.update(read)
        tries = 0
        while out.tell() < size and tries < _TRIES:
            start = out.tell()
            on_bytes(start)
            tries += 1
            try:
                for chunk in _stream(url, start, size):
                    if chunk is None:  # the server sends the file from its start
                        out.truncate(0)
                        digest = hashlib.sha256()
                        continue
                    out.write(chunk)
                    digest.update(chunk)
                    on_bytes(out.tell())
                    tries = 0
            except _NoSuchRange:
                break
            except _TRANSPORT:
                if tries >= _TRIES:
                    raise
                time.sleep(min(_PAUSE * 2**tries, 5.0))
        received = out.tell()
    stated = pending.file.sha256
    if received != size or (stated is not None and digest.hexdigest() != stated):
        part.unlink(missing_ok=True)
        what = f"has {received} bytes, not {size}" if received != size else "has another SHA-256 than the Hub states"
        raise DownloadError(
            f"{pending.remote.repo.name}: {pending.file.path} {what}; it was removed", "pull again; the file may be changing"
        )


class _NoSuchRange(Exception):
    """The server has no bytes from there on."""


def _stream(url: str, start: int, size: int) -> Iterator[bytes | None]:
    """The bytes of a file from `start` on; None first where the server cannot begin there."""
    headers = _headers() | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with _utils.http_stream_backoff(
        "GET", url, headers=headers, follow_redirects=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, retry_on_exceptions=()
    ) as response:
        if response.status_code == 416:  # the file ends before `start`, whatever was stated of it
            raise _NoSuchRange
        _utils.hf_raise_for_status(response)
        if start and response.status_code != 206:
            yield None
        left = size - (start if response.status_code == 206 else 0)
        for chunk in response.iter_bytes():
            yield chunk
            left -= len(chunk)
            if left < 0:
                return


def _remember_branch(folder: Path, remote: Remote) -> None:
    """Note, as huggingface_hub does, at which commit a branch was."""
    ref = folder / "refs" / (remote.ref.revision or constants.DEFAULT_REVISION)
    if remote.ref.revision == remote.repo.commit or not _safe(remote.ref.revision or "main"):
        return
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        fresh.write_text(remote.repo.commit, encoding="utf-8")
        os.replace(fresh, ref)


def _remote_header(repo: Repo, file: RepoFile) -> GGUFHeader:
    name = f"{repo.name}:{file.path}"
    needed = min(_FIRST_BYTES, file.size)
    data = b""
    while True:
        with _explained(repo.name, file.path):
            more = _range(_url(repo, file.path), len(data), needed)
        if not more:
            raise DownloadError(f"{name}: the server sends nothing from byte {len(data)} on")
        data += more
        try:
            return parse_header(data, file.size, name)
        except HeaderIncomplete as incomplete:
            needed = min(max(incomplete.needed, 2 * len(data)), file.size)


def _range(url: str, start: int, stop: int) -> bytes:
    """The bytes from `start` up to `stop`; a server without ranges is read from its start and left there."""
    headers = _headers() | {"Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
    with _utils.http_stream_backoff(
        "GET", url, headers=headers, follow_redirects=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        _utils.hf_raise_for_status(response)
        data = bytearray()
        wanted = stop - start if response.status_code == 206 else stop
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= wanted:
                break
    return bytes(data[:wanted] if wanted == stop - start else data[start:stop])


def remove(path: Path) -> tuple[list[Path], int]:
    """What removing a model from the cache would delete: the links of its files and the blobs that nothing else links to.

    Args:
        path: the model's first file, as `cached` gives it.

    Returns:
        The paths, links before blobs, and the bytes that come free. Nothing is deleted here.

    Raises:
        UnfitError: it does not lie in the cache.
    """
    root = Path(constants.HF_HUB_CACHE).absolute()
    path = path.absolute()
    try:
        repo, kind, _commit, *_rest = path.relative_to(root).parts
    except ValueError:
        repo, kind = "", ""
    if not repo.startswith("models--") or kind != "snapshots":
        raise UnfitError(f"{path} is not in the cache of the Hub, {root}", "delete it yourself if it is yours")
    folder = root / repo
    parts = [variant for variant in _variants_beside(path) if (path.parent / variant.path) == path]
    files = [path.parent / file.path for file in parts[0].files] if parts else [path]
    blobs = {file: _link_target(file, folder / "blobs") for file in files}
    links = set(files)
    for snapshot in (folder / "snapshots").iterdir():  # the same blob under another commit, or another name
        for other in snapshot.rglob("*"):
            if other not in links and other.is_symlink() and other.name in {file.name for file in files}:
                target = _link_target(other, folder / "blobs")
                if target is not None and target in blobs.values():
                    links.add(other)
    kept = {
        _link_target(other, folder / "blobs")
        for other in (folder / "snapshots").rglob("*")
        if other.is_symlink() and other not in links
    }
    gone = [blob for blob in dict.fromkeys(blobs.values()) if blob is not None and blob not in kept and blob.exists()]
    plain = [file for file in files if not file.is_symlink()]
    freed = sum(_size(file) for file in [*gone, *plain])
    return [*sorted(links), *gone], freed


def delete(paths: Sequence[Path]) -> None:
    """Delete what `remove` named, and the folders that are empty then.

    Raises:
        DownloadError: a file cannot be deleted.
    """
    root = Path(constants.HF_HUB_CACHE).absolute()
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DownloadError(f"{path} cannot be deleted: {error.strerror}") from None
    for path in paths:
        for folder in path.parents:
            if folder == root or root not in folder.parents:
                break
            if folder.parent == root and not any((folder / kind).exists() for kind in ("snapshots", "blobs")):
                shutil.rmtree(folder / "refs", ignore_errors=True)  # branches of nothing
            try:
                folder.rmdir()
            except OSError:
                break


def cache_folder() -> Path:
    """The folder of the cache."""
    return Path(constants.HF_HUB_CACHE)


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return bool(constants.HF_HUB_OFFLINE)


def _variants_beside(path: Path) -> list[Variant]:
    return variants(RepoFile(file.name, 0) for file in path.parent.iterdir())


def _link_target(path: Path, blobs: Path) -> Path | None:
    """The blob that a link of the cache stands for; None for anything that lies outside the cache."""
    if not path.is_symlink():
        return None
    target = Path(os.path.normpath(path.parent / os.readlink(path)))
    return target if target.parent == blobs and not target.is_symlink() else None


def _safe(path: str) -> bool:
    """Whether a path from a server stays within its folder."""
    parts = path.split("/")
    return (
        0 < len(path) <= 1024
        and not any(part in ("", ".", "..") or len(part.encode(errors="replace")) > 255 for part in parts)
        and not any(ord(char) < 32 or char in "\\\x7f" for char in path)
        and ":" not in parts[0]
    )


def _url(repo: Repo, path: str) -> str:
    return str(huggingface_hub.hf_hub_url(repo.name, path, revision=repo.commit))


def _headers() -> dict[str, str]:
    return dict(_utils.build_hf_headers(library_name="llamaspec", library_version=__version__))


def _blob(repo: Repo, etag: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.name.replace('/', '--')}" / "blobs" / etag


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --- errors

# httpx, under the name by which the installed huggingface_hub has it
_HTTP_ERROR: type[Exception] = next(kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
_TRANSPORT: type[Exception] = next(kind for kind in _HTTP_ERROR.__subclasses__() if kind.__name__ == "RequestError")


@contextmanager
def _explained(repo: str, path: str | None = None) -> Iterator[None]:
    """Turn whatever goes wrong with the Hub into one sentence and what to do."""
    what = f"{repo}: {path}" if path else repo
    try:
        yield
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{repo}"
        if _token() is None:
            raise DownloadError(
                f"{repo} is gated, and nobody is logged in", f"accept it on {page}, then: hf auth login"
            ) from None
        if "fine-grained" in str(error):
            raise DownloadError(f"{repo} is gated, and the token may not read such repositories", "hf auth login") from None
        raise DownloadError(f"{repo} is gated, and your account has not been let in", f"ask for access on {page}") from None
    except errors.RevisionNotFoundError:
        raise NotFoundError(f"{repo} has no such revision", "leave --revision out for the newest") from None
    except errors.RepositoryNotFoundError:
        hint = "check the name" if _token() else "check the name; for a private one: hf auth login"
        raise NotFoundError(f"{repo}: there is no such repository, or it is private", hint) from None
    except errors.EntryNotFoundError:
        raise NotFoundError(f"{what} is not there (any more)", "look at the files of the repository") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        if offline():
            raise DownloadError(f"{what} is not here, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to pull") from None
        raise DownloadError(f"{what}: the Hub cannot be reached", _reach_hint()) from None
    except errors.HfHubHTTPError as error:
        raise _of_status(what, error.response) from None
    except errors.HFValidationError:
        raise NotFoundError(f"{repo!r} is no name of a repository", "as in user/name") from None
    except _TRANSPORT as error:
        raise _of_network(what, error) from None
    except OSError as error:
        raise _of_disk(what, error) from None


def _of_status(what: str, response: Any) -> DownloadError:
    status = response.status_code
    if status == 401:
        return DownloadError(f"{what}: the Hub does not accept the token (401)", "hf auth login, or unset HF_TOKEN")
    if status == 403:
        return DownloadError(f"{what}: the token may not read this (403)", "hf auth login with a token that may read it")
    if status == 429:
        return DownloadError(f"{what}: the Hub is asked too often (429)", "wait some minutes, or log in: hf auth login")
    if status >= 500:
        return DownloadError(f"{what}: the Hub has trouble ({status})", "try again later; what is here is kept")
    return DownloadError(f"{what}: the Hub answers {status}")


def _of_network(what: str, error: Exception) -> DownloadError:
    said, name = str(error), type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in said:
            return DownloadError(
                f"{what}: the connection is not to be trusted (TLS)",
                "a proxy may stand between: SSL_CERT_FILE names its certificate",
            )
        cause = cause.__cause__ or cause.__context__
    if "Timeout" in name:
        return DownloadError(f"{what}: the server stopped sending", "pull again: it goes on from where it stopped")
    if any(part in said for part in ("Name or service not known", "name resolution", "nodename nor servname", "getaddrinfo")):
        return DownloadError(f"{what}: the name of the Hub cannot be resolved (DNS)", _reach_hint())
    if name in ("RemoteProtocolError", "ReadError"):
        return DownloadError(f"{what}: the connection was cut", "pull again: it goes on from where it stopped")
    return DownloadError(f"{what}: the Hub cannot be reached: {said or name}", _reach_hint())


def _of_disk(what: str, error: OSError) -> DownloadError:
    if error.errno == errno.ENOSPC:
        return DownloadError(f"{what}: the disk is full", "make room and pull again: it goes on from where it stopped")
    if error.errno == errno.ENAMETOOLONG:
        return DownloadError(f"{what}: the path is too long for this system", "set HF_HUB_CACHE to a short path")
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return DownloadError(f"{constants.HF_HUB_CACHE} cannot be written", "set HF_HUB_CACHE to a folder of yours")
    return DownloadError(f"{what}: {error.strerror or str(error).splitlines()[0]}", "pull again")


def _reach_hint() -> str:
    return f"is there a network? the Hub is {constants.ENDPOINT} (HF_ENDPOINT)"


def _token() -> str | None:
    token = huggingface_hub.get_token()
    return str(token) if token else None
