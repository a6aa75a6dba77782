"""What becomes of the model types that a release of transformers adds: one row for each type."""

from __future__ import annotations

import re
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from distributed import RankFailed, run_processes
from small_models import save_random
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from . import full_size
from .full_size_run import in_fork
from .generation import CACHES, generates
from .measure import Result, measure
from .models import FAMILIES, ZooModel, build
from .overrides import OVERRIDES
from .shrink import config_class, tiny_config
from .tasks import FEW_HEADS, runs, specification
from .variants import grouped

TPS, GROUPED_TPS, FULL_TP, THEIR_TP = (2, 3, 4), (4, 3), 8, 2
_MAPPING = re.compile(
    r"CONFIG_MAPPING_NAMES[^=]*= OrderedDict(?:\[[^\]]*\])?\(\s*\[(.*?)\n\s*\]\s*\)", re.DOTALL
)
_ENTRY = re.compile(r'\(\s*"([\w\-./]+)",\s*"\w+"')
_FILES = ("models/auto/configuration_auto.py", "models/auto/auto_mappings.py")
LATER_OVERRIDES: dict[str, dict[str, Any]] = {
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
"""As the zoo's ``OVERRIDES``, for types that the pinned version of transformers does not have."""
THEIR_TOLERANCE = 1e-3
"""Of transformers' own plan, in float32."""


def types_of_wheel(wheel: Path) -> set[str]:
    """The model types that a release of transformers knows, from its wheel; nothing is imported."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(_FILES)]
        texts = [archive.read(name).decode() for name in names]
    return {entry for text in texts for found in _MAPPING.findall(text) for entry in _ENTRY.findall(found)}


def classes(model_type: str) -> Iterator[tuple[str, str]]:
    """(family, name of the class) of the models of a type, what it is for first; none of a mere part."""
    families = {
        **{name: (FAMILIES[name],) for name in ("causal", "seq2seq", "masked")},
        **{name: full_size.FAMILIES[name] for name in ("multimodal", "audio", "vision")},
        "backbone": (auto.MODEL_MAPPING_NAMES,),
    }
    for family, mappings in families.items():
        for mapping in mappings:
            if model_type in mapping:
                name = mapping[model_type]
                yield family, name[0] if isinstance(name, (tuple, list)) else name
                return


def is_part(model_type: str) -> bool:
    """Whether another type has this one as a sub-config: it is converted with that."""
    own = config_class(model_type)
    others = (
        getattr(transformers, name, None) for t, name in CONFIG_MAPPING_NAMES.items() if t != model_type
    )
    return any(
        own in getattr(other, "sub_configs", {}).values()
        for other in others
        if isinstance(other, type) and other is not own
    )


def zoo_model(family: str, model_type: str, class_name: str) -> ZooModel:
    """The tiny model of a type, as the zoo makes it."""
    later = LATER_OVERRIDES.get(model_type, {})
    if family in FAMILIES:
        return build(family, model_type, **later)
    config = tiny_config(config_class(model_type), OVERRIDES.get(model_type, {}) | later)
    return ZooModel(family, model_type, getattr(transformers, class_name), config)


def row_of(model_type: str, release: str) -> dict[str, Any] | None:
    """How a type comes out; None for a type that no model is of by itself."""
    found = next(classes(model_type), None)
    if found is None or (found[0] == "backbone" and is_part(model_type)):
        return None
    family, class_name = found
    started = time.perf_counter()
    row: dict[str, Any] = {"release": release, "type": model_type, "family": family, "class": class_name}
    try:
        model = zoo_model(family, model_type, class_name)
        specification(model)
    except Exception as error:
        return row | {"status": "not built", "message": _line(error), "results": []}
    results = [_short(measure(model, tp)) for tp in TPS]
    few = grouped(family, model_type) if family in FAMILIES else None
    if few is not None and model_type not in LATER_OVERRIDES and runs(few):
        results += [_short(measure(few, tp, FEW_HEADS)) for tp in GROUPED_TPS]
    row |= {"results": results, "generate": _generate(model) if family == "causal" else {}}
    row["theirs"] = _theirs(model) if family == "causal" else ""
    row["full size"] = _full_size(family, model_type)
    row["seconds"] = round(time.perf_counter() - started)
    return row


def _short(result: Result) -> dict[str, Any]:
    return {
        "variant": result.variant,
        "tp": result.tp,
        "status": result.status,
        "message": result.message[:300],
        "sharded": round(result.sharded, 4),
        "error": f"{result.error:.1e}",
        "per_layer": round(result.per_layer, 2),
    }


def _generate(model: ZooModel) -> dict[str, str]:
    """By kind of cache: ``same``, ``different`` or why the unsharded model cannot."""
    from shardconv.arguments import SolveOptions
    from shardconv.passes import solve_plan

    try:
        plan = solve_plan(specification(model), SolveOptions(TPS[0]))
        return {cache: generates(plan, model, cache)[:200] for cache in CACHES}
    except Exception as error:
        return {"any": _line(error)}


def _full_size(family: str, model_type: str) -> dict[str, Any]:
    """The plan for 8 ranks at the default size of the config, proven, in a process of its own."""
    sized = (
        [m for m in full_size.models(family) if m.type == model_type] if family in full_size.FAMILIES else []
    )
    if not sized:
        return {}
    found = in_fork(sized[0], FULL_TP, True)
    names = ("status", "message", "parameters", "cpu_s", "peak_bytes", "replicated", "per_layer", "proof")
    return {name: found[name] for name in names}


def _theirs(model: ZooModel) -> str:
    """What transformers' own plan gives on two processes: ``same``, or how it fails."""
    ids = torch.randint(3, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as directory:
        try:
            save_random(model.config, model.model_class, Path(directory))
            loaded = model.model_class.from_pretrained(directory, dtype=torch.float32).eval()
            with torch.no_grad():
                want = loaded(ids).logits
            found = run_processes(THEIR_TP, _their_logits, directory, ids)
        except RankFailed as error:
            return str(error).strip().splitlines()[-1][:200]  # without the traceback before it
        except Exception as error:
            return _line(error)[:200]
    worst = max(float((got - want).abs().max() / want.abs().max()) for got in found)
    return "same" if worst < THEIR_TOLERANCE else f"differs by {worst:.0e}"


def _their_logits(directory: str, ids: torch.Tensor) -> torch.Tensor:
    import transformers.integrations.accelerate as integration
    from transformers.distributed import DistributedConfig

    integration.is_accelerate_available = lambda: True  # it is asked for, and not used here
    transformers.logging.disable_progress_bar()
    wanted = DistributedConfig(tp_size=THEIR_TP, tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, distributed_config=wanted
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(ids).logits
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


# The page --------------------------------------------------------------------------------------------

GOOD = ("equal", "float32")


def verdict(row: dict[str, Any]) -> str:
    """``right``, ``refused`` or ``wrong``, as the worst of a type's results; or that it was not built."""
    if row.get("status"):
        return str(row["status"])
    statuses = [result["status"] for result in row["results"]]
    if any(status not in (*GOOD, "refused") for status in statuses):
        return "wrong"
    if any(text.startswith("different") for text in row["generate"].values()):
        return "wrong"
    return "refused" if "refused" in statuses else "right"


def page(rows: Sequence[dict[str, Any]], versions: str) -> str:
    """The page of all rows as Markdown."""
    lines = [
        "# New architectures",
        "",
        "This page lists the model types that each release of transformers added. They were converted",
        f"without code changes. `scripts/new_architectures` writes the page ({versions}). A tiny random",
        "model of each type is planned for 2, 3 and 4 ranks, and for 4 and 3 ranks with 2 key/value heads",
        "if its config has them. The ranks are compared with the unsharded model in float64. *Tokens*",
        "compares greedy generation with a dynamic and a static cache. *Full size* is a verified plan for",
        "8 ranks at the default size of the config. *transformers* compares the logits of its own tensor",
        "parallelism on two processes. Types that are parts of other types are left out. *Not built*",
        "means that transformers does not accept the tiny config.",
        "",
        "| release | types | right | refused | wrong | not built |",
        "|---|---|---|---|---|---|",
    ]
    releases = list(dict.fromkeys(row["release"] for row in rows))
    for release in releases:
        of = [verdict(row) for row in rows if row["release"] == release]
        counts = (of.count(word) for word in ("right", "refused", "wrong", "not built"))
        lines.append(f"| {release} | {len(of)} | {' | '.join(map(str, counts))} |")
    for release in releases:
        lines += ["", f"## {release}", ""]
        lines += ["| type | family | tp 2, 3, 4 | few heads | sharded | tokens | full size | transformers |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_table_row(row) for row in rows if row["release"] == release]
    problems = [(row["type"], text) for row in rows for text in _problems(row)]
    if problems:
        lines += ["", "## Problems", ""]
        lines += [f"- {model_type}: {text}" for model_type, text in problems]
    return "\n".join(lines) + "\n"


def _table_row(row: dict[str, Any]) -> str:
    if row.get("status"):
        return f"| {row['type']} | {row['family']} | {row['status']} | | | | | |"
    plain = [result for result in row["results"] if not result["variant"]]
    few = [result for result in row["results"] if result["variant"]]
    tokens = {text.partition(":")[0] for text in row["generate"].values()}
    full = row["full size"]
    size = ""
    if full:
        size = full["status"] if full["status"] != "planned" else f"{full['parameters'] / 1e9:.1f} B"
        size += f", {full['cpu_s']:.0f} s" if full["status"] == "planned" else ""
        size += ", not all proven" if full["proof"] else ""
    sharded = min((result["sharded"] for result in plain), default=0)
    cells = (
        row["type"],
        row["family"],
        ", ".join(result["status"] for result in plain),
        ", ".join(result["status"] for result in few),
        f"{sharded:.0%}",
        ", ".join(sorted(tokens)),
        size,
        row["theirs"].partition(":")[0],
    )
    return f"| {' | '.join(cells)} |"


def _problems(row: dict[str, Any]) -> Iterator[str]:
    if row.get("status"):
        yield f"{row['status']}: {row['message']}"
        return
    for result in row["results"]:
        if result["status"] not in GOOD:
            yield f"tp {result['tp']} {result['variant']}: {result['status']}. {result['message']}"
    for cache, text in row["generate"].items():
        if text != "same":
            yield f"tokens, {cache} cache: {text}"
    if row["full size"].get("status") not in (None, "planned"):
        yield f"full size: {row['full size']['status']}. {row['full size']['message']}"
    for text in row["full size"].get("proof", ()):
        yield f"full size: {text}"


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by release, then by type."""
    return sorted(rows, key=lambda row: ([int(n) for n in row["release"].split(".")], row["type"]))
