"""`llamaspec run`: the answer, the summary, the options, bad input, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llamaspec
from llamaspec import Sampling
from llamaspec.cli import cli, output
from llamaspec.llama.context import Context
from tests.conftest import LoadPair
from tests.tiny import letters, write_tiny

GREEDY = ("--temp", "0", "-t", "1")


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", *map(str, arguments)], input=stdin)


def report(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
    done = run("--json", *arguments, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@contextmanager
def start(
    *arguments: object, code: str = "from llamaspec.cli import main; main()", **settings: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The real program, in a process of its own, which does not outlive the test.

    Ctrl+C reaches it even where this process was told to ignore it.
    """
    # llama_cpp leaves two files open
    warnings = ("-W", "error", "-W", "ignore::ResourceWarning")
    command = [sys.executable, *warnings, "-c", code, "run", *map(str, arguments)]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, **(streams | settings))
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.kill()  # leaving waits for its end, and a test that failed must not wait for good


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "LLAMASPEC_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def wordy(models: Path) -> Path:
    """A model that writes letters only, so that marks in the text are the command's own."""
    return write_tiny(models / "wordy.gguf", with_bytes=False)


@pytest.fixture(scope="module")
def other(models: Path) -> Path:
    """A model with another vocabulary than `target`."""
    return write_tiny(models / "another.gguf", words=[*letters(18), b"y", b"z"])


# --- the answer and what is said about it


def test_the_answer_alone_is_on_stdout(target: Path, load_pair: LoadPair) -> None:
    pair = load_pair(target)
    rounds = pair.generate([{"role": "user", "content": "hello"}], sampling=Sampling(temperature=0), max_tokens=30)
    text = "".join(one.text for one in rounds)
    done = run(target, "hello", "-n", 30, *GREEDY)
    assert done.exit_code == 0
    assert done.stdout_bytes == (text if text.endswith("\n") else text + "\n").encode()
    assert "drafted by n-gram lookup, as far as it pays, greedy | 30 tokens in " in done.stderr
    assert "tokens/s" in done.stderr
    assert "speedup" not in done.stderr


def test_a_prompt_comes_from_the_argument_or_from_stdin(wordy: Path) -> None:
    options = (*GREEDY, "-n", 8, "--raw", "-q")
    answers = {
        run(wordy, "abcab", *options).stdout,
        run("-m", wordy, "abcab", *options).stdout,
        run(wordy, "-", *options, stdin="abcab").stdout,
        run(wordy, *options, stdin="abcab\n").stdout,
        run("-m", wordy, *options, stdin="\ufeffabcab\r\n").stdout,
    }
    assert len(answers) == 1
    assert answers != {run(wordy, "abcaa", *options).stdout}


def test_system_and_template(target: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}")
    options = (*GREEDY, "-n", 8, "-q")
    expected = run(target, "(system)be(user)hi", "--raw", *options).stdout
    for given in (template, template.read_text()):
        assert run(target, "hi", "-s", "be", "--chat-template", given, *options).stdout == expected


def test_json_is_one_object_with_everything(target: Path) -> None:
    said = report(target, "hello", "-n", 12, *GREEDY)
    keys = ["schema", "text", "finish_reason", "stats", "baseline", "usage", "settings", "versions", "notices"]
    assert list(said) == keys
    assert said["finish_reason"] == "length"
    assert said["stats"]["generated_tokens"] == 12
    assert said["baseline"] is None
    assert said["settings"]["speculation"]["drafters"] == ["ngram"]
    assert said["settings"]["speculation"]["n_draft"] is None
    assert said["settings"]["max_tokens"] == 12
    assert said["versions"]["llamaspec"] == llamaspec.__version__
    assert set(said["versions"]) == {"llamaspec", "python", "llama_cpp_python", "llama_cpp"}
    assert said["text"] + "\n" == run(target, "hello", "-n", 12, *GREEDY).stdout


