"""Every module and name of the library is reached from its public names or its command line.

Roots are the names of `t3c.__all__` and `t3c.cli` as a command. From there the source is
read, never run:

- A module is reached if reached code imports it, or names it in a string ("t3c.engines.torch").
- A name of a module (function, class, constant; private ones too) is reached if reached code other
  than its own body refers to it. To import a name, or to list it in `__all__`, is not to use it.
- A method or property is reached if its class is and reached code other than its own body reads an
  attribute of that name, formats it ("{0.cause}"), or passes the name to a call (`ask("beats")`).
  Of public classes (those in `t3c.__all__`, and those its functions return) all methods are.
- What Python or a framework calls is reached with what it belongs to: dunder names, `FRAMEWORK`,
  and what a decorator registers (a command, a route, a validator).

Attributes are compared by name alone, so a dead method that shares its name with a live one is not
found; nothing that is alive is reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import t3c

PACKAGE = Path(t3c.__file__).parent
EXCEPTIONS = {  # what nothing in the library has to reach, and why
    "t3c.runtime.pool.Pool.leased": "what is held now: how tests see that nothing is leaked",
}
FRAMEWORK = {  # methods called by name: by torch, typer, uvicorn, asyncio, Prometheus, Ray
    "forward", "backward", "setup_context", "extra_repr", "resolve_command", "handle_exit",
    "connection_made", "connection_lost", "on_message_begin", "on_headers_complete",
    "collect", "check_health",
}  # fmt: skip
REGISTERING = {"field_validator", "model_validator", "field_serializer", "model_serializer"}

FORMATTED = re.compile(r"\{0\.(\w+)")  # a field that `str.format` reads: "{0.profile}"

Name = tuple[str, str]  # a module and what it defines: "Tree", "Tree.grow"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """One file: what it defines by name, what it imports by name, and what importing it runs."""

    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    body: list[ast.stmt] = field(default_factory=list)


@dataclass
class Used:
    """What a piece of code refers to: modules, names of modules, and attributes of anything."""

    modules: set[str] = field(default_factory=set)
    names: set[Name] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)

    def add(self, target: tuple[str, str | None] | None) -> None:
        if target is not None and target[1] is not None:
            self.names.add((target[0], target[1]))
        elif target is not None:
            self.modules.add(target[0])


class Package:
    """The source of a package, by module."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            self.modules[name] = _read(ast.parse(path.read_text()))

    def resolve(self, module: str, name: str) -> tuple[str, str | None] | None:
        """Return where a name is defined: (module, None) for a module, None if it is not ours."""
        here = self.modules[module]
        if name in here.defined:
            return module, name
        source, original = here.imported.get(name, ("", None))
        if original is not None and source in self.modules:
            target = self.resolve(source, original)
            if target is not None:
                return target
        whole = source if original is None else f"{source}.{original}"
        return (whole, None) if whole in self.modules else None

    def used_by(self, module: str, code: ast.AST, skipped: list[Function]) -> Used:
        """Return what a piece of code of a module refers to, some functions in it left out."""
        used = Used()
        for node in _walk(code, skipped):
            if isinstance(node, ast.ImportFrom) and node.module:
                used.modules |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Import):
                used.modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Name):
                used.add(self.resolve(module, node.id))
            elif isinstance(node, ast.Attribute):
                used.attributes.add(node.attr)
                owner = self._owner(module, node.value)
                if owner is not None and owner[1] is None:
                    used.add(self.resolve(owner[0], node.attr))
            elif isinstance(node, ast.Call):
                used.attributes |= set(_texts(node.args))
            elif isinstance(
                node, ast.Tuple
            ):  # a line of a registry: ("t3c.engines.torch", "Torch")
                texts = _texts(node.elts)
                for owner_name in (text for text in texts if text in self.modules):
                    used.names |= {(owner_name, text) for text in texts}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.modules.add(node.value)
                used.attributes |= set(FORMATTED.findall(node.value))
        used.modules &= set(self.modules)
        used.names = {(m, n) for m, n in used.names if n in self.modules[m].defined}
        return used

    def registers(self, module: str, statement: ast.stmt) -> bool:
        """Return whether a decorator hands a function to something: `@app.command()`."""
        for decorator in getattr(statement, "decorator_list", []):
            made = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(made, ast.Name) and made.id in REGISTERING:
                return True
            if isinstance(made, ast.Attribute):
                owner = self._owner(module, made.value)
                if owner is not None and owner[1] is not None:
                    return True
        return False

    def _owner(self, module: str, node: ast.expr) -> tuple[str, str | None] | None:
        return self.resolve(module, node.id) if isinstance(node, ast.Name) else None


