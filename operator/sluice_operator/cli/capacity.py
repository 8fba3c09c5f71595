"""`sluice capacity`: what a backend's memory goes to and how much it can take, before it is applied.

No cluster is asked and nothing is loaded: config.json and the headers of the weights are read. Invariant: the
runtime enforces the same figures (docs/contracts/budget.json).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.table import Table

from ..api import InferenceBackend
from ..api.backend import ModelSource, SpeculationMethod
from ..plan.backend import block_size
from ..plan.budget import Budget, BudgetError, Concurrency, Draft, Engine, budget, concurrency
from ..plan.capacity import in_flight, replicas_for
from ..plan.quantity import num_bytes
from ..plan.stored import CONFIG_NAMES, unread_file
from .common import console, one_line_errors
from .edit import EditError

_MAX_HEADER = 100_000_000
_DRAFT = "spec.engine.speculation.draft"


def capacity(
    file: Annotated[
        Path, typer.Option("--file", "-f", help="InferenceBackend, as YAML.", exists=True, dir_okay=False)
    ],
    model_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory with the model's config.json; default: that of hostPath.", show_default=False
        ),
    ] = None,
    draft_dir: Annotated[
        Path | None,
        typer.Option(
            help="The same of the draft that speculation names; default: that of its hostPath.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 512,
    output: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 128,
    rate: Annotated[
        float, typer.Option(help="Requests a second, all replicas.", min=0.0, show_default=False)
    ] = 0.0,
    seconds: Annotated[
        float,
        typer.Option(help="Mean time of a request; default: as calibrated.", min=0.0, show_default=False),
    ] = 0.0,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of the accelerator, or of the pod; default: limits.memory.", show_default=False
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """What a replica's memory goes to, how many sequences it takes, and how many replicas a rate needs.

    Exits with 1 if the KV cache that is asked for does not fit.
    """
    with one_line_errors():
        backend = _backend(file)
        try:
            directory = _model_dir(backend.spec.model, model_dir)
            engine, found = _budget(backend, directory, _draft_dir(backend, draft_dir), memory)
            running = concurrency(found, engine, prompt, output)
        except BudgetError as error:
            raise EditError(str(error)) from None
        replicas = _replicas(backend, running, rate, seconds)
        if as_json:
            typer.echo(json.dumps(_body(found, running, replicas), indent=2))
        else:
            console.print(_table(found, engine.tensor_parallel))
            for line in _lines(backend, engine, found, running, (prompt, output)) + replicas[1]:
                console.print(line, soft_wrap=True, highlight=False)
        if not found.fits:
            raise typer.Exit(1)


def _backend(file: Path) -> InferenceBackend:
    """The one InferenceBackend in a file. Raises EditError."""
    try:
        documents = [d for d in yaml.safe_load_all(file.read_text()) if isinstance(d, dict)]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EditError(f"{file} is no YAML: {str(error).splitlines()[0]}") from None
    found = [d for d in documents if d.get("kind") == "InferenceBackend"]
    if len(found) != 1:
        raise EditError(f"{file} has {len(found)} InferenceBackends: give a file with one")
    metadata = {"name": "", "namespace": "default", **(found[0].get("metadata") or {})}
    parts = {"metadata": metadata, "spec": found[0].get("spec"), "status": found[0].get("status") or {}}
    try:
        return InferenceBackend.model_validate(parts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise EditError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _model_dir(
    model: ModelSource, given: Path | None, option: str = "--model-dir", named: str = "model"
) -> Path:
    host = model.host_path
    directory = given or (Path(host.path) if host is not None else None)
    if directory is None or not (directory / "config.json").is_file():
        where = (
            f"there is no config.json in {directory}" if directory else f"the {named} is not on this machine"
        )
        raise EditError(f"{where}: give {option}, a directory with the {named}'s config.json")
    return directory


def _draft_dir(backend: InferenceBackend, given: Path | None) -> Path | None:
    """None where no draft guesses. Raises EditError."""
    speculation = backend.spec.engine.speculation
    drafts = speculation is not None and speculation.method is SpeculationMethod.DRAFT
    draft = None if speculation is None else speculation.draft
    if drafts != (draft is not None):
        raise EditError(f"{_DRAFT}: a draft model comes with method Draft, and only with it")
    if draft is None:
        if given is not None:
            raise EditError("--draft-dir: spec.engine.speculation names no draft: set method Draft and draft")
        return None
    try:
        return _model_dir(draft, given, "--draft-dir", "draft")
    except EditError as error:
        raise EditError(f"{_DRAFT}: {error}") from None


def _budget(
    backend: InferenceBackend, directory: Path, draft: Path | None, memory: str
) -> tuple[Engine, Budget]:
    spec = backend.spec.engine
    limit = memory or ("" if backend.spec.accelerator else backend.spec.resources.limits.memory or "")
    try:
        memory_bytes = num_bytes(limit) if limit else None
        engine = Engine(
            spec.dtype.value,
            spec.quantization.value,
            spec.max_model_len,
            spec.max_num_seqs,
            spec.max_batch_tokens,
            block_size(backend),
            num_bytes(spec.kv_cache_memory),
            spec.tensor_parallel,
            spec.kv_cache_dtype.value,
            kv_offload_bytes=num_bytes(spec.kv_offload_memory) if spec.kv_offload_memory else 0,
            num_guesses=spec.speculation.num_tokens if spec.speculation else 0,
        )
    except ValueError as error:
        raise BudgetError(f"memory: {error}") from None
    return engine, budget(
        _config(directory),
        engine,
        memory_bytes=memory_bytes,
        num_parameters=_num_parameters(directory),
        accelerated=backend.spec.accelerator is not None,
        draft=None if draft is None else Draft(_config(draft), _num_parameters(draft)),
    )


def _config(directory: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        raise EditError(f"{directory / 'config.json'} is no readable JSON") from None
    if not isinstance(config, dict):
        raise EditError(f"{directory / 'config.json'} is no JSON object")
    unread = unread_file(config, {path.name for path in directory.iterdir()})
    if unread:
        raise EditError(
            f"{directory / unread} says that the weights are quantised, and the runtime does not read it: put"
            " it into config.json as quantization_config, as newer versions of what made it do"
        )
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    # Sizes are the text model's, but how weights are stored is told of the whole.
    return {name: config[name] for name in CONFIG_NAMES if name in config} | text


def _num_parameters(directory: Path) -> int | None:
    """Values that the safetensors files announce; None without such files."""
    total, files = 0, sorted(directory.glob("*.safetensors"))
    for path in files:
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size > _MAX_HEADER:
                    raise ValueError("too long a header")
                header = json.loads(file.read(size))
            for name, tensor in header.items():
                if name != "__metadata__":
                    num = 1
                    for length in tensor["shape"]:
                        num *= int(length)
                    total += num
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
            raise EditError(f"{path} is damaged, or no safetensors file") from None
    return total if files else None


def _replicas(
    backend: InferenceBackend, running: Concurrency, rate: float, seconds: float
) -> tuple[int | None, list[str]]:
    """Replicas for `rate`, None where that can't be told, and the reasons in words."""
    if rate <= 0:
        return None, []
    measured = backend.status.capacity
    if seconds <= 0 and measured is not None:
        safe = float(measured.safe_requests_per_second)
        num = replicas_for(rate, safe)
        return num, [
            f"{rate:g} requests/s need {num} replica(s): each safely takes {safe:g}/s, as calibrated"
        ]
    if seconds <= 0:
        return None, ["Replicas: give --seconds, the mean time of a request, or run sluice calibrate first"]
    num = replicas_for(rate, running.typical / seconds)
    flight = in_flight(rate, seconds)
    return num, [
        f"{rate:g} requests/s of {seconds:g} s are {flight:.3g} in flight (Little's law): {num} replica(s) by"
        " memory; what they do in time, sluice calibrate tells"
    ]


