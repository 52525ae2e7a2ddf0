"""The Hub's client against a server that speaks the Hub's protocol: what is told, what is fetched, what a fault leaves."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from llamaspec import hub
from llamaspec.catalog import HubRef
from llamaspec.errors import DownloadError, NotFoundError, UnfitError
from llamaspec.gguf_header import read_model
from tests.hub_server import COMMIT, HubRepo, HubServer

REPO = "you/tiny-GGUF"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Path) -> Iterator[HubServer]:
    with HubServer() as one:
        one.repos[REPO] = HubRepo({"tiny-Q4_K_M.gguf": target.read_bytes(), "mmproj-f16.gguf": b"no model", "README.md": b"hi"})
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, one.url)
        monkeypatch.setattr(constants, "ENDPOINT", one.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(hub, "_PAUSE", 0.0)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield one
        one.shutdown()
        thread.join()


def chosen(name: str = REPO, **what: str) -> hub.Remote:
    ref = HubRef(name, **what)
    return hub.select(hub.open_repo(ref), ref)


def fetch(remote: hub.Remote) -> list[Path]:
    return [hub.fetch(one, lambda _here: None) for one in hub.prepare([remote])]


def test_a_repository_is_described_without_what_is_no_model(server: HubServer) -> None:
    repo = hub.open_repo(HubRef(REPO))
    assert (repo.commit, repo.licence, repo.gated) == (COMMIT, "apache-2.0", False)
    assert [variant.path for variant in repo.models] == ["tiny-Q4_K_M.gguf"]


def test_a_file_lies_where_other_tools_look_for_it(server: HubServer, target: Path) -> None:
    (path,) = fetch(chosen())
    assert path.read_bytes() == target.read_bytes()
    assert path == Path(constants.HF_HUB_CACHE) / "models--you--tiny-GGUF" / "snapshots" / COMMIT / "tiny-Q4_K_M.gguf"
    assert path.resolve().name == hashlib.sha256(target.read_bytes()).hexdigest()
    assert (path.parents[2] / "refs" / "main").read_text() == COMMIT
    assert hub.cached(HubRef(REPO)) == path
    assert hub.cached(HubRef(REPO, "q4_k_m")) == path
    assert hub.cached(HubRef(REPO, "Q8_0")) is None
    assert hub.cached(HubRef(REPO, revision="other")) is None
    sent = server.sent
    assert fetch(chosen()) == [path]
    assert server.sent == sent  # nothing is fetched twice


def test_the_header_is_read_without_the_weights(server: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos[REPO].files["tiny-Q4_K_M.gguf"] = target.read_bytes() + bytes(1 << 20)
    monkeypatch.setattr(hub, "_FIRST_BYTES", 100)
    model = hub.remote_model(chosen())
    assert model.tokens == read_model(target).tokens
    assert server.sent < len(target.read_bytes())
    assert not Path(constants.HF_HUB_CACHE).exists()


def test_a_server_without_ranges(server: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ranges = False
    monkeypatch.setattr(hub, "_FIRST_BYTES", 100)
    assert hub.remote_model(chosen()).vocab_size == read_model(target).vocab_size
    server.cuts = [5000]
    (path,) = fetch(chosen())
    assert path.read_bytes() == target.read_bytes()


@pytest.mark.parametrize("at", [0, 1, 1000, 50_000])
def test_a_connection_that_is_cut_goes_on_from_there(at: int, server: HubServer, target: Path) -> None:
    server.cuts = [at, 7]
    (path,) = fetch(chosen())
    assert path.read_bytes() == target.read_bytes()
    assert server.sent == target.stat().st_size


@pytest.mark.parametrize("at", [1, 4097, 50_000])
def test_a_pull_that_is_stopped_goes_on_from_there(
    at: int, server: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_CHUNK", 1000)

    def stop(here: int) -> None:
        if here >= at:
            raise KeyboardInterrupt

    (pending,) = hub.prepare([chosen()])
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(pending, stop)
    (again,) = hub.prepare([chosen()])
    assert again.here >= at
    before = server.sent
    path = hub.fetch(again, lambda _here: None)
    assert path.read_bytes() == target.read_bytes()
    assert server.sent - before == target.stat().st_size - again.here


def test_two_pulls_at_once_make_one_file(server: HubServer, target: Path) -> None:
    found: list[Path] = []
    pending = hub.prepare([chosen()]) * 2
    threads = [threading.Thread(target=lambda one=one: found.append(hub.fetch(one, lambda _: None))) for one in pending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == target.read_bytes() for path in found] == [True, True]
    assert server.sent == target.stat().st_size


@pytest.mark.parametrize("fault", ["stated", "changed", "longer", "shorter"])
def test_what_is_not_what_the_hub_states_is_named_and_removed(fault: str, server: HubServer) -> None:
    repo = server.repos[REPO]
    if fault == "stated":
        repo.stated["tiny-Q4_K_M.gguf"] = "0" * 64
    (pending,) = hub.prepare([chosen()])
    data = repo.files["tiny-Q4_K_M.gguf"]
    changed = {"stated": data, "changed": data[:-1] + b"x", "longer": data + b"more", "shorter": data[:-4]}
    repo.files["tiny-Q4_K_M.gguf"] = changed[fault]
    with pytest.raises(DownloadError, match=r"tiny-Q4_K_M\.gguf"):
        hub.fetch(pending, lambda _here: None)
    blobs = list(Path(constants.HF_HUB_CACHE).rglob("blobs/*"))
    assert all(path.name.endswith(".incomplete") and path.stat().st_size < len(data) for path in blobs)
    assert hub.cached(HubRef(REPO)) is None


def test_trouble_that_passes(server: HubServer, target: Path) -> None:
    server.answers = [(429, {"Retry-After": "0"}), (503, {})]
    (path,) = fetch(chosen())
    assert path.read_bytes() == target.read_bytes()


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "does not accept the token"), (403, "may not read"), (404, "there is no such"), (418, "answers 418")],
)
def test_trouble_that_stays(status: int, said: str, server: HubServer) -> None:
    server.api_answers = [(status, {"X-Error-Code": "RepoNotFound"} if status == 404 else {})]
    with pytest.raises((DownloadError, NotFoundError), match=said):
        hub.open_repo(HubRef(REPO))


def test_what_is_not_there(server: HubServer) -> None:
    with pytest.raises(NotFoundError, match="no/such: there is no such repository, or it is private") as error:
        hub.open_repo(HubRef("no/such"))
    assert "hf auth login" in (error.value.hint or "")
    with pytest.raises(NotFoundError, match="has no such revision"):
        hub.open_repo(HubRef(REPO, revision="v9"))
    with pytest.raises(NotFoundError, match="has no Q8_0"):
        chosen(quant="Q8_0")
    remote = chosen()
    server.repos[REPO].files.pop("tiny-Q4_K_M.gguf")
    with pytest.raises(NotFoundError, match="is not there"):
        hub.prepare([remote])


def test_gated_repositories(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos[REPO].gated = True
    server.logged_in = {"good"}
    with pytest.raises(DownloadError, match="nobody is logged in") as error:
        hub.prepare([chosen()])
    assert f"{server.url}/{REPO}" in (error.value.hint or "")
    monkeypatch.setenv("HF_TOKEN", "bad")
    with pytest.raises(DownloadError, match="has not been let in"):
        hub.prepare([chosen()])
    monkeypatch.setenv("HF_TOKEN", "good")
    assert fetch(chosen())  # and the token did not follow to the host of the files, which refuses it


def test_no_hub(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = chosen()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}")
    with pytest.raises(DownloadError, match="cannot be reached"):
        hub.open_repo(HubRef(REPO))
    monkeypatch.setattr(constants, "ENDPOINT", "http://no-such-host.invalid")
    with pytest.raises(DownloadError, match="cannot be resolved"):
        hub.open_repo(HubRef(REPO))
    assert remote.name == f"{REPO}:Q4_K_M"


def test_no_network_is_wanted(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        hub.open_repo(HubRef(REPO))


def test_a_disk_without_room_is_refused_with_figures(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = hub.prepare([chosen()])
    hub.require_disk(pending)
    monkeypatch.setattr(hub, "SPARE_BYTES", 1 << 60)
    with pytest.raises(UnfitError, match=r"has \d+\.\d GiB free, and 0\.0 GiB are to come"):
        hub.require_disk(pending)
    fetch(chosen())
    hub.require_disk(hub.prepare([chosen()]))  # nothing is to come


@pytest.mark.parametrize(
    ("code", "said"),
    [(28, "the disk is full"), (13, "cannot be written"), (30, "cannot be written"), (36, "too long"), (5, "Input/output")],
)
def test_disks_that_fail_midway(code: int, said: str, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def stream(_url: str, _start: int, _size: int) -> Iterator[bytes]:
        yield b"GGUF"
        raise OSError(code, os.strerror(code))

    (pending,) = hub.prepare([chosen()])
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_stream", stream)
        with pytest.raises(DownloadError, match=said):
            hub.fetch(pending, lambda _here: None)
    (again,) = hub.prepare([chosen()])
    assert again.here == 4  # what came is kept


@pytest.mark.parametrize(
    "name",
    ["../../x-Q4_0.gguf", "/etc/x-Q4_0.gguf", "a/../../x.gguf", "x\0.gguf", "c:\\x.gguf", "a//x.gguf", "x" * 300 + ".gguf"],
)
def test_names_from_a_server_stay_in_the_cache(name: str, server: HubServer) -> None:
    server.extra_paths = [name]
    assert [variant.path for variant in hub.open_repo(HubRef(REPO)).models] == ["tiny-Q4_K_M.gguf"]


def test_split_models_are_one(server: HubServer, target: Path) -> None:
    data = target.read_bytes()
    server.repos["you/split"] = HubRepo({f"s/m-Q8_0-0000{i}-of-00002.gguf": data + bytes(i) for i in (1, 2)})
    paths = fetch(chosen("you/split"))
    assert [path.name for path in paths] == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert hub.cached(HubRef("you/split", "Q8_0")) == paths[0]
    paths[1].unlink()
    assert hub.cached(HubRef("you/split", "Q8_0")) is None


def test_removing_leaves_what_others_use(server: HubServer, target: Path) -> None:
    (path,) = fetch(chosen())
    newer = path.parents[1] / ("d" * 40) / path.name
    newer.parent.mkdir()
    newer.symlink_to(re.sub(COMMIT, "d" * 40, str(path.readlink())))
    other = path.with_name("another-Q4_K_M.gguf")
    other.symlink_to(path.readlink())
    paths, freed = hub.remove(path)
    assert (sorted(paths), freed) == (sorted([path, newer]), 0)  # another name still needs the blob
    other.unlink()
    paths, freed = hub.remove(path)
    assert paths[-1] == path.resolve()
    assert freed == target.stat().st_size
    hub.delete(paths)
    assert not path.parents[2].exists()
    with pytest.raises(UnfitError, match="is not in the cache"):
        hub.remove(target)


def test_a_link_out_of_the_cache_is_not_followed(server: HubServer, target: Path) -> None:
    (path,) = fetch(chosen())
    path.unlink()
    path.symlink_to(target)
    paths, freed = hub.remove(path)
    assert (paths, freed) == ([path], 0)
    hub.delete(paths)
    assert target.exists()