class Walk:
    """What is reached from some roots: modules, and names of modules."""

    def __init__(self, package: Package, roots: set[Name], public: set[Name]) -> None:
        self.package, self.public = package, public
        self.modules, self.names, self.attributes = set[str](), set[Name](), set[str]()
        self._unread: list[tuple[str, str, Function]] = []  # methods of reached classes
        for module, name in roots:
            self._reach(module, name)
        while read := [entry for entry in self._unread if entry[2].name in self.attributes]:
            self._unread = [entry for entry in self._unread if entry not in read]
            for module, name, method in read:
                self.names.add((module, name))
                self._follow(module, method)

    def missing(self) -> list[str]:
        """Return the modules that nothing reaches, and the names of the others."""
        missing = [name for name in self.package.modules if name not in self.modules]
        missing += [
            f"{module}.{name}"
            for module in self.modules
            for name in self.package.modules[module].defined
            if not _dunder(name) and (module, name) not in self.names
        ]
        return sorted(missing + [f"{module}.{name}" for module, name, _ in self._unread])

    def _follow(self, module: str, code: ast.AST, skipped: list[Function] | None = None) -> None:
        used = self.package.used_by(module, code, skipped or [])
        self.attributes |= used.attributes
        for name in used.modules:
            self._reach_module(name)
        for owner, name in used.names:
            self._reach(owner, name)

    def _reach_module(self, module: str) -> None:
        if module in self.modules or module not in self.package.modules:
            return
        self.modules.add(module)
        self._reach_module(module.rpartition(".")[0])
        for statement in self.package.modules[module].body:
            self._follow(module, statement)
        for name, statements in self.package.modules[module].defined.items():
            run = any(isinstance(one, Function) and _dunder(name) for one in statements)
            if run or any(self.package.registers(module, one) for one in statements):
                self._reach(module, name)

    def _reach(self, module: str, name: str) -> None:
        self._reach_module(module)
        if (module, name) in self.names:
            return
        self.names.add((module, name))
        for statement in self.package.modules[module].defined.get(name, []):
            inside = statement.body if isinstance(statement, ast.ClassDef) else []
            methods = [part for part in inside if isinstance(part, Function)]
            self._follow(module, statement, methods)
            for method in methods:
                called = _dunder(method.name) or method.name in FRAMEWORK
                kept = called or (module, name) in self.public
                if kept or self.package.registers(module, method):
                    self._follow(module, method)
                else:
                    self._unread.append((module, f"{name}.{method.name}", method))


def _read(tree: ast.Module) -> Module:
    module = Module()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module.imported[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    module.imported[alias.asname] = (alias.name, None)
    for statement in tree.body:
        names = _names_of(statement)
        for name in names:
            module.defined.setdefault(name, []).append(statement)
        module.body += [] if names else [statement]
    module.defined.pop("__all__", None)
    return module


def _names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, Function | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _walk(node: ast.AST, skipped: list[Function]) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _walk(child, skipped)


def _texts(nodes: list[ast.expr]) -> list[str]:
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def library() -> Walk:
    """Return what is reached of t3c."""
    package = Package(PACKAGE)
    roots = {("t3c", "__getattr__"), ("t3c.cli", "main"), ("t3c.cli.__main__", "main")}
    public = set()
    for name in t3c.__all__:
        target = package.resolve(vars(t3c)["_LAZY"].get(name, "t3c"), name)
        assert target is not None, name
        public.add((target[0], target[1] or ""))
    for module, name in tuple(public):
        for made in package.modules[module].defined[name]:
            returned = getattr(made, "returns", None)
            public |= package.used_by(module, returned, []).names if returned else set()
    return Walk(package, roots | public, public)


def test_everything_in_the_library_is_reached() -> None:
    walk = library()
    assert len(walk.modules) > 150
    missing = set(walk.missing())
    assert sorted(missing - set(EXCEPTIONS)) == []
    assert sorted(set(EXCEPTIONS) - missing) == [], "these are reached: no exception is needed"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A package with one thing of each kind that is reached, and one that is not."""
    files = {
        "__init__": "",
        "cli": (
            "from planted.trees import Tree, felled\n"  # importing is not using
            "import planted.shelves as shelves\n"
            "app = shelves.App()\n"
            "def main():\n    return Tree().grow() + lazily() + shelves.LIMIT\n"
            "def lazily():\n    from planted.late import late\n    return late()\n"
            "@app.command()\ndef registered():\n    return KINDS\n"
            "KINDS = {'oak': ('planted.oak', 'Oak')}\n"
        ),
        "trees": (
            "class Tree:\n"
            "    def __init__(self): self.age = 0\n"
            "    def grow(self): return 1\n"
            "    def forward(self): return 1\n"
            "    def shrink(self): return self.shrink()\n"
            "def felled(): return felled()\n"
            "def _sawn(): return 1\n"
        ),
        "shelves": "LIMIT = 3\nUNUSED = 4\nclass App: pass\n",
        "late": "def late(): return 1\n",
        "oak": "class Oak: pass\n",
        "lost": "from planted.trees import felled\nfelled()\n",
    }
    root = tmp_path / "planted"
    root.mkdir()
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    return root


def test_what_nothing_reaches_is_reported(planted: Path) -> None:
    walk = Walk(Package(planted), {("planted.cli", "main")}, set())
    assert walk.missing() == [
        "planted.lost", "planted.shelves.UNUSED", "planted.trees.Tree.shrink",
        "planted.trees._sawn", "planted.trees.felled",
    ]  # fmt: skip


def test_of_public_classes_every_method_is_reached(planted: Path) -> None:
    tree = ("planted.trees", "Tree")
    walk = Walk(Package(planted), {("planted.cli", "main"), tree}, {tree})
    assert "planted.trees.Tree.shrink" not in walk.missing()