def _table(found: Budget, num_ranks: int) -> Table:
    table = Table(box=None, show_header=num_ranks > 1)
    table.add_column(f"each of {num_ranks} ranks")
    table.add_column(justify="right")
    for name, size in (
        ("weights", found.weights),
        *([("of these the draft's", found.draft_weights)] if found.draft_weights else []),
        ("runtime context", found.context),
        ("activations", found.activations),
        ("workspace", found.workspace),
        ("KV cache", found.kv_cache),
        *([("host memory for evicted KV", found.host_pool)] if found.host_pool else []),
        ("total", found.total),
        ("reserve", found.reserve),
    ):
        table.add_row(name, _mib(size))
    return table


def _lines(
    backend: InferenceBackend, engine: Engine, found: Budget, running: Concurrency, lengths: tuple[int, int]
) -> list[str]:
    asked = backend.spec.engine.kv_cache_memory
    num_ranks = engine.tensor_parallel
    offload = "kvOffloadMemory, " if found.host_pool else ""
    of_rank = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    of_draft = ", those of the draft among them" if found.draft_weights else ""
    kv_budget = None if found.kv_budget is None else _mib(found.kv_budget * num_ranks)
    lines = [
        f"A token takes {found.bytes_per_token:,} bytes of KV{of_rank}{of_draft}; {asked} hold"
        f" {found.kv_tokens:,} tokens in {found.num_blocks:,} blocks",
        f"Sequences of {lengths[0]} + {lengths[1]} tokens: {running.certain} surely,"
        f" {running.typical} typically (maxNumSeqs is {engine.max_num_seqs})",
    ]
    if kv_budget is None:
        lines.append("No memory limit is known: set spec.resources.limits.memory, or give --memory")
    elif found.fits:
        lines.append(f"The KV budget is {kv_budget}: kvCacheMemory {asked} fits")
    else:
        lines.append(
            f"[red]kvCacheMemory {asked} does not fit:[/red] the KV budget is {kv_budget}. Lower"
            f" {offload}kvCacheMemory, maxNumSeqs or maxBatchTokens, or raise limits.memory"
        )
    if backend.spec.accelerator is not None:
        lines.append("The runtime context is that of a CPU; on an accelerator it was not measured")
    return lines


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _body(
    found: Budget, running: Concurrency, replicas: tuple[int | None, list[str]]
) -> dict[str, int | bool | None]:
    sizes = {_camel(name): value for name, value in asdict(found).items()}
    return {
        **sizes,
        "total": found.total,
        "fits": found.fits,
        "certainSequences": running.certain,
        "typicalSequences": running.typical,
        "replicas": replicas[0],
    }


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