def test_the_baseline_is_measured_in_the_same_run(target: Path, near_draft: Path) -> None:
    arguments = (target, "hello", "-md", near_draft, "--baseline", "-n", 30, *GREEDY)
    said = report(*arguments)
    alone = said["baseline"]
    assert alone["stats"]["drafted_tokens"] == 0
    assert alone["stats"]["reused_tokens"] == 0
    assert alone["speedup"] == pytest.approx(said["stats"]["tokens_per_second"] / alone["stats"]["tokens_per_second"])
    assert alone["identical_text"] is (said["text"] == alone["text"])
    done = run(*arguments)
    assert "baseline: " in done.stderr
    assert "speedup " in done.stderr
    assert "its text " in done.stderr


def test_the_baseline_uses_the_same_seed(target: Path) -> None:
    # Nothing is found to draft, so both take the same random numbers.
    said = report(target, "hello", "--ngram-min", 64, "--baseline", "-n", 30, "-t", 1)
    assert said["settings"]["sampling"]["seed"] is not None
    assert said["baseline"]["identical_text"]


def test_a_seed_repeats_the_text(target: Path) -> None:
    texts = [run(target, "hello", "-n", 20, "-q", "-t", 1, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_drafted_text_is_marked(wordy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (wordy, "abc", "--raw", "-md", wordy, "--draft-length", 3, "-n", 9, "-q", *GREEDY)
    text = run(*arguments).stdout
    marked = run(*arguments, "--show-draft").stdout
    assert marked == f"{text[0]}[{text[1:4]}]{text[4]}[{text[5:8]}]{text[8]}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run(*arguments, "--show-draft").stdout
    assert coloured == marked.replace("[", "\x1b[32m").replace("]", "\x1b[0m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(*arguments, "--show-draft").stdout == marked


def test_quiet_and_verbose(target: Path) -> None:
    assert run(target, "hello", "-n", 5, "-q", *GREEDY).stderr == ""
    assert "llama.cpp: " in run(target, "hello", "-n", 5, "-v", *GREEDY).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--no-draft",), "drafting off (as asked)"),
        (("--drafter", "none"), "drafting off (as asked)"),
        (("--draft-length", 0), "drafting off (draft length 0)"),
        (("--draft-length", 4), "drafted by n-gram lookup, n_draft 4"),
        (("--draft-length", 4, "--ngram-min", 64), "nothing to draft was found"),
        (("--ngram-min", 64), "nothing drafted: it would not have paid"),
        (("--reverse-prompt", "zzz"), "the limit set by -n"),
        (("--no-draft", "--p-min", 0.5), "--p-min has no effect: nothing is drafted"),
        (("--draft-temp", 0.5), "--draft-temp has no effect: n-gram lookup drafts"),
    ],
)
def test_it_says_who_drafted_and_what_ended_it(target: Path, arguments: tuple[object, ...], said: str) -> None:
    assert said in run(target, "hello", "-n", 10, *GREEDY, *arguments).stderr


def test_a_draft_model_is_named_with_its_settings(target: Path, near_draft: Path) -> None:
    done = run(target, "hello", "-n", 10, "-t", 1, "-md", near_draft, "--p-min", 0.1, "--draft-temp", 0.6, "--seed", 5)
    assert "drafted by near.gguf and n-gram lookup, as far as it pays, p_min 0.1, draft temperature 0.6" in done.stderr
    assert "temperature 0.8, top-k 40, top-p 0.95, min-p 0.05, seed 5" in done.stderr


def test_a_draft_that_is_not_used_is_not_loaded_and_that_is_said(target: Path, other: Path) -> None:
    done = run(target, "hello", "-n", 10, "-md", other, "--no-draft", *GREEDY)
    assert done.exit_code == 0
    assert "--model-draft has no effect: nothing is drafted" in done.stderr


def test_a_quantized_draft_cache_is_warned_of(tmp_path: Path) -> None:
    said = "a quantized cache of the draft model can ruin acceptance"
    wide = write_tiny(tmp_path / "wide.gguf", width=128)  # heads as wide as a quantized block
    options = (wide, "hello", "-n", 3, "-md", wide, "-fa", "on", *GREEDY)
    assert said in run(*options, "-ctkd", "bf16", "-ctvd", "q8_0").stderr
    assert said not in run(*options, "-ctkd", "bf16").stderr


def test_a_target_that_cannot_roll_back_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "_probe_rollback", lambda self: False)
    done = run(target, "hello", "-n", 5, *GREEDY)
    assert "drafting off (llama cannot be rolled back)" in done.stderr


def test_a_full_context_names_the_option(target: Path) -> None:
    done = run(target, "hello", "-c", 64, *GREEDY)
    assert done.exit_code == 0
    assert "the context of 64 tokens is full: -c enlarges it" in done.stderr
    assert "trained on 512" in done.stderr


def test_context_zero_is_all_the_model_was_trained_on(target: Path) -> None:
    assert report(target, "hello", "-c", 0, "-n", 3, *GREEDY)["settings"]["n_ctx"] == 512


def test_every_option_reaches_its_setting(target: Path, near_draft: Path, tmp_path: Path) -> None:
    grammar = tmp_path / "letters.gbnf"
    grammar.write_text("root ::= [a-t]*")
    options = "-c 128 -ngl 0 -ngld all -mg 0 -sm none -t 1 -fa off -ctk f32 -ctv f16 -ctkd bf16 -ctvd f16 --no-mmap -n 4"
    drafting = "--draft-length 3 --p-min 0.25 --draft-temp 0.5"
    sampling = (
        "--temp 0.7 --top-k 30 --top-p 0.9 --min-p 0.1 --typical 0.8 --xtc-probability 0.2 --xtc-threshold 0.3 "
        "--repeat-penalty 1.1 --frequency-penalty 0.1 --presence-penalty 0.2 --repeat-last-n 32 --dry-multiplier 0.5 "
        "--dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n 16 --dry-sequence-breaker a --dry-sequence-breaker b "
        "--logit-bias 262=1.5 --logit-bias 263+1 --logit-bias 264-2 --logit-bias 265=-inf --seed 3"
    )
    flags = [*options.split(), *drafting.split(), *sampling.split(), "--grammar-file", grammar, "-md", near_draft]
    settings = report(target, "hello", *flags)["settings"]
    in_memory = {
        "n_ctx": 128, "gpu_layers": 0, "draft_gpu_layers": 0, "main_gpu": 0, "split_mode": "none", "threads": 1,
        "flash_attention": "off", "cache_type_k": "f32", "cache_type_v": "f16", "draft_cache_type_k": "bf16",
        "draft_cache_type_v": "f16", "mmap": False, "mlock": False,
    }  # fmt: skip
    assert in_memory.items() <= settings.items()
    assert settings["sampling"] == {
        "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "xtc_probability": 0.2,
        "xtc_threshold": 0.3, "repeat_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "penalty_last_n": 32, "dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 16,
        "dry_sequence_breakers": ["a", "b"], "logit_bias": {"262": 1.5, "263": 1.0, "264": -2.0, "265": "-inf"},
        "seed": 3, "grammar": "root ::= [a-t]*", "json_schema": None,
    }  # fmt: skip
    wanted = {"drafters": ["model"], "n_draft": 3, "p_min": 0.25, "draft_temperature": 0.5}
    assert {name: settings["speculation"][name] for name in wanted} == wanted


def test_lookup_settings_reach_it(target: Path, tmp_path: Path) -> None:
    (tmp_path / "reference.txt").write_text("abcabc")
    flags = (
        "--reference",
        tmp_path / "reference.txt",
        "--ngram-min",
        2,
        "--dry-sequence-breaker",
        "none",
        "-n",
        3,
        "--seed",
        -1,
    )
    settings = report(target, "hello", "-t", 1, *flags)["settings"]
    assert (settings["speculation"]["reference"], settings["speculation"]["ngram_min"]) == ("abcabc", 2)
    assert settings["sampling"]["dry_sequence_breakers"] == []


def test_a_json_schema_is_followed(target: Path) -> None:
    assert report(target, "hello", "-j", '{"const": "ab"}', *GREEDY)["text"].strip() == '"ab"'


# --- bad input


def _damaged(folder: Path, target: Path) -> dict[str, Path]:
    data = target.read_bytes()
    contents = {
        "page": b"<!doctype html><html></html>",
        "empty": b"",
        "header": data[:100],
        "tensors": data[: len(data) // 2],
        "last": data[:-1],
        "version": data[:4] + b"\x09\0\0\0" + data[8:],
        "endian": data[:4] + b"\0\0\0\x03" + data[8:],
    }
    paths = {name: folder / f"{name}.gguf" for name in contents}
    for name, path in paths.items():
        path.write_bytes(contents[name])
    return paths


@pytest.mark.parametrize("kind", ["page", "empty", "header", "tensors", "last", "version", "endian"])
def test_a_file_that_is_no_model(kind: str, target: Path, tmp_path: Path) -> None:
    path = _damaged(tmp_path, target)[kind]
    for arguments in ((path, "hello"), (target, "hello", "-md", path)):
        done = run(*arguments)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("llamaspec: error: ")
        assert str(path) in done.stderr
        assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("none.gguf hello", 3, "there is no file none.gguf"),
        ("TARGET hello -md none.gguf", 3, "there is no file none.gguf"),
        ("TARGET hello --grammar-file none.gbnf", 3, "there is no file none.gbnf"),
        ("TARGET hello --chat-template none.jinja", 3, "there is no file none.jinja"),
        ("FOLDER hello", 1, "is a folder"),
        ("TARGET hello -md OTHER", 4, "the vocabularies do not match"),
        ("TARGET LONG -c 64", 2, "the context 64"),
        ("TARGET hello --draft-length 1000", 2, "n_draft is 1000"),
        ("TARGET hello --draft-length -1", 2, "n_draft is -1"),
        ("TARGET hello --grammar nonsense", 2, "the grammar does not parse"),
        ("TARGET hello -j {", 2, "the JSON schema is not JSON"),
        ("TARGET hello -j 5", 2, "neither an object nor"),
        ('TARGET hello -j {"type":"nonsense"}', 2, "cannot be turned into a grammar"),
        ("TARGET hello -j {} --json-schema-file x", 2, "exclude each other"),
        ("TARGET hello -j {} --grammar x", 2, "exclude each other"),
        ("TARGET hello --chat-template {{", 2, "the chat template does not compile"),
        ("TARGET hello --nonsense", 2, "no such option"),
        ("TARGET hello --temp", 2, "requires an argument"),
        ("TARGET hello --temp warm", 2, "is not a valid float"),
        ("TARGET hello --temp nan", 2, "temperature is nan"),
        ("TARGET hello --temp 1e-40", 2, "temperature is 1e-40: it takes 0, which is greedy"),
        ("TARGET hello --draft-length some", 2, "'some' is not a number of tokens, or auto"),
        ("TARGET hello --top-p 2", 2, "top_p is 2.0"),
        ("TARGET hello --seed -2", 2, "seed is -2"),
        ("TARGET hello -n 0", 2, "max_tokens is 0"),
        ("TARGET hello -c 2", 2, "n_ctx is 2"),
        ("TARGET hello -t 0", 2, "threads is 0"),
        ("TARGET hello -ngl some", 2, "not a number of layers, all or auto"),
        ("TARGET hello -ctk q9", 2, "'q9' is not one of"),
        ("TARGET hello --logit-bias nonsense", 2, "is not ID=BIAS"),
        ("TARGET hello --logit-bias 5=nan", 2, "logit_bias of token 5 is nan"),
        ("TARGET hello --logit-bias 99999=1", 2, "logit_bias names token 99999"),
        ("TARGET hello --drafter model", 2, "needs a draft model"),
        ("TARGET hello --drafter ngram --no-draft", 2, "exclude each other"),
        ("TARGET hello --baseline --no-draft", 2, "nothing to compare with"),
        ("TARGET hello --json --show-draft", 2, "--json and --show-draft exclude each other"),
        ("TARGET hello --raw -s be", 2, "--raw and --system exclude each other"),
        ("TARGET hello world", 2, "2 prompts"),
        ("TARGET -", 2, "the prompt is empty"),
        ("-m TARGET", 2, "the prompt is empty"),
        ("", 2, "no model"),
    ],
)
def test_bad_input(arguments: str, code: int, said: str, target: Path, other: Path) -> None:
    words = {"TARGET": target, "OTHER": other, "FOLDER": target.parent, "LONG": "word " * 100}
    done = run(*(words.get(word, word) for word in arguments.split()))
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.startswith("llamaspec: error: ")
    assert 1 <= len(done.stderr.splitlines()) <= 2


