"""Changes to other libraries are undone: by `disable()`, or with the last model that needs them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Case
from tp_transformers import UnsupportedError
from tp_transformers.patches import Patch, nothing, replace, replace_all, when_imported

PROGRAM = '''
import gc, sys
import accelerate, peft, peft.utils.hotswap, torch, transformers, transformers.trainer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
import tp_transformers

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors")

def parts(value):
    kind = type(value).__name__
    if kind in ("staticmethod", "classmethod", "method"):
        yield value.__func__
    elif kind == "property":
        yield from (value.fget, value.fset)
    elif kind in ("dict", "OrderedDict", "list", "set"):
        yield from list(value.values()) if hasattr(value, "values") else list(value)
    else:
        yield value

def is_ours(value):
    return type(value).__name__ == "function" and "/tp_transformers/" in value.__code__.co_filename

def changed():
    """Names in the libraries that lead to functions of ours."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES:
            continue
        for owner in [module, *(each for each in list(vars(module).values()) if issubclass(type(each), type))]:
            for key, value in list(vars(owner).items()):
                if any(map(is_ours, parts(value))):
                    found.add(f"{getattr(owner, '__name__', name)}.{key}")
    return found

def watched():
    from torch.amp.grad_scaler import GradScaler
    from transformers import modeling_utils
    (step,) = torch.optim.SGD.step.__closure__
    return [
        dict(torch.nn.modules.module._global_module_registration_hooks), step.cell_contents,
        dict(vars(torch.optim.Optimizer)),
        *(dict(vars(each)) for each in (GradScaler, transformers.PreTrainedModel, AutoModelForCausalLM)),
        modeling_utils._get_resolved_checkpoint_files, modeling_utils.get_hf_quantizer,
        dict(vars(transformers.Trainer)), dict(vars(accelerate.Accelerator)), dict(vars(peft.PeftModel)),
        dict(vars(peft.tuners.tuners_utils.BaseTuner)), dict(vars(peft.tuners.lora.LoraLayer)),
    ]

GLOBAL = {"GradScaler._unscale_grads_", "Optimizer.profile_hook_step", "Optimizer.add_param_group",
          "torch.nn.modules.module._global_module_registration_hooks", "torch.nn.utils.parametrize._maybe_set",
          "safetensors.torch._to_ndarray", "Accelerator.get_state_dict", "Accelerator.save_state",
          "AcceleratedScheduler.step",
          "peft.utils.hotswap.hotswap_adapter_from_state_dict", "peft.utils.hotswap._pad_lora_weights"}
torch.optim.SGD([torch.zeros(1)])  # torch has put its hooks around the step
before = watched()
assert not changed(), changed()
with tp_transformers.enable():
    trainer = {name for name in changed() if name.startswith("Trainer.")}
    assert "Trainer._clip_grad_norm" in trainer  # held by models, too
    hook = changed() - trainer
    assert {"PreTrainedModel.from_pretrained", "PreTrainedModel._load_pretrained_model"} <= hook
    assert not GLOBAL & hook
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
    other = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
    assert GLOBAL <= changed(), changed()
