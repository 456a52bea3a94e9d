"""The layers of mxcli, enforced: who may import whom, what is imported when, and the shape of a module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mxcli"
MODULES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TREES = {module: ast.parse(text, module) for module, text in sorted(MODULES.items())}

# A folder is a layer, and so is a module beside them; each with what it may import of the others. "" is mxcli itself.
MAY_IMPORT = {
    "errors": set(),
    "numerics": {"errors"},
    "backends": {"", "errors", "numerics"},
    "files": {"errors", "numerics"},
    "flows": {"", "errors", "numerics", "backends", "files"},
    "output": {"", "errors", "numerics", "backends", "files", "flows"},
    "cli": {"", "errors", "numerics", "backends", "files", "flows", "output"},
    "api": {"errors", "numerics", "backends", "files", "flows"},
    "": {"errors", "numerics", "api"},
    "__main__": {"cli"},
}
SLOW = {"accelerate", "cupy", "gguf", "matplotlib", "torch", "transformers", "triton"}
IMPORTED_LATE = {"backends/cupy_device.py"}
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
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from imports_in(module, child, late, typing=True)
        for child in node.orelse:
            yield from imports_in(module, child, late, typing)
    else:
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from imports_in(module, child, late, typing)


def place(module: str, node: ast.stmt | ast.expr) -> str:
    return f"mxcli/{module}:{node.lineno}"


IMPORTS = {module: list(imports_in(module, tree)) for module, tree in TREES.items()}


def layer(module: str) -> str:
    """`files/layouts/own.py` is of `files`, `__init__.py` of ``."""
    return "" if module == "__init__.py" else module.split("/")[0].removesuffix(".py")


def imported_layer(entry: Import) -> str:
    """The layer of what is imported: `from mxcli import errors` is of `errors`, `import mxcli` of ``."""
    parts = entry.module.split(".")[1:]
    if not parts and entry.name and any((PACKAGE / f"{entry.name}{end}").exists() for end in (".py", "/__init__.py")):
        return entry.name
    return parts[0] if parts else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def called(module: str) -> Iterator[tuple[str, str]]:
    """Where, and the last name of, everything called: `print`, and `round` of `np.round(x)`."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call):
            yield place(module, node), ast.unparse(node.func).split(".")[-1]


def test_every_module_is_in_a_known_layer() -> None:
    assert {layer(module) for module in TREES} == set(MAY_IMPORT)


def test_imports_are_absolute() -> None:
    assert not [str(entry) for entries in IMPORTS.values() for entry in entries if entry.module.startswith(".")]


def test_imports_go_down_only() -> None:
    assert not [
        str(entry)
        for module, entries in IMPORTS.items()
        for entry in entries
        if entry.package == "mxcli" and imported_layer(entry) not in {layer(module), *MAY_IMPORT[layer(module)]}
    ]


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
