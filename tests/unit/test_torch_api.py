"""Private names of torch are listed in one module; each is used, and the installed torch has it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tp_transformers
from tests.support.imports import tree_of
from tp_transformers import torch_api
from tp_transformers.seams import REFUSED, features
from tp_transformers.torch_api import PRIVATE

ROOT = Path(tp_transformers.__file__).parent
API = ROOT / "torch_api.py"
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != API]

OTHERS = {
    *("_asdict", "_current_frames", "_exit", "_getframe"),  # Python's
    *("_cb", "_config", "_generation_thread", "_model"),  # of transformers' server, and of lm_eval
    *("_generation_loop_body", "_handle_critical_error", "_original_attn_impl", "_run_generation_loop"),  # of batches
    *(
        "_get_logits_processor",
        "_loss_function",
        "_retrieve_processors_kwargs",
        "_unused_fields",
    ),  # of the server and of models
    *("_attn_implementation", "_auto_class", "_device_mesh", "_experts_implementation", "_hf_peft_config_loaded"),
    *(
        "_fsdp_size",
        "_gradient_checkpointing_func",
        "_is_hf_initialized",
        "_keys_to_ignore_on_save",
        "_tp_plan",
        "_tp_size",
        "_weight_conversions",
    ),
    *("_BaseAutoModelClass", "_adjust_missing_and_unexpected_keys", "_from_config"),  # in transformers_api.py
    *("_get_resolved_checkpoint_files", "_load_pretrained_model"),
    "_global_mapping",  # of transformers' registries
    *("_check_overlapping_tokens", "_check_target_module_feedforward", "_cast_input_dtype"),  # of PEFT
    *("_did_swap_in_out_features", "_find_dim", "_prepare_adapter_config", "_setup_prompt_encoder"),
    "_tp_made",  # ours
}
"""Private attributes of objects that are not torch's."""


class Source:
    """Names in a module that begin with an underscore, and names that are imported from torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        package, *inner = path.relative_to(ROOT).parts
        self.user = f"features/{inner[0]}" if package == "features" else package
        self.nodes = list(ast.walk(tree_of(path)))
        self.aliases: dict[str, str] = {}
        """{name: dotted path in torch}"""
        self.imports: set[str] = set()
        """Dotted paths that are imported from torch."""
        self.bound: set[str] = set()
        """Names that are imported from `torch_api`."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for each in (each for each in node.names if each.name.partition(".")[0] == "torch"):
                    self.imports.add(each.name)
                    self.aliases[each.asname or "torch"] = each.name if each.asname else "torch"
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if module.partition(".")[0] == "torch" and not node.level:
                    found = {each.asname or each.name: f"{module}.{each.name}" for each in node.names}
                    self.imports |= set(found.values())
                    self.aliases |= found
                elif node.level and module.rpartition(".")[2] == "torch_api":
                    self.bound |= {each.name for each in node.names}

    def dotted(self, node: ast.AST) -> str | None:
        """The path of an expression that begins at a name imported from torch."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        base = self.dotted(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{node.attr}" if isinstance(node, ast.Attribute) and base else None

    def chains(self) -> set[str]:
        """Paths in torch to a private name, as an expression."""
        found = filter(None, (self.dotted(node) for node in self.nodes if isinstance(node, ast.Attribute)))
        return {path for path in found if is_private(path.rpartition(".")[2])}

    def attributes(self) -> set[str]:
        """Private attributes of objects other than `self`."""
        return {
            node.attr
            for node in self.nodes
            if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in OWN
        }

    def texts(self) -> Iterator[str]:
        """Private names as strings, and as arguments."""
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
                yield node.value
            elif isinstance(node, ast.keyword) and is_private(node.arg or ""):
                yield node.arg or ""

    def modules(self) -> set[str]:
        """Strings that begin as private paths in torch do."""
        texts = {node.value for node in self.nodes if isinstance(node, ast.Constant)}
        return {text for text in texts if isinstance(text, str) and re.fullmatch(r"torch(\.\w+)*\._[\w.]+", text)}

    def methods(self) -> set[str]:
        """Methods of classes that have a base."""
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef) and node.bases]
        return {node.name for each in classes for node in each.body if isinstance(node, ast.FunctionDef)}

    def own(self) -> set[str]:
        """Names that the module gives: to functions, to variables, and to attributes of `self`."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in OWN:
                names.add(node.attr)
        return names


OWN = ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


@cache
def sources() -> list[Source]:
    return [Source(path) for path in FILES]


