"""`llamaspec show`: what a GGUF file says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llamaspec.cli import arguments, output
from llamaspec.cli.output import human_bytes
from llamaspec.errors import ModelFileError, UsageError

if TYPE_CHECKING:
    from llamaspec.gguf_header import MetaValue, ModelInfo

_USUAL_CONTEXT = 4096
_VALUE_CHARACTERS = 70


@click.command("show", short_help="What is in a GGUF file.")
@click.argument("file", metavar="MODEL", required=False)
@click.option("--paths", is_flag=True, help="Print where models, settings and caches are looked for, and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--template", is_flag=True, help="Print the chat template and nothing else.")
@click.option("-v", "--verbose", is_flag=True, help="All metadata, too.")
def command(file: str | None, paths: bool, as_json: bool, template: bool, verbose: bool) -> None:
    """Show what MODEL, a GGUF file or a name, says about itself: its header is read, its weights are not.

    A model that is not here is read on the Hugging Face Hub.
    """
    if paths:
        _show_paths(as_json)
        return
    if file is None:
        raise UsageError("no model", "llamaspec show model.gguf; llamaspec list shows what is here")
    model = arguments.header(file)
    if template and not as_json:
        if model.chat_template is None:
            raise ModelFileError(f"{model.path} has no chat template")
        output.write(model.chat_template.removesuffix("\n") + "\n")
    elif as_json:
        output.write_json(_report(model) | ({"metadata": _metadata(model)} if verbose else {}))
    else:
        output.write_lines(output.table(_rows(model)))
        if verbose:
            output.write("\n")
            output.write_lines(output.table([(output.one_line(k), v) for k, v in _metadata_rows(model)]))


def _show_paths(as_json: bool) -> None:
    import platformdirs

    from llamaspec.catalog import PACKAGED, user_file
    from llamaspec.shelf import places

    named = {"pairs, packaged": [PACKAGED.resolve()], "pairs, yours": [user_file()]}
    named |= places() | {"caches": [platformdirs.user_cache_path("llamaspec")]}
    if as_json:
        output.write_json({"paths": {label: [str(path) for path in found] for label, found in named.items()}})
        return
    rows = [
        (label, "\n".join(output.one_line(str(path)) + ("" if path.exists() else "  (not there)") for path in found) or "none")
        for label, found in named.items()
    ]
    output.write_lines(output.table(rows))


def _report(model: ModelInfo) -> dict[str, Any]:
    per_token = model.kv_bytes_per_token()
    return {
        "path": str(model.path),
        "files": [str(path) for path in model.files],
        "name": model.name,
        "architecture": model.architecture,
        "family": model.family,
        "licence": model.licence,
        "total_bytes": model.total_bytes,
        "tensor_bytes": model.tensor_bytes,
        "parameters": model.parameters,
        "quantization": model.quantization,
        "context_length": model.context_length,
        "block_count": model.block_count,
        "embedding_length": model.embedding_length,
        "head_count": model.head_count,
        "head_count_kv": model.head_count_kv,
        "expert_count": model.expert_count,
        "expert_used_count": model.expert_used_count,
        "sliding_window": model.sliding_window,
        "mtp_layers": model.nextn_layers,
        "is_draft_head": model.is_draft_head,
        "has_weights": model.has_weights,
        "kv_cache_type": "f16",
        "kv_bytes_per_token": per_token,
        "kv_bytes_full_context": per_token * model.context_length,
        "vocab_size": model.vocab_size,
        "tokenizer_model": model.tokenizer_model,
        "tokenizer_pre": model.tokenizer_pre,
        "special_tokens": {name: {"id": i, "text": _token(model, i)} for name, i in model.special_tokens.items()},
        "chat_template": model.chat_template,
        "chat_templates": model.chat_templates,
    }


def _rows(model: ModelInfo) -> list[tuple[str, str]]:
    tokenizer = ", ".join(filter(None, (model.tokenizer_model, model.tokenizer_pre)))
    rows: list[tuple[str, str | None]] = [
        ("name", model.name),
        ("file", str(model.path)),
        ("parts", "".join(f"{path.name}\n" for path in model.files).rstrip() if model.split_count > 1 else None),
        ("architecture", model.architecture),
        ("kind", "a draft head: it works only inside the model it was made for" if model.is_draft_head else None),
        ("licence", model.licence),
        ("size", f"{human_bytes(model.total_bytes)} ({model.total_bytes} bytes)"),
        ("parameters", _human_count(model.parameters) if model.has_weights else "none: a vocabulary only"),
        ("quantization", model.quantization),
        ("context", f"{model.context_length} tokens"),
        ("layers", f"{model.block_count}, {model.embedding_length} wide"),
        ("heads", f"{model.head_count}, {model.head_count_kv} for keys and values" if model.head_count else None),
        ("experts", f"{model.expert_count}, {model.expert_used_count} used at a time" if model.expert_count else None),
        ("window", f"{model.sliding_window} tokens, in the layers that have one" if model.sliding_window else None),
        ("MTP layers", str(model.nextn_layers) if model.nextn_layers else "none"),
        ("KV cache", _cache(model)),
        ("vocabulary", f"{model.vocab_size} tokens ({tokenizer})"),
        ("special", ", ".join(f"{name} {i} {_token(model, i)!r}" for name, i in model.special_tokens.items()) or "none"),
        ("template", _template(model)),
    ]
    return [(label, value if label == "parts" else output.one_line(value)) for label, value in rows if value is not None]


def _cache(model: ModelInfo) -> str:
    per_token = model.kv_bytes_per_token()
    if not per_token:
        return "none: its state does not grow with the text"
    sizes = sorted({min(_USUAL_CONTEXT, model.context_length), model.context_length})
    costs = ", ".join(f"{human_bytes(per_token * size)} for {size}" for size in sizes)
    most = "; less where the window saves" if model.sliding_window else ""
    return f"{per_token} bytes per token in f16: {costs}{most}"


def _template(model: ModelInfo) -> str:
    more = f" (and others: {', '.join(model.chat_templates)})" if model.chat_templates else ""
    if model.chat_template is None:
        return f"none{more}"
    lines = model.chat_template.strip().splitlines() or [""]
    return f"{len(lines)} line{'s' * (len(lines) > 1)}, begins {_short(lines[0])}{more}"


def _token(model: ModelInfo, token: int) -> str:
    return model.tokens[token].decode("utf-8", "replace") if token < len(model.tokens) else ""


def _metadata(model: ModelInfo) -> dict[str, Any]:
    """Key to value for JSON; of arrays the type and the length."""
    types = model.headers[0].types
    return {
        key: value if isinstance(value, str | int | float) else {"type": types[key], "length": len(value)}
        for key, value in model.metadata.items()
    }


def _metadata_rows(model: ModelInfo) -> list[tuple[str, str]]:
    return [(key, _value(value, model.headers[0].types[key])) for key, value in model.metadata.items()]


def _value(value: MetaValue, kind: str) -> str:
    if isinstance(value, str):
        return _short(value)
    return str(value) if isinstance(value, int | float) else f"{kind}, {len(value)} values"


def _short(text: str) -> str:
    text = output.one_line(text)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"


def _human_count(count: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
