"""`pull`, `list`, `pairs`, `rm`, and names where a model is expected: the installed program against a Hub on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubRepo, HubServer
from tests.tiny import letters, write_tiny

Done = subprocess.CompletedProcess[str]
Program = Callable[..., Done]


@pytest.fixture
def server(target: Path, near_draft: Path, models: Path) -> Iterator[HubServer]:
    other = write_tiny(models / "cli-other.gguf", words=[*letters(18), b"y", b"z"], layers=1)
    with HubServer() as one:
        one.repos["you/tiny-GGUF"] = HubRepo(
            {"tiny-Q4_K_M.gguf": target.read_bytes(), "tiny-Q8_0.gguf": target.read_bytes() + b"1"}
        )
        one.repos["you/near-GGUF"] = HubRepo({"near-Q8_0.gguf": near_draft.read_bytes()}, licence="mit")
        one.repos["you/other-GGUF"] = HubRepo({"other-Q8_0.gguf": other.read_bytes()})
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def environment(server: HubServer, tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "config" / "llamaspec" / "models.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        '[pairs.tiny]\ntarget = "you/tiny-GGUF:Q4_K_M"\ndrafts = ["gone/draft:Q8_0", "you/near-GGUF:Q8_0"]\nfamily = "tiny"\n'
        '[pairs.tiny.tuned]\nn_ctx = 256\n[pairs.wrong]\ntarget = "you/tiny-GGUF"\ndrafts = ["you/other-GGUF"]\n'
    )
    mine = {
        "HOME": str(tmp_path),
        "HF_ENDPOINT": server.url,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    drop = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HOME", "LLAMASPEC_MODELS", "LLAMASPEC_DEBUG", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if name not in drop} | mine


@pytest.fixture
def llamaspec(environment: dict[str, str]) -> Program:
    def run(*arguments: str, **more: str) -> Done:
        command = [sys.executable, "-m", "llamaspec", *arguments]
        return subprocess.run(
            command, env=environment | more, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )

    return run


def test_a_newcomer(llamaspec: Program, server: HubServer, tmp_path: Path) -> None:
    missing = llamaspec("run", "tiny", "hello", "-n", "4")
    assert missing.returncode == 3
    assert "try: llamaspec pull tiny" in missing.stderr

    stopped = llamaspec("pull", "wrong")
    assert stopped.returncode == 4
    assert "the vocabularies do not match: token 279 is 's' in the target" in stopped.stderr
    assert not list((tmp_path / "hub").rglob("*.gguf"))

    pulled = llamaspec("pull", "tiny")
    assert pulled.returncode == 0, pulled.stderr
    paths = [Path(line) for line in pulled.stdout.splitlines()]
    assert [path.name for path in paths] == ["tiny-Q4_K_M.gguf", "near-Q8_0.gguf"]
    assert "you/tiny-GGUF:Q4_K_M, 151.0 KiB, apache-2.0" in pulled.stderr
    assert "vocabulary  identical" in pulled.stderr
    assert "memory      fits" in pulled.stderr
    assert "gone/draft: there is no such repository, or it is private: the next draft is taken" in pulled.stderr

    sent = server.sent
    again = llamaspec("pull", "tiny", "--json")
    report = json.loads(again.stdout)
    assert report["paths"] == [str(path) for path in paths]
    assert [one["left_bytes"] for one in report["models"]] == [0, 0]
    assert report["vocabulary"]["verdict"] == "identical"
    assert server.sent == sent

    ran = llamaspec("run", "tiny", "hello", "-n", "4", "--json", "--temp", "0")
    assert ran.returncode == 0, ran.stderr
    settings = json.loads(ran.stdout)["settings"]
    assert settings["n_ctx"] == 256  # as tuned
    assert "near-Q8_0.gguf" in json.dumps(settings)
    by_repository = llamaspec(
        "run", "-hf", "you/tiny-GGUF", "-hfd", "you/near-GGUF:q8_0", "hello", "-n", "4", "-c", "128", "--json"
    )
    assert json.loads(by_repository.stdout)["settings"]["n_ctx"] == 128

    offline = llamaspec("pull", "tiny", HF_HUB_OFFLINE="1")
    assert offline.stdout.split() == [str(path) for path in paths]
    lacking = llamaspec("pull", "you/tiny-GGUF:Q8_0", HF_HUB_OFFLINE="1")
    assert lacking.returncode == 1
    assert "HF_HUB_OFFLINE is set" in lacking.stderr

    listed = json.loads(llamaspec("list", "--json").stdout)["models"]
    assert [(one["name"], one["place"]) for one in listed] == [
        ("you/near-GGUF:Q8_0", "Hugging Face"),
        ("you/tiny-GGUF:Q4_K_M", "Hugging Face"),
    ]
    assert "you/near-GGUF:Q8_0" in llamaspec("pairs", "tiny").stdout
    assert llamaspec("show", "tiny", "--json").stdout.count(str(paths[0]))

    unasked = llamaspec("rm", "tiny")
    assert unasked.returncode == 2
    assert "shared with other programs" in unasked.stderr
    assert "151.0 KiB come free" in unasked.stderr
    assert paths[0].exists()
    assert llamaspec("rm", "tiny", "-y").returncode == 0
    assert not paths[0].exists()
    assert paths[1].exists()
    assert llamaspec("run", "tiny", "hello").returncode == 3


def test_what_is_not_here_is_read_on_the_hub(llamaspec: Program, tmp_path: Path) -> None:
    checked = llamaspec("check", "hf:you/tiny-GGUF", "you/near-GGUF:q8_0", "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["target"] == "you/tiny-GGUF:tiny-Q4_K_M.gguf"
    assert llamaspec("check", "wrong").returncode == 4
    planned = llamaspec("plan", "you/tiny-GGUF", "you/near-GGUF", "--json")
    assert json.loads(planned.stdout)["draft"] == "you/near-GGUF:near-Q8_0.gguf"
    assert llamaspec("show", "you/tiny-GGUF:Q8_0").stdout.startswith("name")
    assert not (tmp_path / "hub").exists()


def test_pull_on_the_way(llamaspec: Program) -> None:
    done = llamaspec("run", "--pull", "tiny", "hello", "-n", "4")
    assert done.returncode == 0, done.stderr
    assert "near-Q8_0.gguf" in done.stderr


def test_a_pull_that_is_interrupted_goes_on(
    llamaspec: Program, environment: dict[str, str], server: HubServer, tmp_path: Path
) -> None:
    data = server.repos["you/tiny-GGUF"].files["tiny-Q4_K_M.gguf"] + bytes(64 << 20)
    server.repos["you/tiny-GGUF"].files["tiny-Q4_K_M.gguf"] = data
    server.pause_after = 40 << 20
    command = [sys.executable, "-m", "llamaspec", "pull", "you/tiny-GGUF"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert server.paused.wait(60)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    server.pause_after = None
    server.go_on.set()
    assert process.returncode == 130, stderr.decode()
    before = server.sent
    done = llamaspec("pull", "you/tiny-GGUF")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == data
    assert server.sent - before < 45 << 20  # the header, and what was left


def test_bad_requests(llamaspec: Program, target: Path) -> None:
    for arguments, code, said in (
        (("pull",), 2, "name one pair or repository"),
        (("pull", str(target)), 2, "is a file"),
        (("pull", "you/tiny-GGUF:Q5_0"), 3, "try: there is Q4_K_M, Q8_0"),
        (("pull", "you/tiny-GGUF", "--file", "tiny-Q4_K_S.gguf"), 3, "tiny-Q4_K_M.gguf"),
        (("pull", "you/tiny-GGUF", "--revision", "v7"), 3, "no such revision"),
        (("pull", "no/such"), 3, "there is no such repository"),
        (("pull", "tini"), 3, "did you mean tiny?"),
        (("pull", "tiny", "--draft", "you/near-GGUF", "--no-draft"), 2, "exclude each other"),
        (("run", "-m", "tiny", "-hf", "you/tiny-GGUF", "hi"), 2, "name the same model"),
        (("show",), 2, "no model"),
        (("rm", str(target), "-y"), 4, "is not in the cache of the Hub"),
        (("check", "you/tiny-GGUF"), 2, "no draft to compare with"),
    ):
        done = llamaspec(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert said in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_quiet_and_dry(llamaspec: Program, tmp_path: Path) -> None:
    dry = llamaspec("pull", "tiny", "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "")
    assert "151.0 KiB" in dry.stderr
    assert not list((tmp_path / "hub").rglob("*.gguf"))
    quiet = llamaspec("pull", "tiny", "-q")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert len(quiet.stdout.splitlines()) == 2


def test_where_things_are(llamaspec: Program, tmp_path: Path) -> None:
    paths = json.loads(llamaspec("show", "--paths", "--json").stdout)["paths"]
    assert paths["pairs, yours"] == [str(tmp_path / "config" / "llamaspec" / "models.toml")]
    assert paths["Hugging Face"] == [str(tmp_path / "hub")]
    assert Path(paths["pairs, packaged"][0]).is_file()
    assert "qwen3-32b" in llamaspec("pairs").stdout


def test_a_mistake_in_the_users_file(llamaspec: Program, tmp_path: Path) -> None:
    (tmp_path / "config" / "llamaspec" / "models.toml").write_text('[pairs.tiny]\ntarget = "u/r"\ndraft = "x"\n')
    done = llamaspec("run", "tiny", "hi")
    assert done.returncode == 2
    assert "models.toml:3: pairs.tiny.draft: unknown key" in done.stderr
    assert "try: did you mean drafts?" in done.stderr
