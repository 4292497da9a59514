"""Every module and name of the library is reached from its public names or its command line.

Roots are the names of `t3c.__all__`, `t3c.cli.main` and what the scripts in `examples/` import.
From there the source is read, never run:

- A module is reached if reached code imports it, or names it in a string ("t3c.engines.torch").
- A name of a module (function, class, constant) is reached if reached code refers to it, other than
  its own body. Importing a name or listing it in `__all__` is no use of it.
- A method or property is reached if its class is, and reached code other than its own body reads
  an attribute of that name; or its class is in `t3c.__all__`; or Python or a framework calls it:
  dunder methods, `FRAMEWORK`, and whatever a decorator registers (a command, a route, a validator).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import t3c

PACKAGE = Path(t3c.__file__).parent
EXAMPLES = Path(__file__).parents[1] / "examples"
EXCEPTIONS: dict[str, str] = {}  # name: why nothing in the library has to reach it

# Methods that a framework calls by name: torch's modules and functions, logging, html.parser...
FRAMEWORK = {"forward", "backward", "setup_context", "extra_repr"}
REGISTERING = {"field_validator", "model_validator", "field_serializer", "model_serializer"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Module:
    """One file: what it defines by name, what it imports by name, and what importing it runs."""

    name: str
    defined: dict[str, list[ast.AST]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    body: list[ast.AST] = field(default_factory=list)


@dataclass(frozen=True)
class Use:
    """What a piece of code refers to: modules, names of modules, and attributes of anything."""

    modules: frozenset[str]
    names: frozenset[tuple[str, str]]
    attributes: frozenset[str]


class Package:
    """The source of a package, by module."""

    def __init__(self, root: Path, name: str) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            dotted = ".".join((name, *(part for part in parts if part != "__init__")))
            self.modules[dotted] = Module(dotted)
            self._read(self.modules[dotted], ast.parse(path.read_text()))

    def _read(self, module: Module, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    module.imported[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        module.imported[alias.asname] = (alias.name, None)
        for statement in tree.body:
            names = _defined_by(statement)
            if not names or "__all__" in names:
                module.body += [] if names else [statement]
            for name in names:
                module.defined.setdefault(name, []).append(statement)

    def resolve(self, module: str, name: str) -> tuple[str, str | None] | None:
        """Return the module and the name that `name` stands for in a module; None: not ours."""
        here = self.modules[module]
        if name in here.defined:
            return module, name
        if name not in here.imported:
            return None
        source, original = here.imported[name]
        whole = source if original is None else f"{source}.{original}"
        if original is not None and source in self.modules:
            target = self.resolve(source, original)
            if target is not None:
                return target
        return (whole, None) if whole in self.modules else None

    def use(self, module: str, node: ast.AST, skip: tuple[ast.AST, ...] = ()) -> Use:
        """Return what a piece of code of a module refers to, without the parts to skip."""
        modules, names, attributes = set[str](), set[tuple[str, str]](), set[str]()

        def add(target: tuple[str, str | None] | None) -> None:
            if target is not None and target[1] is None:
                modules.add(target[0])
            elif target is not None and target[1] is not None:
                names.add((target[0], target[1]))

        for part in _walk(node, skip):
            if isinstance(part, ast.ImportFrom) and part.module:
                modules |= {part.module, *(f"{part.module}.{a.name}" for a in part.names)}
            elif isinstance(part, ast.Import):
                modules |= {alias.name for alias in part.names}
            elif isinstance(part, ast.Name):
                add(self.resolve(module, part.id))
            elif isinstance(part, ast.Attribute):
                attributes.add(part.attr)
                owner = self._module_of(module, part.value)
                if owner is not None:
                    add(self.resolve(owner, part.attr))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                modules.add(part.value)
                if part.value.isidentifier():
                    attributes.add(part.value)
            elif isinstance(part, ast.Tuple):  # ("t3c.engines.torch", "Torch"): a registry's line
                texts = [e.value for e in part.elts if isinstance(e, ast.Constant)]
                for owner in (text for text in texts if text in self.modules):
                    names |= {(owner, n) for n in texts if n in self.modules[owner].defined}
        return Use(frozenset(modules & set(self.modules)), frozenset(names), frozenset(attributes))

    def _module_of(self, module: str, node: ast.expr) -> str | None:
        if not isinstance(node, ast.Name):
            return None
        target = self.resolve(module, node.id)
        return target[0] if target is not None and target[1] is None else None

    def registers(self, module: str, decorators: list[ast.expr]) -> bool:
        """Return whether a decorator hands the function to something: `@app.command()`."""
        for decorator in decorators:
            made = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(made, ast.Name) and made.id in REGISTERING:
                return True
            if isinstance(made, ast.Attribute) and isinstance(made.value, ast.Name):
                owner = self.resolve(module, made.value.id)
                if owner is not None and owner[1] is not None:
                    return True
        return False


def _defined_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _walk(node: ast.AST, skip: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Yield a node and all below it but what is skipped, and without docstrings."""
    yield node
    for child in ast.iter_child_nodes(node):
        text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if child not in skip and not text:
            yield from _walk(child, skip)