wrapped = get_peft_model(other, LoraConfig(target_modules="all-linear"))
del model
gc.collect()
left = changed()
assert GLOBAL | trainer <= left and not hook & left, left
del other, wrapped
gc.collect()
assert not changed(), changed()
assert watched() == before
'''


@pytest.mark.slow
def test_nothing_remains_after_disable_and_the_last_model(cases) -> None:
    case: Case = cases(8, 4)
    subprocess.run([sys.executable, "-c", PROGRAM, str(case.folder)], check=True, timeout=240)


def test_a_patch_is_made_once_and_undone_after_its_last_holder() -> None:
    seen = []

    def install() -> Any:
        seen.append("made")
        return lambda: seen.append("undone")

    patch = Patch("library", "name", install)
    patch.hold()
    patch.hold()
    patch.release()
    assert seen == ["made"]
    assert patch.is_on
    patch.release()
    assert seen == ["made", "undone"]
    assert not patch.is_on


class SetsChild(nn.Module):
    """Its forward makes a module a child, so a compiled graph depends on torch's hooks of that."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other = self.child
        return self.other(x)


def test_a_patch_stays_while_a_model_is_compiled() -> None:
    def watch() -> Callable[[], None]:
        return nn.modules.module.register_module_module_registration_hook(lambda *_: None).remove

    patch, kept, held = Patch("torch", "hook", watch), Patch("torch", "other hook", watch), [nn.Module()]

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        held.clear()  # the garbage collector may do so
        return graph

    module, x = SetsChild(), torch.ones(2, 3)
    before = set(nn.modules.module._global_module_registration_hooks)  # models of other tests may still live
    patch.hold_for(held[0])
    assert torch.equal(torch.compile(module, backend=backend)(x), module(x))
    assert not held
    assert patch.is_on
    kept.hold()
    kept.release()
    assert not patch.is_on
    assert nn.modules.module._global_module_registration_hooks.keys() <= before


def test_a_wrapper_of_another_library_stays() -> None:
    owner = SimpleNamespace(double=lambda x: 2 * x)
    undo = replace(owner, "double", lambda original, x: original(x) + 1)
    ours = owner.double
    owner.double = lambda x: ours(x) + 10
    assert owner.double(3) == 17
    undo()
    assert owner.double(3) == 16


def test_a_missing_name_leaves_the_library_alone(caplog) -> None:
    def changes() -> Any:
        names = ("double", "_gone", "_lost")
        return replace_all((owner, name, lambda original, x: original(x) + 1) for name in names)

    owner = SimpleNamespace(__name__="library.module", double=lambda x: 2 * x)
    patch = Patch("library", "double", changes)
    model = nn.Module()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"library: no library\.module\._gone, library\.module\._lost"):
            patch.hold_for(model)
    assert owner.double(3) == 6
    assert len(caplog.records) == 1
    assert "_gone" in caplog.text
    patch = Patch("library", "double", changes, without=nothing)
    patch.hold_for(model)
    assert patch.missing
    with pytest.raises(UnsupportedError, match="_gone"):
        patch.refuse()
    with pytest.raises(UnsupportedError, match=r"no library\.module\._gone"):
        replace(owner, "_gone", lambda original: None)


def test_a_missing_name_is_refused_in_place_of_the_change() -> None:
    def refuse(original: Any, x: Any) -> Any:
        if x > 2:
            patch.refuse()
        return original(x)

    owner = SimpleNamespace(__name__="library.module", double=lambda x: 2 * x)
    patch = Patch(
        "library",
        "double",
        lambda: replace(owner, "_gone", refuse),
        without=lambda: replace(owner, "double", refuse),
    )
    patch.hold()
    assert owner.double(2) == 4
    with pytest.raises(UnsupportedError, match=r"no library\.module\._gone"):
        owner.double(3)
    owner._gone = owner.double
    patch.release()
    assert owner.double(3) == 6
    patch.hold()
    assert not patch.missing


def test_a_method_that_moved_to_a_base_is_replaced() -> None:
    class Base:
        def double(self, x: int) -> int:
            return 2 * x

    class Owner(Base):
        pass

    undo = replace(Owner, "double", lambda original, self, x: original(self, x) + 1)
    assert Owner().double(3) == 7
    assert Base().double(3) == 6
    undo()
    assert "double" not in vars(Owner)
    assert Owner().double(3) == 6


def test_a_module_is_changed_once_it_is_imported(tmp_path, monkeypatch) -> None:
    finders = list(sys.meta_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_later.py").write_text("import no_such_module\n")

    def install() -> Any:
        module = sys.modules["imported_later"]
        return replace(module, "double", lambda original, x: original(x) + 1)

    undo = when_imported("imported_later", install)
    with pytest.raises(ImportError):
        importlib.import_module("imported_later")
    (tmp_path / "imported_later.py").write_text("def double(x):\n    return 2 * x\n")
    importlib.invalidate_caches()
    module = importlib.import_module("imported_later")
    assert module.double(3) == 7
    assert sys.meta_path == finders
    undo()
    assert module.double(3) == 6
    undo = when_imported("imported_later", install)
    assert module.double(3) == 7, "at once"
    undo()
    when_imported("never_imported", install)()
    assert sys.meta_path == finders
    del sys.modules["imported_later"]


def test_two_changes_wait_for_one_module(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_twice.py").write_text("def double(x):\n    return 2 * x\n")
    undos = []
    for _ in range(2):

        def install() -> Any:
            return replace(sys.modules["imported_twice"], "double", lambda original, x: original(x) + 1)

        undos.append(when_imported("imported_twice", install))
    module = importlib.import_module("imported_twice")
    assert module.double(3) == 8
    for undo in reversed(undos):
        undo()
    assert module.double(3) == 6
    del sys.modules["imported_twice"]
