"""The layers of mxcli, enforced: who may import whom, what is imported when, and the shape of a module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mxcli"
MODULES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TREES = {module: ast.parse(text, module) for module, text in sorted(MODULES.items())}

# A folder is a layer, a folder of flows/ is a wing, and a module next to folders is a layer or wing of its own;
# each with what it may import. "" is mxcli itself, "flows" stands for all wings.
BELOW_FLOWS = {"", "atomic", "errors", "numerics", "backends", "files"}
MAY_IMPORT = {
    "errors": set(),
    "atomic": set(),
    "numerics": {"errors"},
    "backends": {"", "atomic", "errors", "numerics"},
    "files": {"atomic", "errors", "numerics"},
    "flows/doctor": BELOW_FLOWS,
    "flows/plan": BELOW_FLOWS,
    "flows/measure": BELOW_FLOWS | {"flows/plan"},
    "flows/products": BELOW_FLOWS | {"flows/plan"},
    "flows/bench": BELOW_FLOWS | {"flows/products", "flows/doctor"},
    "flows/write": BELOW_FLOWS | {"flows/plan", "flows/measure", "flows/products", "flows/doctor"},
    "flows/verify": BELOW_FLOWS | {"flows/plan", "flows/measure", "flows/write"},
    "flows/recommend": BELOW_FLOWS | {"flows/plan", "flows/measure", "flows/products", "flows/write"},
    "flows/capture": BELOW_FLOWS | {"flows/write", "flows/doctor"},
    "flows/emulate": BELOW_FLOWS | {"flows/plan", "flows/measure", "flows/products", "flows/write"},
    "flows/evaluate": BELOW_FLOWS
    | {"flows/plan", "flows/products", "flows/write", "flows/capture", "flows/emulate", "flows/doctor"},
    "output": {"", "atomic", "errors", "numerics", "backends", "files", "flows"},
    "cli": {"", "atomic", "errors", "numerics", "backends", "files", "flows", "output"},
    "api": {"atomic", "errors", "numerics", "backends", "files", "flows"},
    "torch_operator": {"api"},
    "": {"errors", "numerics", "api"},
    "__main__": {"cli"},
}
SLOW = {"accelerate", "compressed_tensors", "cupy", "gguf", "matplotlib", "torch", "torchao", "transformers", "triton"}
IMPORTED_LATE = {"backends/cupy_device.py", "torch_operator.py"}
"""The home of a slow package: nothing imports it before it is needed."""
LINES = 400


@dataclass(frozen=True)
class Import:
    """`module` with the `name` taken from it, if any, and the name it is `known_as` here; `late` is inside a function,
    `typing` for a type checker only."""

    where: str
    module: str
    name: str | None
    known_as: str
    late: bool
    typing: bool

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.where}: {self.module}{f' {self.name}' if self.name else ''}"


def imports_in(module: str, node: ast.AST, late: bool = False, typing: bool = False) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            known_as = alias.asname or alias.name.split(".")[0]
            yield Import(place(module, node), alias.name, None, known_as, late, typing)
    elif isinstance(node, ast.ImportFrom):
        source = "." * node.level + (node.module or "")
        for alias in node.names:
            yield Import(place(module, node), source, alias.name, alias.asname or alias.name, late, typing)
    elif isinstance(node, ast.If) and is_type_checking(node.test):
        for child in node.body:
            yield from imports_in(module, child, late, typing=True)
        for child in node.orelse:
            yield from imports_in(module, child, late, typing)
    else:
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # which holds no statement
                yield from imports_in(module, child, late, typing)


def is_type_checking(test: ast.expr) -> bool:
    named = isinstance(test, ast.Name | ast.Attribute)
    return named and ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def place(module: str, node: ast.stmt | ast.expr) -> str:
    return f"mxcli/{module}:{node.lineno}"


IMPORTS = {module: list(imports_in(module, tree)) for module, tree in TREES.items()}


def layer(module: str) -> str:
    """Return the layer of a module: `files/layouts/fp8.py` is in `files`, `flows/plan/plan.py` in `flows/plan`,
    `__init__.py` in ``."""
    parts = module.removesuffix(".py").removesuffix("__init__").strip("/").split("/")
    return "/".join(parts[:2] if parts[0] == "flows" else parts[:1])


def imported_module(entry: Import) -> str:
    """Return the path of the module that is imported: `from mxcli import errors` imports `errors.py`."""
    parts = entry.module.split(".")[1:]
    for end in ([*parts, entry.name] if entry.name else parts, parts):
        path = "/".join(end)
        for candidate in (f"{path}.py", f"{path}/__init__.py" if path else "__init__.py"):
            if candidate in TREES:
                return candidate
    raise AssertionError(f"{entry}: not a module of mxcli")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def called(module: str) -> Iterator[tuple[str, str]]:
    """Where, and the last name of, everything called: `print`, and `round` of `np.round(x)`."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call):
            yield place(module, node), ast.unparse(node.func).split(".")[-1]