def _methods(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    if not isinstance(node, ast.ClassDef):
        return []
    return [part for part in node.body if isinstance(part, FUNCTIONS)]


class Walk:
    """What is reached from some roots: modules, their names, and methods as `Class.method`."""

    def __init__(self, package: Package, roots: set[tuple[str, str]], public: set[str]) -> None:
        self.package, self.public = package, public
        self.modules, self.names = set[str](), set[tuple[str, str]]()
        self.attributes = set[str]()
        self.waiting: list[tuple[str, str, ast.AST]] = []  # methods nothing has read so far
        for module, name in roots:
            self._reach_module(module)
            self._reach_name(module, name)
        while ready := [entry for entry in self.waiting if entry[2].name in self.attributes]:  # type: ignore[attr-defined]
            self.waiting = [entry for entry in self.waiting if entry not in ready]
            for module, name, method in ready:
                self.names.add((module, name))
                self._follow(self.package.use(module, method))

    def unreached(self) -> list[str]:
        """Return modules that nothing reaches, and of the others names and methods."""
        missing = [name for name in self.package.modules if name not in self.modules]
        for name in sorted(self.modules):
            for defined in self.package.modules[name].defined:
                if not defined.startswith("__") and (name, defined) not in self.names:
                    missing.append(f"{name}.{defined}")
        return missing + sorted(f"{module}.{name}" for module, name, _ in self.waiting)

    def _follow(self, use: Use) -> None:
        self.attributes |= use.attributes
        for module in use.modules:
            self._reach_module(module)
        for module, name in use.names:
            self._reach_name(module, name)

    def _reach_module(self, name: str) -> None:
        if name in self.modules or name not in self.package.modules:
            return
        self.modules.add(name)
        self._reach_module(name.rpartition(".")[0])
        module = self.package.modules[name]
        for statement in module.body:
            self._follow(self.package.use(name, statement))
        for defined, statements in module.defined.items():
            for statement in statements:
                decorators = getattr(statement, "decorator_list", [])
                if self.package.registers(name, decorators):
                    self._reach_name(name, defined)

    def _reach_name(self, module: str, name: str) -> None:
        if (module, name) in self.names:
            return
        self.names.add((module, name))
        self._reach_module(module)
        for node in self.package.modules[module].defined.get(name, []):
            methods = _methods(node)
            self._follow(self.package.use(module, node, tuple(methods)))
            for method in methods:
                called = (
                    method.name.startswith("__")
                    or method.name in FRAMEWORK
                    or name in self.public
                    or self.package.registers(module, method.decorator_list)
                )
                if called:
                    self._follow(self.package.use(module, method))
                else:
                    self.waiting.append((module, f"{name}.{method.name}", method))


def library() -> Walk:
    """Return what is reached of t3c from its public names, its command line and the examples."""
    package = Package(PACKAGE, "t3c")
    lazy: Mapping[str, str] = vars(t3c)["_LAZY"]
    starts = {(lazy.get(name, "t3c"), name) for name in t3c.__all__} | {("t3c.cli", "main")}
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in package.modules:
                starts |= {(node.module, alias.name) for alias in node.names}
    roots = set[tuple[str, str]]()
    for module, name in starts:
        target = package.resolve(module, name)
        if target is not None:
            roots |= {(module, name), (target[0], target[1] or "")}
    return Walk(package, roots, set(t3c.__all__))


def test_everything_in_the_library_is_reached() -> None:
    walk = library()
    assert len(walk.modules) > 150
    missing = walk.unreached()
    assert sorted(set(missing) - set(EXCEPTIONS)) == []
    assert set(EXCEPTIONS) <= set(missing), "an exception that is reached is none"
