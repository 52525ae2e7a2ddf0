"""Which file names are models, of which quantization, in how many parts; and which one is meant."""

from __future__ import annotations

import pytest

from llamaspec.errors import NotFoundError
from llamaspec.gguf_names import RepoFile, choose, is_model, order, quant_of, variants


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("qwen2.5-coder-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("model.Q5_K_S.gguf", "Q5_K_S"),
        ("sub/x-IQ2_XXS-00001-of-00002.gguf", "IQ2_XXS"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("q-bf16.gguf", "BF16"),
        ("q-fp16.gguf", "FP16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model.gguf", ""),
        ("Q4.5-model.gguf", ""),
    ],
)
def test_quantization_from_the_name(name: str, quant: str) -> None:
    assert quant_of(name) == quant


@pytest.mark.parametrize("name", ["mmproj-model-f16.gguf", "gemma-mmproj-BF16.gguf", "x.imatrix.gguf", "imatrix.gguf", "a.bin"])
def test_companions_are_no_models(name: str) -> None:
    assert not is_model(name)


def files(*names: str) -> list[RepoFile]:
    return [RepoFile(name, 1000 + i) for i, name in enumerate(names)]


def test_parts_make_one_model_and_missing_ones_are_counted() -> None:
    names = ("b/m-Q4_K_M-00002-of-00002.gguf", "b/m-Q4_K_M-00001-of-00002.gguf", "m-Q8_0-00001-of-00003.gguf")
    lacking, whole = variants(files(*names, "mmproj-f16.gguf"))
    assert whole.path == "b/m-Q4_K_M-00001-of-00002.gguf"
    assert (len(whole.files), whole.missing, whole.total_bytes) == (2, 0, 2001)
    assert (lacking.quant, lacking.missing) == ("Q8_0", 2)
    with pytest.raises(NotFoundError, match="lacks 2 of its parts"):
        choose([whole, lacking], "you/m", quant="q8_0")


def test_what_is_meant() -> None:
    found = variants(files("m-Q2_K.gguf", "m-Q3_K_M.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"))
    assert choose(found, "r").quant == "Q4_K_M"
    assert choose(found, "r", quant="q8_0").quant == "Q8_0"
    assert choose(found, "r", file="m-Q2_K.gguf").quant == "Q2_K"
    with pytest.raises(NotFoundError) as error:
        choose(found, "you/m", quant="Q5_K_M")
    assert error.value.hint == "there is Q2_K, Q3_K_M, Q4_K_M, Q8_0"
    with pytest.raises(NotFoundError) as error:
        choose(found, "you/m", file="m-Q4_K_S.gguf")
    assert "m-Q4_K_M.gguf" in (error.value.hint or "")
    with pytest.raises(NotFoundError, match="no GGUF models"):
        choose([], "you/m")


def test_the_default_is_the_nearest_below_that_fits() -> None:
    found = variants(files("m-Q2_K.gguf", "m-Q3_K_S.gguf", "m-Q3_K_L.gguf", "m-Q4_K_S.gguf", "m-Q6_K.gguf"))
    assert choose(found, "r").quant == "Q4_K_S"
    assert choose(found, "r", memory=1002).quant == "Q3_K_L"
    assert choose(found, "r", memory=5).quant == "Q2_K"  # nothing fits: the smallest, and the plan says so
    assert choose(variants(files("m-Q8_0.gguf", "m-F16.gguf")), "r").quant == "Q8_0"


def test_two_of_one_quantization_are_not_guessed_between() -> None:
    found = variants(files("a-Q4_K_M.gguf", "b-Q4_K_M.gguf"))
    with pytest.raises(NotFoundError, match=r"a-Q4_K_M\.gguf, b-Q4_K_M\.gguf"):
        choose(found, "you/two")


def test_order() -> None:
    mixed = ["F16", "Q4_K_M", "Q2_K", "Q8_0", "IQ3_XXS", "Q4_K_S", "Q5_0", "Q3_K_L"]
    assert sorted(mixed, key=order) == ["Q2_K", "IQ3_XXS", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_0", "Q8_0", "F16"]
