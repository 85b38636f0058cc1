"""Imports point one way: from the public face down to the graph."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ortops"

FLOORS = (
    (
        *("conformance", "delayed_imports", "errors", "garbage_collection", "numbers"),
        *("reference", "uninterrupted"),
    ),
    ("arguments", "optional", "other_names"),
    ("mpi", "notes", "schedules", "summary"),
    ("graph",),
    ("autodiff",),
    ("passes",),
    ("losses", "metrics", "optimizers", "surgery"),
    ("custom_ops",),
    ("lowering",),
    ("inference",),
    ("execution",),
    ("trainable",),
    ("building",),
    ("derivatives",),
    ("training",),
    (
        *("attribution", "callbacks", "check", "composition", "distributed", "functions", "lora"),
        *("backend", "sklearn", "weights"),
    ),
    ("data",),
    ("llm",),
    ("__init__",),
    ("examples",),
    ("cli",),
    ("__main__",),
)
"""The rooms of the house, from the lowest floor up. A room imports from itself and from below."""

WITHIN = {
    "conformance": (
        *("case", "formulas", "optimizers", "gradients", "operators", "control_flow", "training"),
        *("refusals", "suite", "files", "running", "backends", "onnx_runner", "report"),
        *("__init__", "__main__"),
    ),
    "reference": (
        *("traced", "operators", "replay", "gradient", "optimizers", "training", "backend"),
        "__init__",
    ),
    "graph": (
        *("limits", "files", "safetensors", "layer_names", "adapters", "pooling", "tensor", "edit"),
        *(
            "faults",
            "element_types",
            "folding",
            "shapes",
            "convert",
            "linear_models",
            "weights",
            "squashing",
            "labels",
            "row_axes",
        ),
    ),
    "graph.files": (
        *(
            "atomic",
            "opening",
            "archive",
            "json_text",
            "json_fields",
            "json_metadata",
            "folders",
            "wire_format",
            "messages",
            "validation",
            "loading",
        ),
        *("serialization", "held_file", "external", "streaming", "saving"),
    ),
    "optimizers": (
        *("optimizer", "gradient_descent", "squares", "moments", "variants", "sign", "layerwise"),
        *("factored", "orthogonal", "schedule_free", "prodigy", "quantized", "__init__"),
    ),
    "autodiff": ("guards", "registry", "backward", "gradient_node", "grad", "expansion", "rules"),
    "derivatives": (
        *("builder", "formulas", "casadi_files", "batching", "vmap", "per_sample", "__init__"),
    ),
    "functions": (
        *(
            "residuals",
            "programs",
            "call_arguments",
            "bridges",
            "function",
            "jax_function",
            "pytensor_op",
        ),
        *("scipy_functions", "torch_module", "__init__"),
    ),
    "callbacks": (
        *("monitor", "best", "plateau", "checkpoint", "logs", "tracking", "drawing", "plot"),
        "rate_finder",
        "__init__",
    ),
    "lora": (
        *(
            "patterns",
            "removal",
            "fingerprints",
            "model",
            "fused",
            "targets",
            "addition",
            "merging",
        ),
        *("adapter_file", "files", "peft_layers", "peft", "__init__"),
    ),
    "composition": ("record", "parts", "composing", "splitting", "__init__"),
    "weights": (
        *("names", "checkpoints", "layouts", "readers", "matching", "transfer", "__init__"),
    ),
    "llm": (
        "folder",
        "rendering",
        "tokenization",
        "examples",
        "preferences",
        "checkpoint",
        "pruning",
        "generation",
        "several_files",
        "sequence_pairs",
        "decoding",
        "merging",
        "experts",
        "packing",
        "batches",
        "serving",
        "saving",
        "tuning",
        "measuring",
        "checking",
        "__init__",
    ),
    "data": (
        *("images", "augmentation", "rows", "folders"),
        "__init__",
    ),
    "metrics": (
        *("metric", "classification", "confusion", "ranking", "regression", "sequence"),
        "detection",
        "functions",
        "__init__",
    ),
    "surgery": (
        *("reading", "head", "batch", "branches", "output", "tied"),
        *("channels", "channel_rules", "pruning", "postprocessing", "__init__"),
    ),
    "passes": (
        *(
            "order",
            "finite",
            "draft",
            "rewrite",
            "rematerialization",
            "cross_entropy",
            "products",
            "numbers",
            "padding",
            "normal_form",
            "computed_sizes",
            "gelu",
            "swish",
            "rms_normalization",
            "scattered_sums",
            "attention",
        ),
        *(
            "max_pool",
            "rectified",
            "transposed",
            "recurrent",
            "blocked",
            "rounding",
            "webgpu",
        ),
        *(
            "quantized_weights",
            "chunked_logits",
            "scaled_sums",
            "gated_sums",
            "scaled_gradients",
            "__init__",
        ),
    ),
    "losses": (
        *("teacher", "loss", "compute", "classification", "regression"),
        *("similarity", "sequence", "segmentation", "distillation", "preference", "angular"),
        *("boxes", "detection"),
        "__init__",
    ),
    "cli": (
        *("parser", "standard_streams", "calls", "configuration", "streams"),
        *("data", "outputs"),
        *(
            "checking",
            "training",
            "prediction",
            "exporting",
            "adapters",
            "checkpoints",
            "tuning",
            "inspection",
        ),
        *("completion", "__init__"),
    ),
    "execution": (
        *(
            "step",
            "providers",
            "placement",
            "memory",
            "settings",
            "onnxruntime_sessions",
            "strings",
            "sizes",
            "split",
            "translation",
            "overwriting",
            "packed",
            "repetition",
        ),
        *(
            "compilation",
            "update",
            "cut",
            "in_place",
            "template",
            "binding",
            "variant",
            "shape_cache",
            "split_step",
            "execution",
        ),
    ),
    "trainable": (
        *("metadata", "training_mode", "bfloat16", "step_graph", "limited"),
        *("model_run", "child_process", "initialization", "write_back"),
    ),
    "building": (
        *("tables", "parameters", "preparation", "reachability", "algorithm", "groups", "clipping"),
        *("updates", "without_adapter", "recipe", "builder", "addition"),
    ),
    "training": (
        *(
            "history",
            "callback",
            "interruption",
            "limits",
            "training_metrics",
            "position",
            "probabilities",
            "progress_bar",
        ),
        *(
            "tables",
            "prefetch",
            "feeds",
            "declared_shapes",
            "row_data",
            "padding",
            "arrow",
            "samples",
            "data",
            "sample_weights",
            "validation_split",
            "state",
            "schedule_length",
            "anomalies",
            "initial_values",
            "gradients",
        ),
        *(
            "loaded_model",
            "evaluation",
            "fitting",
            "steps",
            "turns",
            "constants",
            "rebuilding",
            "model_file",
            "session",
            "batch_size",
            "export",
        ),
    ),
}
"""The files of a room, of which each imports from those before it."""

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Returns what a file imports from the package, as ``room.file``, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ortops":
            assert not node.level
            base = (node.module or "").removeprefix("ortops").lstrip(".")
            folder = PACKAGE.joinpath(*base.split(".")) if base else PACKAGE
            for alias in node.names:
                inner = (folder / alias.name).is_dir() or (folder / f"{alias.name}.py").exists()
                found.add(f"{base}.{alias.name}".lstrip(".") if inner else base or "__init__")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "ortops"]
            found.update(name.removeprefix("ortops").lstrip(".") or "__init__" for name in names)
    return found


def floor_of(module: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if module.split(".")[0] in rooms)


def test_every_file_has_its_place() -> None:
    rooms = {room for floor in FLOORS for room in floor}
    assert {module_of(path).split(".")[0] for path in FILES} == rooms
    for room, files in WITHIN.items():
        folder = PACKAGE.joinpath(*room.split("."))
        members = {path.stem for path in FILES if path.parent == folder}
        members |= {path.parent.name for path in FILES if path.parent.parent == folder}
        assert members - {"__init__"} == set(files) - {"__init__"}, room


@pytest.mark.slow
def test_the_test_sees_imports() -> None:
    assert "graph.tensor" in imports(PACKAGE / "losses" / "regression.py")
    assert "graph.convert" in imports(PACKAGE / "check.py")
    assert "cli" in imports(PACKAGE / "__main__.py")


def upward(own: str, others: set[str]) -> Iterator[str]:
    """Yields what a file imports from above it, and from beside it in another room."""
    for other in sorted(others):
        if floor_of(other) > floor_of(own):
            yield f"ortops.{own} imports ortops.{other}"
        if floor_of(other) == floor_of(own) and own.split(".")[0] != other.split(".")[0]:
            yield f"ortops.{own} imports ortops.{other}, which stands beside it"
        for room, order in WITHIN.items():
            if own.startswith(f"{room}.") and f"{other}.".startswith(f"{room}."):
                inside = room.count(".") + 1
                file = [*other.split("."), "__init__"][inside]
                if order.index(file) > order.index(own.split(".")[inside]):
                    yield f"ortops.{own} imports ortops.{other}, which comes later in {room}"


def test_imports_point_downwards() -> None:
    found = [line for path in FILES for line in upward(module_of(path), imports(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ("graph.tensor", "autodiff.backward", "ortops.graph.tensor imports ortops.autodiff"),
        ("losses.loss", "metrics.metric", "which stands beside it"),
        ("graph.files.atomic", "graph.files.saving", "which comes later in graph.files"),
        ("graph.limits", "graph.files.saving", "which comes later in graph"),
    ],
)
def test_the_test_sees_directions(own: str, other: str, said: str) -> None:
    (line,) = upward(own, {other, "errors"})
    assert said in line
    assert not list(upward(other, {own})) or "beside" in said


@pytest.mark.slow
def test_no_import_waits_in_a_function() -> None:
    """But for what the public face imports on demand."""
    found = []
    for path in FILES:
        if module_of(path) in ("__init__", "cli.__init__", "inference"):
            continue
        for function in ast.walk(tree_of(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                kinds = (ast.Import, ast.ImportFrom)
                inner = (node for node in ast.walk(function) if isinstance(node, kinds))
                ours = [n for n in inner if "ortops" in ast.unparse(n)]
                found += [f"{module_of(path)}: {ast.unparse(each)}" for each in ours]
    assert not found, "\n".join(found)
