"""models.toml: what it says, what a user's own adds, and how mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec.catalog import HubRef, is_path, line_of, load_catalog, parse_hub, read_pairs, user_file
from llamaspec.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = user_file()
    path.parent.mkdir(parents=True)
    return path


def test_the_packaged_pairs_say_why_their_vocabularies_are_shared() -> None:
    pairs = load_catalog().pairs
    with_drafts = [entry for entry in pairs.values() if entry.drafts]
    assert len(with_drafts) >= 12
    assert all(entry.vocabulary and entry.licence and entry.family and entry.parameters_b for entry in with_drafts)
    assert {"demo", "qwen2.5-coder-32b", "qwen3-32b", "gemma-3-27b", "llama-3.3-70b", "devstral-small-24b"} <= set(pairs)


def test_names_aliases_beginnings() -> None:
    catalog = load_catalog()
    assert catalog.find("Coder-32B") is catalog.pairs["qwen2.5-coder-32b"]
    assert catalog.find("devstral-small") is catalog.pairs["devstral-small-24b"]
    assert catalog.find("nothing-like-it") is None
    assert catalog.near("qwen3-23b")[0].startswith("qwen3")
    with pytest.raises(UsageError, match=r"qwen2\.5-coder-32b, qwen2\.5-coder-14b, qwen2\.5-coder-7b"):
        catalog.find("qwen2.5-coder")


def test_a_users_file_adds_and_overrides_key_by_key(config: Path) -> None:
    config.write_text(
        '[pairs.mine]\ntarget = "~/m.gguf"\ndrafts = ["you/d:Q8_0"]\naliases = ["m"]\n'
        '[pairs."qwen3-8b"]\ndrafts = ["you/other:Q4_0"]\n'
        '[pairs."qwen3-8b".tuned]\nn_draft = 4\np_min = 0.5\ncache_type_k = "q8_0"\nspeedup = 1.7\ndate = 2026-11-02\n'
    )
    catalog = load_catalog()
    mine = catalog.find("m")
    assert mine is not None
    assert mine.target == Path("~/m.gguf").expanduser()
    assert mine.drafts == (HubRef("you/d", "Q8_0"),)
    theirs = catalog.pairs["qwen3-8b"]
    assert theirs.target == HubRef("Qwen/Qwen3-8B-GGUF", "Q4_K_M")
    assert theirs.drafts == (HubRef("you/other", "Q4_0"),)
    assert theirs.tuned.settings() == {"n_draft": 4, "p_min": 0.5, "cache_type_k": "q8_0"}
    assert (theirs.tuned.date, theirs.source) == ("2026-11-02", config)


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ('[pairs.a]\ntarget = "u/r"\ndraft = []\n', ":3: pairs.a.draft: unknown key", "did you mean drafts?"),
        ('[pairs.a]\nnotes = "x"\n', ":1: pairs.a: has no target", None),
        ("[pairs.a]\n\ntarget = 5\n", ":3: pairs.a.target: 5 is no text", None),
        ('[pairs.a]\ntarget = "no repo"\n', ":2: pairs.a.target: 'no repo' is neither \"user/repo:QUANT\" nor a path", None),
        ('[pairs.a]\ntarget = "u/r"\ndrafts = "u/d"\n', ":3: pairs.a.drafts: 'u/d' is no list of texts", None),
        ('[pairs.a]\ntarget = "u/r"\n[pairs.a.tuned]\nn_drafts = 3\n', ":4: pairs.a.tuned.n_drafts: unknown key", "n_draft?"),
        ('[pairs.a]\ntarget = "u/r"\ntuned = {n_draft = -1}\n', ":3: pairs.a.tuned.n_draft: -1 is no whole number", None),
        ('[pairs.a]\ntarget = "u/r"\ntuned.cache_type_k = "q9"\n', ":3: pairs.a.tuned.cache_type_k: 'q9' is none of", None),
        ('[pairs.a]\ntarget = "u/r"\nparameters_b = true\n', ":3: pairs.a.parameters_b: True is no number", None),
        ('[pairs."a b"]\ntarget = "u/r"\n', ':1: pairs."a b": a name has letters', None),
        ('[pair.a]\ntarget = "u/r"\n', ":1: pair: unknown key pair", "did you mean pairs?"),
        ('[pairs.a]\ntarget = "u/r"\naliases = ["demo"]\n', ":3: pairs.a.aliases: demo already stands for demo", None),
        ("[pairs.a\n", "is no TOML: Expected ']' at the end of a table declaration (at line 1", None),
        ("pairs = 3\n", ":1: pairs: pairs is no table", None),
    ],
)
def test_mistakes_are_told_with_file_line_and_key(text: str, said: str, hint: str | None, config: Path) -> None:
    config.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_catalog()
    assert str(config) in error.value.message
    assert said in error.value.message
    assert hint is None or hint in (error.value.hint or "")


def test_a_file_that_cannot_be_read(config: Path) -> None:
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_catalog()


def test_lines_within_long_texts_are_no_keys() -> None:
    text = '[pairs.a]\nnotes = """\ntarget = 1\n"""\ntarget = "u/r"\n'
    assert line_of(text, ("pairs", "a", "target")) == 5
    assert read_pairs(text, Path("f"), {})["a"].notes == "target = 1\n"


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("user/repo", HubRef("user/repo")),
        ("hf:user/repo:q4_k_m", HubRef("user/repo", "q4_k_m")),
        ("user/repo:dir/f.gguf", HubRef("user/repo", file="dir/f.gguf")),
        (
            "https://hub.example/user/repo/resolve/v2/a/f.gguf?x=1",
            HubRef("user/repo", file="a/f.gguf", revision="v2"),
        ),
        ("https://hub.example/user/repo/tree/main", HubRef("user/repo", revision="main")),
        ("hf.co/user/repo:Q8_0", HubRef("user/repo", "Q8_0")),
        ("../repo", None),
        ("user/repo/deep", None),
        ("user/repo:", None),
        ("one", None),
        ("a b/c", None),
    ],
)
def test_spellings_of_a_repository(text: str, ref: HubRef | None) -> None:
    assert parse_hub(text) == ref


def test_what_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(map(is_path, ("./x", "/x", "~/x", "x.gguf", "dir/x.gguf")))
    assert not any(map(is_path, ("user/repo", "qwen3-8b", "hf:u/x.gguf", "user/repo:f.gguf")))
    (tmp_path / "user" / "repo").mkdir(parents=True)
    assert is_path("user/repo")
