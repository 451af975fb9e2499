"""The architecture, read from the source with `ast`: imports go down only, and adapters know no model.

    tether -> providers -> adapters.{megatron, vllm_engine} -> adapters.hf_convert -> adapters.{contract, physical}

`providers.registry` finds providers by name, never by import. A type-only import counts too: a module that names
another room's types depends on it.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import adapters

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("adapters", "providers", "tether")
ENGINE = [f"adapters.vllm_engine{folder}" for folder in ("", ".memory", ".worker", ".process", ".client")]
"""Each may import those before it; the engines of several processes and behind HTTP stand on the last."""
ENGINES = [f"adapters.vllm_engine{folder}" for folder in (".disaggregated", ".http")]
ROOMS = ("adapters", "adapters.hf_convert", "adapters.megatron", *ENGINE, *ENGINES, "providers", "tether")
"""Every module belongs to the longest of these that it starts with."""
MAY_IMPORT = {
    "adapters": {"adapters"},
    "adapters.hf_convert": {"adapters", "adapters.hf_convert"},
    "adapters.megatron": {"adapters", "adapters.hf_convert", "adapters.megatron"},
    **{room: {"adapters", "adapters.hf_convert", *ENGINE[: i + 1]} for i, room in enumerate(ENGINE)},
    **{room: {"adapters", "adapters.hf_convert", *ENGINE, room} for room in ENGINES},
    "providers": set(ROOMS) - {"tether"},
    "tether": set(ROOMS),
}
MODEL_NAMES = ("ouro", "olmoe")
SIDES = ("model", "engine")


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    """Source text of every module of the project by dotted name."""
    return {
        module_of(path.relative_to(ROOT)): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@functools.cache
def imports(module: str, source: str, *, is_package: bool = False) -> tuple[str, ...]:
    """Dotted names that a module imports, wherever the statement stands. `from a import b` counts as a and as a.b."""
    return tuple(_imports(module, source, is_package=is_package))


def _imports(module: str, source: str, *, is_package: bool) -> Iterator[str]:
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base += [node.module] if node.module else []
            yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def room_of(module: str) -> str | None:
    """The room of one of our modules, None for anybody else's."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default=None)


def provider_and_part(module: str) -> tuple[str, str] | None:
    """("ouro", "model") for providers.ouro.model and everything below it."""
    parts = module.split(".")
    return (parts[1], parts[2]) if parts[0] == "providers" and len(parts) > 2 else None


def side(part: str) -> str:
    """engine_layers, say, is on the engine's side."""
    return part.partition("_")[0]


def violation(module: str, imported: str) -> str | None:
    """What is wrong with one import, if anything."""
    ours, theirs = room_of(module), room_of(imported)
    if ours is None or theirs is None:
        return None
    if theirs not in MAY_IMPORT[ours]:
        return f"{module} imports {imported}: {ours} must not know {theirs}"
    one, other = provider_and_part(module), provider_and_part(imported)
    if module.startswith("providers.") and imported.startswith("providers.") and other is not None:
        if one is None:
            return f"{module} imports {imported}: the registry finds providers by name"
        if one[0] != other[0]:
            return f"{module} imports {imported}: providers do not know each other"
        if {side(one[1]), side(other[1])} == set(SIDES):
            return f"{module} imports {imported}: trainer side and engine side run in different processes"
    return None


def violations(modules: dict[str, str]) -> list[str]:
    found = set()
    for module, source in modules.items():
        is_package = (ROOT / module.replace(".", "/") / "__init__.py").is_file()
        for imported in imports(module, source, is_package=is_package):
            found.add(violation(module, imported))
    return sorted(text for text in found if text)


def model_names(module: str, source: str) -> list[str]:
    """Code and strings of a module that name a model. Docstrings may give one as an example, code may not."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = [token.string for token in tokens if token.type == tokenize.NAME]
    return sorted({f"{module}: {w}" for w in [*strings, *words] if any(name in w.lower() for name in MODEL_NAMES)})


def test_adapters_is_ours() -> None:
    """A package of that name is on the public index; the one imported must be this repository's."""
    assert adapters.__file__ is not None
    assert Path(adapters.__file__).resolve().parent == ROOT / "adapters"


def test_imports_go_down_only() -> None:
    """No upward import, no megatron <-> vllm_engine, no provider <-> provider, no model.py <-> engine.py."""
    modules = sources()
    assert len(modules) > 20, "the reader found too few modules to mean anything"
    assert violations(modules) == []


def test_adapters_name_no_model() -> None:
    """Whatever is special to one model belongs into its provider."""
    named = [
        line
        for module, text in sources().items()
        if module.startswith("adapters")
        for line in model_names(module, text)
    ]
    assert named == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("adapters.contract", "from adapters.hf_convert import digest"),
        ("adapters.hf_convert.digest", "import adapters.megatron.runtime"),
        ("adapters.megatron.trainer", "from adapters import vllm_engine"),
        ("adapters.vllm_engine.worker.worker", "from adapters.megatron.packing import pack"),
        ("adapters.vllm_engine.worker.worker", "from ...megatron import packing"),
        ("adapters.vllm_engine.memory.buckets", "from adapters.vllm_engine.worker import step"),
        ("adapters.vllm_engine.client.local", "from adapters.vllm_engine.http.engine import HttpEngine"),
        ("adapters.vllm_engine.disaggregated.engine", "from adapters.vllm_engine.http.engine import HttpEngine"),
        ("adapters.megatron.trainer", "def f():\n    import providers.registry"),
        ("providers.ouro.model", "from tether import settings"),
        ("providers.ouro.model", "from providers.ouro.engine import x"),
        ("providers.ouro.engine", "from .model import x"),
        ("providers.ouro.model", "from .engine_layers import x"),
        ("providers.ouro.config", "from providers.olmoe.config import x"),
        ("providers.registry", "import providers.ouro.config"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    """Mutation: each kind of forbidden import, added to the real sources, is reported and names the module."""
    modules = sources()
    modules[module] = modules.get(module, "") + f"\n{line}\n"
    found = violations(modules)
    assert found and all(text.startswith(f"{module} imports ") for text in found), found


@pytest.mark.parametrize("line", ["class OuroThing: ...", 'KIND = "ouro"', "def f(olmoe_layers): ...", "x.ouro = 1"])
def test_a_named_model_is_found(line: str) -> None:
    """Mutation: a model's name as a class, string, argument or attribute in an adapter is reported."""
    assert model_names("adapters.contract", sources()["adapters.contract"] + f"\n{line}\n")
