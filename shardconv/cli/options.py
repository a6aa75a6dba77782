"""The options that commands share, with their help, and the converted directories that they name."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from shardconv_runtime.adapters.adapter_names import PLAN_NAME
from shardconv_runtime.errors import CheckpointError, MissingModelError, OptionError
from shardconv_runtime.files.manifest import MANIFEST_NAME, check_size, quantization_errors, read_plan
from shardconv_runtime.files.manifest import read as read_manifest
from shardconv_runtime.files.small_files import stage_directories, variant
from shardconv_runtime.files.tp_folders import folder_in, folders, only
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import EXPERT_MODES
from shardconv_runtime.hub_options import Hub, is_url, looks_like_path

from ..arguments import (
    HUB_FIELDS,
    SCHEMES,
    WRITING_FIELDS,
    OnCluster,
    Quantizing,
    Writing,
    parse_memory,
    parse_size,
    require_scheme,
    require_tp,
)
from ..converted.shards import of_all_stages
from ..reporting.progress import for_terminal
from ..reporting.records import json_text
from ..reporting.report import errors_report, report
from ..reporting.summary import num_packed

if TYPE_CHECKING:
    from shardconv_runtime.files.hub_downloads import Repository
    from shardconv_runtime.files.manifest import Manifest
    from shardconv_runtime.files.object_stores import ObjectDirectory
    from shardconv_runtime.format.plan import Plan


@contextmanager
def working(quiet: bool, verbose: bool) -> Iterator[Any]:
    """Show progress on standard error, and silence the libraries unless ``verbose``."""
    gc.set_threshold(100_000, 50, 50)  # the libraries create many objects that stay: a quarter of the start
    progress = for_terminal(quiet=quiet)
    if verbose:
        yield progress
    elif "transformers" in sys.modules:
        from shardconv_runtime.library_logging import without_library_logging

        with without_library_logging():
            yield progress
    else:  # importing transformers takes seconds, and a wrong path must be an error at once
        os.environ.update(_SILENT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield progress


_SILENT = {
    "TRANSFORMERS_VERBOSITY": "critical",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "COMPRESSED_TENSORS_LOG_DISABLED": "true",
}
"""Environment variables that the libraries read when they are imported."""


RENAMED = {"--memory": "--io-memory", "--lora": "--new"}
"""Options of earlier versions, which are not in the help, and their names now."""


class RenamedOptions(click.Command):
    """A command that takes options by their earlier names, with a line that says the name now."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        names = {option for parameter in self.params for option in parameter.opts}
        renamed = []
        for arg in args:
            old, equals, value = arg.partition("=")
            new = RENAMED.get(old)
            if new in names and old not in names:
                click.echo(f"{old} is now called {new}", err=True)
                arg = f"{new}{equals}{value}"
            renamed.append(arg)
        return super().parse_args(ctx, renamed)


def print_report(report: Any) -> None:
    """Print a record of ``reporting.records`` as JSON."""
    click.echo(json_text(report), nl=False)


def print_written(dst: str, held: str, ranks: str) -> None:
    """Print how much of a model is in a directory for each rank, and how to see its plan."""
    click.echo(f"{dst}: {held} on each of {ranks}; to see the plan, run shardconv inspect {dst}")


def written_manifests(dst: str) -> list[Manifest]:
    """Return the manifest of a converted directory, or of all its stages; none until all are complete."""
    if is_url(dst):
        from shardconv_runtime.files.object_stores import complete_manifests  # it imports the Hub's client

        return complete_manifests(dst)
    directories = stage_directories(Path(dst)) or [Path(dst)]
    is_complete = all((directory / MANIFEST_NAME).is_file() for directory in directories)
    return [read_manifest(directory) for directory in directories if is_complete]


def print_errors(manifests: Iterable[Manifest], plan: Plan) -> None:
    """Print the errors of weights that were quantized when they were converted, if any were.

    Args:
        manifests: one for each stage.
        plan: the plan of all stages.
    """
    errors = quantization_errors(manifests)
    if errors:
        click.echo(printable("\n" + errors_report(errors, num_packed(plan))), nl=False)


def was_complete(dst: str, *, overwrite: bool = False) -> bool:
    """Return whether an earlier run has completed an output that this run may not replace."""
    if overwrite or is_url(dst):
        return not overwrite and bool(written_manifests(dst))
    directories = stage_directories(Path(dst)) or [Path(dst)]
    return all((directory / MANIFEST_NAME).is_file() for directory in directories)