def test_what_does_not_fit_is_refused_with_the_table(target: Path) -> None:
    done = run(target, "hello", "-c", 2000000000)
    assert (done.exit_code, done.stdout) == (4, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("llamaspec: error: target.gguf does not fit: ")
    assert lines[1].split() == ["MiB", "CPU"]
    assert any(line.startswith("target KV cache") for line in lines)
    assert lines[-1].startswith("try: -c 512 fits")


def test_no_prompt_on_a_terminal(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    done = run(target)
    assert done.exit_code == 2
    assert done.stderr.startswith("llamaspec: error: no prompt\ntry: give one behind the model")


def test_text_that_is_not_utf8(target: Path, tmp_path: Path) -> None:
    done = run(target, stdin=b"caf\xe9")
    assert done.exit_code == 2
    assert "the prompt on stdin is not UTF-8: byte 3 is 0xe9" in done.stderr
    (tmp_path / "reference.txt").write_bytes(b"\xff")
    assert run(target, "hello", "--reference", tmp_path / "reference.txt").exit_code == 2


def test_an_argument_that_is_not_utf8(target: Path) -> None:
    with start(target, b"caf\xe9".decode(errors="surrogateescape")) as process:
        _, stderr = process.communicate()
    assert process.returncode == 2
    assert b"the prompt is not UTF-8: byte 3 is 0xe9" in stderr


# --- pipes and Ctrl+C, on the real program


def test_a_locale_without_unicode_is_no_error(target: Path) -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    with start(target, "hello", "-n", 20, *GREEDY, env=environment) as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout.decode() == run(target, "hello", "-n", 20, *GREEDY).stdout_bytes.decode()


def test_a_reader_that_leaves_ends_it_quietly(target: Path) -> None:
    with start(target, "hello", "-c", 100_000, "-q", *GREEDY) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error(target: Path) -> None:
    with open("/dev/full", "wb") as full, start(target, "hello", "-n", 5, "-q", *GREEDY, stdout=full) as process:
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert stderr == b"llamaspec: error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_the_answer_and_sums_up(times: int, target: Path) -> None:
    with start(target, "hello", "-c", 100_000, *GREEDY) as process:
        assert process.stdout is not None
        beginning = process.stdout.read(10)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert (beginning + rest).endswith(b"\n")
    assert b"tokens per round" in stderr
    assert b"Traceback" not in stderr


def test_ctrl_c_with_json_still_gives_the_object(target: Path) -> None:
    with start(target, "hello", "-c", 100_000, "--json", *GREEDY, code=SIGNAL_AFTER_A_ROUND) as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    said = json.loads(stdout)
    assert said["finish_reason"] is None
    assert said["stats"]["generated_tokens"] >= 1


SIGNAL_AFTER_A_ROUND = """
import os, signal
from llamaspec.decoding.stats import Stats
from llamaspec.cli import main
add = Stats.add
def adding(self, one):
    if one.prefill is None:
        os.kill(os.getpid(), signal.SIGINT)
    return add(self, one)
Stats.add = adding
main()
"""

HANG = """
import sys, threading
from llamaspec.cli import main
from llamaspec.engine import Pair
from llamaspec.errors import Cancelled
from llamaspec.llama.context import Context

def hang(flag):
    pause = threading.Event()
    sys.stdout.write("at work\\n")
    sys.stdout.flush()
    while not flag.is_set:
        pause.wait(0.001)
    sys.stdout.write("stopped\\n")
    sys.stdout.flush()
"""

HANG_IN_LOAD = f"""{HANG}
def report(self, which):
    return lambda fraction: hang(self._cancel)
Pair._report = report
main()
"""

HANG_IN_PREFILL = f"""{HANG}
def decode(self, tokens, outputs):
    if outputs == "none":
        self.tokens.extend(tokens)
        return
    hang(self._cancel)
    raise Cancelled("stopped")
Context.decode = decode
main()
"""


@pytest.mark.parametrize("code", [HANG_IN_LOAD, HANG_IN_PREFILL])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_before_there_is_an_answer(code: str, times: int, target: Path) -> None:
    with start(target, "hello", *GREEDY, code=code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert stdout == b"stopped\n"
    assert stderr.strip() == b""


def test_a_failure_in_the_middle_keeps_the_answer(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object, **__: object) -> Iterator[llamaspec.Round]:
        yield llamaspec.Round((5,), ("half",))
        raise llamaspec.errors.RuntimeFailure("llama.cpp could not decode")

    monkeypatch.setattr(llamaspec.Pair, "generate", break_off)
    done = run(target, "hello", *GREEDY)
    assert done.exit_code == 1
    assert done.stdout == "half\n"
    assert "| 1 token in " in done.stderr
    assert done.stderr.endswith("llamaspec: error: llama.cpp could not decode\n")


def test_hostile_output_is_shown_harmless_on_a_terminal(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_escapes(*_: object, **__: object) -> Iterator[llamaspec.Round]:
        yield llamaspec.Round((5,), ("\x1b]0;title\x07",), finish_reason="stop")

    monkeypatch.setattr(llamaspec.Pair, "generate", write_escapes)
    assert run(target, "hello", "-q").stdout == "\x1b]0;title\x07\n"
    monkeypatch.setattr(output, "is_terminal", lambda stream: stream is sys.stdout)
    assert run(target, "hello", "-q").stdout == "\\u001b]0;title\\u0007\n"


def test_explain_tells_costs_acceptance_and_the_limit(target: Path, near_draft: Path) -> None:
    said = run(target, "abcabcabc", "-n", 60, "-md", near_draft, "--explain", *GREEDY).stderr
    for part in (
        "a token of the target alone: ",
        "a token of the draft model: ",
        "rounds drafted by ",
        "what limits most: ",
        "accepted of ",
    ):
        assert part in said
    alone = run(target, "abcabcabc", "-n", 60, "--explain", *GREEDY).stderr
    assert "a token of the draft model" not in alone
    assert "what limits most: " in alone


@pytest.mark.parametrize("options", [("--no-draft",), ("--draft-length", 4)])
def test_explain_says_when_there_is_nothing_to_tell(target: Path, options: tuple[object, ...]) -> None:
    assert "--explain has nothing to tell" in run(target, "hello", "-n", 5, "--explain", *options, *GREEDY).stderr


def test_json_holds_what_was_decided_on(target: Path) -> None:
    stats = report(target, "abcabcabc", "-n", 60, *GREEDY)["stats"]
    assert stats["decisions"]["plain_seconds"] > 0
    assert stats["decisions"]["verify"]["1"] == 1.0
    assert sum(stats["rounds_by"].values()) == stats["rounds"]


def test_json_tells_what_the_machine_did(target: Path) -> None:
    usage = json.loads(run(target, "hello", "-n", 8, "--json").stdout)["usage"]
    assert usage["peak_resident_bytes"] > 2**20
    assert usage["seconds"] >= 0
    assert usage["throttles"] == []