@cache
def bound() -> dict[str, set[str]]:
    """{name in torch_api: private names of torch that it stands for}"""
    found = {}
    for node in ast.parse(API.read_text()).body:
        paths = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in PRIVATE}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            found[ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)] = paths
        elif isinstance(node, ast.FunctionDef):
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - {"PRIVATE"}
            found[node.name] = set().union(*(found.get(name, set()) for name in names))
    return {name: paths for name, paths in found.items() if paths and name != "PRIVATE"}


@cache
def of_features() -> dict[str, str]:
    """{private name of torch that one feature alone uses: the feature}"""
    return {path: f"features/{name}" for name, feature in features().items() for path in feature.torch_names}


def listed() -> set[str]:
    return PRIVATE.keys() | of_features().keys()


@cache
def taken() -> dict[str, set[str]]:
    """{path that modules of a feature bind: users}"""
    found = defaultdict(set)
    for source in sources():
        for node in source.nodes:
            path = getattr(node.args[0], "value", None) if isinstance(node, ast.Call) and node.args else None
            if path in listed() and ast.unparse(node.func) == "take":
                found[path].add(source.user)
    return found


def at_their_place() -> set[str]:
    """Listed names that no module binds."""
    return listed() - set().union(*bound().values()) - taken().keys()


def test_private_names_are_imported_from_one_module() -> None:
    imports = {(str(each.path), name) for each in sources() for name in each.imports if "._" in name}
    assert not imports
    chains = {(str(each.path), name) for each in sources() for name in each.chains() - at_their_place()}
    assert not chains
    modules = {(str(each.path), name) for each in sources() for name in each.modules() - taken().keys() - listed()}
    assert not {(path, name) for path, name in modules if not any(each.startswith(f"{name}.") for each in listed())}


def test_private_attributes_are_listed() -> None:
    listed = {name.rpartition(".")[2] for name in at_their_place()}
    own = set().union(*(each.own() for each in sources()))
    unknown = {(str(each.path), name) for each in sources() for name in each.attributes() - listed - own - OTHERS}
    assert not unknown
    owners = [torch_api._resolve(name.rpartition(".")[0]) for name in at_their_place()]
    theirs = {name for owner in owners if isinstance(owner, type) for name in dir(owner) if is_private(name)}
    overridden = {(str(each.path), name) for each in sources() for name in each.methods() & theirs - listed}
    assert not overridden


def test_each_listed_name_is_used_where_its_list_says() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    places = defaultdict(set)
    for name in at_their_place():
        places[name.rpartition(".")[2]].add(name)
    for source in (each for each in sources() if each.path.name != "feature.py"):
        chains = {name.rpartition(".")[2] for name in source.chains()}
        for name in {*source.attributes(), *source.texts(), *chains} & places.keys():
            users[name].add(source.user)
        for name in source.bound & bound().keys():
            for path in bound()[name]:
                users[path].add(source.user)
    for path, found in taken().items():
        users[path] |= found
    assert not PRIVATE.keys() & of_features().keys()
    for name, paths in {**places, **{path: {path} for path in listed() - at_their_place()}}.items():
        found = users.pop(name, set())
        alone = {of_features()[path] for path in paths & of_features().keys()}
        assert alone <= found, name
        assert bool(found - alone) == bool(paths & PRIVATE.keys()), name
    assert not users


def test_the_installed_torch_has_what_a_load_needs() -> None:
    torch_api.check()
    lacking = torch_api.lacking()
    assert REFUSED not in lacking.values()
    by_themselves = "meshes find a renewed group by themselves"
    assert set(lacking.values()) <= {torch_api._OTHER, by_themselves, "no mesh"}, lacking


def test_a_name_that_torch_lacks_refuses_a_load_and_nothing_else(monkeypatch) -> None:
    for name in ("torch.nn.Module._gone", "torch.gone._gone"):
        monkeypatch.setitem(PRIVATE, name, REFUSED)
    monkeypatch.setitem(PRIVATE, "torch._gone", "a consequence")
    torch_api.lacking.cache_clear()
    with pytest.raises(tp_transformers.UnsupportedError, match=r"no torch\.nn\.Module\._gone, torch\.gone\._gone"):
        torch_api.check()
    assert torch_api.lacking()["torch._gone"] == "a consequence"
    gone = torch_api.take("torch._gone")
    for use in (gone, lambda: gone.attribute):
        with pytest.raises(tp_transformers.UnsupportedError, match=r"no torch\._gone"):
            use()
    with tp_transformers.enable():
        pass
    monkeypatch.undo()
    torch_api.lacking.cache_clear()