def test_every_module_is_in_a_known_layer() -> None:
    assert {layer(module) for module in TREES} == {*MAY_IMPORT, "flows"}
    assert ast.unparse(TREES["flows/__init__.py"]).count("\n") == 0, "flows/__init__.py holds a docstring only"


def test_imports_are_absolute() -> None:
    assert not [str(entry) for entries in IMPORTS.values() for entry in entries if entry.module.startswith(".")]


def test_imports_go_down_only() -> None:
    assert not [
        str(entry)
        for module, entries in IMPORTS.items()
        for entry in entries
        if entry.package == "mxcli" and not may_import(layer(module), layer(imported_module(entry)))
    ]


def may_import(importer: str, imported: str) -> bool:
    allowed = MAY_IMPORT.get(importer, set())
    return imported == importer or imported in allowed or (imported.startswith("flows/") and "flows" in allowed)


def test_layers_and_modules_form_no_circle() -> None:
    """Layers of the table, and modules by what they import at any time but for a type checker."""
    layers = {name: {other for other in MAY_IMPORT if other != name and may_import(name, other)} for name in MAY_IMPORT}
    layers[""] -= {"api", "errors", "numerics"}  # names for users, imported when they are first used
    TopologicalSorter(layers).prepare()
    modules = {
        module: {imported_module(entry) for entry in entries if entry.package == "mxcli" and not entry.typing}
        - {module}
        for module, entries in IMPORTS.items()
    }
    modules["__init__.py"] = set()
    modules["backends/__init__.py"] = {name for name in modules["backends/__init__.py"] if name.startswith("numerics")}
    TopologicalSorter(modules).prepare()


def test_modules_use_public_names_of_others() -> None:
    wrong = []
    for module, tree in TREES.items():
        ours = [entry for entry in IMPORTS[module] if entry.package == "mxcli"]
        wrong += [str(entry) for entry in ours if any(map(is_private, [*entry.module.split("."), entry.name or ""]))]
        known = {entry.known_as for entry in ours}
        wrong += [
            f"{place(module, node)}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and is_private(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id in known
        ]
    assert not wrong


def test_numerics_need_the_standard_library_only_and_no_files() -> None:
    allowed = {"mxcli", *sys.stdlib_module_names} - {"io", "mmap", "os", "pathlib", "shutil", "tempfile"}
    numerics = [module for module in TREES if layer(module) == "numerics"]
    entries = [entry for module in numerics for entry in IMPORTS[module] if not entry.typing]
    assert not [str(entry) for entry in entries if entry.package not in allowed]
    assert not [where for module in numerics for where, name in called(module) if name == "open"]


def test_slow_packages_are_imported_where_they_are_used() -> None:
    early = [
        entry
        for module, entries in IMPORTS.items()
        for entry in entries
        if not entry.late and not entry.typing and module not in IMPORTED_LATE
    ]
    assert not [str(entry) for entry in early if entry.package in SLOW]
    late = {module.removesuffix(".py").replace("/", ".") for module in IMPORTED_LATE}
    assert not [str(entry) for entry in early if entry.module.removeprefix("mxcli.") in late]


def test_nobody_imports_click() -> None:
    assert not [str(entry) for entries in IMPORTS.values() for entry in entries if entry.package == "click"]


def test_values_are_rounded_by_the_kernels_only() -> None:
    modules = [module for module in TREES if layer(module) in ("api", "backends", "files")]
    rounding = {"around", "rint", "round", "round_"}
    assert not [f"{where}: {name}" for module in modules for where, name in called(module) if name in rounding]


def test_only_the_command_line_prints_and_exits() -> None:
    modules = [module for module in TREES if layer(module) != "cli"]
    assert not [f"{where}: {name}" for module in modules for where, name in called(module) if name in ("exit", "print")]


def test_modules_are_short() -> None:
    lengths = {f"mxcli/{module}": text.count("\n") for module, text in MODULES.items()}
    assert not {module: lines for module, lines in lengths.items() if lines > LINES}


def test_modules_say_what_they_are() -> None:
    assert not [module for module, tree in TREES.items() if not ast.get_docstring(tree)]
    vague = {"common", "helpers", "misc", "util", "utils"}
    assert not [module for module in TREES if vague & set(module.removesuffix(".py").split("/"))]


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import mxcli", SLOW | {"numpy", "typer", "rich"}),
        ("import mxcli; dir(mxcli); mxcli.__version__", SLOW | {"numpy", "typer", "rich"}),
        ("from mxcli.cli.app import run; run(['--help'])", SLOW | {"numpy"}),
        ("from mxcli.cli.app import run; run(['report', '--help'])", SLOW | {"numpy"}),
        ("from mxcli.cli.app import run; run(['report', '--no-such-option'])", SLOW | {"numpy"}),
        ("from mxcli.cli.app import run; run(['formats'])", SLOW | {"numpy"}),
    ],
)
def test_what_is_not_used_is_not_imported(code: str, absent: set[str]) -> None:
    code += "\nimport sys\nsys.stderr.write('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not absent & set(done.stderr.splitlines()[-1].split())