def print_complete(dst: str) -> None:
    """Print that an earlier run has written the same output."""
    click.echo(f"{dst}: already complete")


def print_plan(solved: Plan, tokens: int) -> None:
    """Print a report on a forward pass of ``tokens`` tokens."""
    click.echo(printable(report(solved, num_tokens=tokens)), nl=False)


def printable(text: str) -> str:
    """Return text with control characters escaped, since it may quote the content of files."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = ("float64", "float32", "bfloat16", "float16")


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return several options as one decorator, in the order of the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def checked(check: Callable[[Any], object]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that checks a value before the libraries are imported, and passes it on unchanged."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        check(value)
        return value

    return callback


def optional(check: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return the check of a value that may be left out."""
    return lambda value: None if value is None else check(value)


class TpOrAuto(click.ParamType[Any]):
    """A number of ranks, or the word ``auto``."""

    name = "tp"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return an int, or ``auto``."""
        if value == "auto":
            return value
        tp = click.INT.convert(value, param, ctx)
        require_tp(tp)
        return tp


def tp_option(*, required: bool = True) -> Callable[[Command], Command]:
    """Return ``--tp`` of a command that converts."""
    check = checked(require_tp if required else optional(require_tp))
    return click.option(
        "--tp", type=int, required=required, metavar="N", callback=check, help="Number of ranks."
    )


auto_tp_option = click.option(
    "--tp",
    type=TpOrAuto(),
    required=True,
    metavar="N",
    help="Number of ranks, or auto for the fewest (1, 2, 4 ...) that fit --device-memory. With --on, auto "
    "predicts all ways to divide the devices.",
)

hardware_option = click.option(
    "--hardware",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="File of more devices for --on, which shardconv env --measure FILE writes.",
)

call_options = together(
    click.option(
        "--context",
        type=click.IntRange(1),
        metavar="N",
        help="Length of each sequence in tokens, including the prompt.",
    ),
    click.option("--batch", type=click.IntRange(1), metavar="N", help="Number of sequences.  [default: 1]"),
)

cluster_options = together(
    click.option(
        "--on",
        metavar="CLUSTER",
        help="Choose the plan that is predicted to be the fastest on hosts x devices x device, for example "
        "2x8xH100.  [default: the plan for any devices]",
    ),
    hardware_option,
    call_options,
)


def on_cluster_from(options: dict[str, Any]) -> OnCluster | None:
    """Take ``cluster_options`` out of the options of a command."""
    on, values = options.pop("on"), {name: options.pop(name) for name in ("hardware", "context", "batch")}
    given = {name: value for name, value in values.items() if value is not None}
    if on is not None:
        return OnCluster(on, **given)
    for name in given:
        raise click.UsageError(f"--{name} is for --on; add that, for example --on 2x8xH100")
    return None


device_options = together(
    click.option(
        "--on",
        metavar="CLUSTER",
        help="Predict times on hosts x devices x device, for example 2x8xH100, 8xA100-80GB or L4.",
    ),
    hardware_option,
    click.option(
        "--device-memory",
        metavar="SIZE",
        callback=checked(optional(parse_size)),
        help="Memory of each device, for example 80GB or 80GiB. The report shows which sizes fit.  [default: "
        "that of --on]",
    ),
    click.option(
        "--reserve",
        metavar="SIZE",
        callback=checked(optional(parse_size)),
        help="Device memory to keep free.  [default: 2GB]",
    ),
    call_options,
)

experts_option = click.option(
    "--experts",
    type=click.Choice(EXPERT_MODES),
    default="tp",
    show_default=True,
    help="Shard each expert of a mixture (tp), or give complete experts to each rank (ep).",
)

sequence_option = click.option(
    "--sequence-parallel",
    is_flag=True,
    help="Also make a form of the plan for sequence parallelism in training.",
)

stage_options = together(
    click.option(
        "--pp",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="P",
        help="Number of pipeline stages. Each one is sharded over the N ranks of --tp.",
    ),
    click.option(
        "--stages",
        default="",
        metavar="LAYERS",
        help="First and last layer of each stage, for example 0-39,40-79.  [default: balanced]",
    ),
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print a report for programs, as one JSON object."
)

tokens_option = click.option(
    "--tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    metavar="N",
    help="Number of tokens of the forward pass in the report.",
)

loudness_options = together(
    click.option("-q", "--quiet", is_flag=True, help="Print only errors, and results that are asked for."),
    click.option("-v", "--verbose", is_flag=True, help="Show library logging and tracebacks."),
)

size_options = together(
    click.option(
        "--max-file-size",
        default="5GB",
        show_default=True,
        metavar="SIZE",
        callback=checked(parse_size),
        help="Maximum size of a file, for example 500MB or 5GB. A larger tensor gets its own file.",
    ),
    click.option(
        "--io-memory",
        "memory",
        default="512MiB",
        show_default=True,
        metavar="SIZE",
        callback=checked(parse_memory),
        help="Memory for the buffers through which files are copied.",
    ),
)

example_option = click.option(
    "--example-inputs",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Example of a call of the model: a safetensors file with its arguments, or a Python file that "
    "defines example_inputs(config).  [default: made-up inputs]",
)

initial_options = together(
    click.option(
        "--random-init",
        is_flag=True,
        help="Initialize a new model to train from scratch. MODEL needs only a config.",
    ),
    click.option(
        "--seed",
        type=int,
        metavar="N",
        help="Seed of --random-init. The weights are the same for any --tp.  [default: 0]",
    ),
    click.option(
        "--keep-unused",
        is_flag=True,
        help="Keep tensors that the model does not use, so that export --format hf can write them.",
    ),
)


quantize_options = together(
    click.option(
        "--quantize",
        metavar="SCHEME",
        callback=checked(optional(require_scheme)),
        help=f"Quantize weights of linear layers and experts: {', '.join(SCHEMES)}.  [default: as stored]",
    ),
    click.option(
        "--keep",
        metavar="PATTERN",
        multiple=True,
        help="With --quantize: modules that stay as they are, as 'model.layers.0.*'; several times.",
    ),
)


def quantizing_from(options: dict[str, Any]) -> Quantizing | None:
    """Return the value of these options, which are removed."""
    scheme, keep = options.pop("quantize"), options.pop("keep")
    if keep and scheme is None:
        raise click.UsageError("--keep is for --quantize; add that, or leave it out")
    return None if scheme is None else Quantizing(scheme, keep)


def hub_options(argument: str) -> Callable[[Command], Command]:
    """Return the options for reaching the Hub; their help names ``argument``."""
    return together(
        click.option("--revision", help=f"Branch, tag or commit of {argument} on the Hub.  [default: main]"),
        click.option("--cache-dir", type=click.Path(file_okay=False), help="Directory of the Hub cache."),
        click.option(
            "--local-files-only", is_flag=True, help="Use only the local Hub cache; do not download."
        ),
        click.option("--token", help="Hub token for private or gated models.  [default: the Hub login]"),
    )


where_options = together(
    click.option(
        "--tp",
        type=int,
        metavar="N",
        callback=checked(optional(require_tp)),
        help="Number of ranks, if SRC has several directories tp-N/.",
    ),
    hub_options("SRC"),
)
"""Options that choose a converted directory in SRC, and that say how to reach the Hub for a repository."""

stream_option = click.option(
    "--stream/--download",
    default=None,
    help="Read only the necessary bytes from the Hub without caching them, or download all files to the "
    "cache. Cached files are not downloaded again.  [default: stream with --ranks, otherwise download]",
)

model_options = together(
    hub_options("MODEL"),
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="dtype of the parameters.  [default: the stored dtype]"
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Allow the Python code in the model's repository to run. Read that code first.",
    ),
    loudness_options,
)
"""Options that name the model, and say how to read it."""


def trust_option(where: str) -> Callable[[Command], Command]:
    """Return ``--trust-remote-code`` of a command on a converted directory."""
    return click.option("--trust-remote-code", is_flag=True, help=f"Allow the Python code in {where} to run.")


def part_options(dst: str) -> Callable[[Command], Command]:
    """Return options for which ranks of the argument ``dst`` are written, and whether it may be replaced."""
    return together(
        click.option(
            "--ranks",
            metavar="LIST",
            help="Write only these ranks, for example 0-3 or 0,2,5. The last part completes "
            f"{dst}.  [default: all]",
        ),
        click.option(
            "--overwrite",
            is_flag=True,
            help=f"Replace {dst} if it is a converted directory.",
        ),
    )


# Opens the converted directory that a source is or contains, on this machine or on the Hub.


@dataclass(frozen=True)
class Opened:
    """A converted directory, with its manifest and plan."""

    directory: Path
    """The directory; for a repository, a directory in the cache that has only these two files."""
    manifest: Manifest
    plan: Plan
    repository: Repository | None = None
    """The repository on the Hub that it comes from."""
    objects: ObjectDirectory | None = None
    """The directory in an object store that it comes from."""

    @property
    def name(self) -> str:
        """The directory for reports: its path, or its place in a repository."""
        if self.objects is not None:
            return self.objects.url
        if self.repository is None:
            return str(self.directory)
        return f"{self.repository.repo_id}/{self.repository.path}".rstrip("/")

    def check_sizes(self) -> None:
        """Check that every file exists and has its size."""
        if self.objects is not None:
            self.objects.check_sizes(self.manifest.files)
        elif self.repository is None:
            for entry in self.manifest.files:
                reader = "every rank" if entry.rank is None else f"rank {entry.rank}"
                check_size(self.directory, entry, reader)
        else:
            self.repository.check_sizes(self.manifest.files)


def opened(source: str, tp: int | None, hub: Mapping[str, Any]) -> list[Opened]:
    """Open the converted directory that a source is or contains, or the directories of all its stages.

    Each gets the plan of all stages.
    """
    if is_on_hub(source):
        # The Hub client is slow to import, and a local directory does not need it.
        from shardconv_runtime.files.hub_downloads import find_all
        from shardconv_runtime.library_logging import without_hub_logging

        with without_hub_logging():
            published = find_all(source, Hub(**hub), tp)
        parts = [Opened(r.directory, m, read_plan(r.directory, m), r) for r, m in published]
    elif is_url(source):
        from shardconv_runtime.files.object_stores import find_all_stored

        parts = []
        for objects, directory in find_all_stored(source, tp):
            described = read_manifest(directory)
            parts.append(Opened(directory, described, read_plan(directory, described), objects=objects))
    else:
        directories = _directories(Path(source), tp)
        manifests = [read_manifest(directory) for directory in directories]
        parts = [Opened(d, m, read_plan(d, m)) for d, m in zip(directories, manifests, strict=True)]
    if (number := parts[0].manifest.tp) != tp and tp is not None:
        raise OptionError(
            f"{source} is converted for {number} ranks, not for {tp}; leave out --tp, or convert it again"
        )
    if len(parts) > 1:
        parts = [replace(each, plan=of_all_stages(each.plan)) for each in parts]
    if any(each.plan != parts[0].plan for each in parts):
        raise CheckpointError(f"{source} has stages of several conversions; convert again")
    return parts


def adapter_plan(source: str) -> Plan | None:
    """Read the plan of a model with the adapter in a directory that ``adapt`` wrote; None for others."""
    path = Path(source) / PLAN_NAME
    if not path.is_file() or (Path(source) / MANIFEST_NAME).is_file():
        return None

    return plan_json.read(path)


def is_on_hub(source: str) -> bool:
    """Return whether a source is the id of a repository, ``user/name``, and not a path."""
    if "/" not in source or source.endswith(".json") or Path(source).exists():
        return False
    repo_id = folder_in(source)[0]
    return not looks_like_path(repo_id) and not Path(repo_id.partition("/")[0]).is_dir()


def require_no_repository(source: str) -> None:
    """Refuse the id of a repository on the Hub, for a command that reads every byte."""
    if not is_url(source) and is_on_hub(source):
        raise MissingModelError(
            f"no such directory: {source}; download a repository on the Hub first: hf download {source} "
            "--local-dir DIR, then give DIR or its tp-N/"
        )


def _directories(path: Path, tp: int | None) -> list[Path]:
    """Return the converted directories in ``path``, or itself."""
    if tp is not None:
        path = variant(path, tp)
    elif not (path / MANIFEST_NAME).is_file():
        files = chain(path.glob(f"tp-*/{MANIFEST_NAME}"), path.glob(f"pp-*/stage-*/{MANIFEST_NAME}"))
        inner = [file.relative_to(path).as_posix() for file in files]
        if folders(inner):
            return [path / part for part in only(str(path), inner)]
    return stage_directories(path) or [path]


def hub_from(options: dict[str, Any]) -> Hub:
    """Take the options of the Hub out of a command's options, as one value."""
    return Hub(**{name: options.pop(name) for name in HUB_FIELDS})


def writing_from(options: dict[str, Any]) -> Writing:
    """Take the options of written files out of a command's options, as one value."""
    return Writing(**{name: options.pop(name) for name in WRITING_FIELDS if name in options})
