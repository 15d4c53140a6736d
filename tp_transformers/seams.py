"""Seams of the core: a feature is a folder of `features/`, and its `feature.py` says what it adds.

The core asks all features, and imports none by name: without its folder, a feature is not there, and nothing else ends.
A method of `Feature` exists for what at least two features add, or the core itself uses.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

from .errors import PlanError, shown

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.distributed_c10d import ProcessGroup, Store
    from transformers import PreTrainedModel

    from .checkpoint.reading.header import Checkpoint
    from .checkpoint.reading.jobs import Request
    from .loading.options import Options
    from .loading.request import LoadRequest
    from .plans.binding import Binding
    from .plans.rule import SplitHeads
    from .plans.rules import Plan
    from .ranks.direct import Transport
    from .ranks.group import TensorParallelGroup
    from .strategies import TensorParallelLayer

FOLDER = Path(__file__).with_name("features")
RAISES, REFUSED = "its call raises UnsupportedError", "a load with tp_plan is refused"
"""Consequences of a private name that a library lacks."""

Mixin: Any = object
"""Base of a mixin for loaded models; in the class of a model, a PreTrainedModel follows the mixin in the MRO."""
Compute = Callable[[type, Any, Any, Any], Any]
"""(class of the sharded parameters, torch function, arguments, keywords) -> result."""
Meet = Callable[["Store", int, int], "Store"]
"""(store of a launch, rank, number of ranks) -> the part of the store that these ranks use. Collective."""
Planned = Callable[[Callable[[dict[str, Any]], Any], Mapping[str, Any]], Any]
"""(`from_pretrained` of arguments with a `tp_plan`, the arguments given) -> what `from_pretrained` returns."""


class Planner(NamedTuple):
    """A way to make a plan for a model: a value of `tp_plan` beside "auto"."""

    make: Callable[[PreTrainedModel, int], Mapping[str, Any]]
    """(model on the meta device, number of ranks) -> plan, as in a YAML file. The first rank alone calls it."""
    advice: str
    """What the error of an architecture without a plan says of this way."""


class Option:
    """An argument of `from_pretrained` beside `tp_plan`."""

    name: ClassVar[str]
    """The argument is `tp_` and the name."""
    expected: ClassVar[str] = "True, False or None"
    example: ClassVar[str] = "True"

    @property
    def argument(self) -> str:
        return f"tp_{self.name}"

    def fits(self, value: Any) -> bool:
        """True for a value that the argument may have."""
        return value is None or isinstance(value, bool)

    def check(self, value: Any, arguments: Mapping[str, Any]) -> None:
        """Raise PlanError for a value that the argument may not have, or not beside transformers' `arguments`."""
        if not self.fits(value):
            fix = f"Pass {self.argument}={self.example}, or leave it out."
            raise PlanError(self.argument, got=shown(value), expected=self.expected, fix=fix)

    def agreed(self, value: Any) -> object:
        """What of the value has to be equal on all ranks."""
        return None


class PlanOption(Option):
    """An argument of `from_pretrained` that rewrites the rules of a plan, or that a check of the plan reads."""

    order: ClassVar[int]
    """Options rewrite in this order: 0 rules of experts, 1 of what is between blocks, 2 of the head, 3 all."""
    excludes: ClassVar[Sequence[str]] = ()
    """Options that cannot be set beside this one."""
    excludes_because: ClassVar[str] = ""

    def rewrite(self, plan: Plan, model: PreTrainedModel, size: int) -> Plan:
        """Rewrite the rules for `model`, on the meta device, on `size` ranks; `plan.options[name]` is the value.

        Raises PlanError for a model or rules that do not fit.
        """
        return plan


class Feature:
    """What one feature adds to the core. Each attribute and method is what is added; those of this class add nothing.

    `feature.py` is imported with the core and imports only this module at its top. An attribute names a module of the
    folder (".save"), or what a module has (".save.Saves"), and a method imports what it returns, so that a feature is
    imported when it is first used.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """Features that this one imports, by their folders."""
    public: ClassVar[Mapping[str, str]] = {}
    """Public names: "save_sharded" or "training.ExpertLoad" -> the module that has it."""
    torch_names: ClassVar[Mapping[str, str]] = {}
    """Private names of torch that this feature alone uses -> the consequence if torch lacks the name."""
    commands: ClassVar[Mapping[str, str]] = {}
    """Commands of `tp-transformers`: name -> module with SUMMARY, EXAMPLE, `configure(parser)` and `run(arguments) ->
    exit code`. Such a module imports neither torch nor transformers before it runs."""
    options: ClassVar[Sequence[Option]] = ()
    """Arguments of `from_pretrained`."""
    sections: ClassVar[Sequence[str]] = ()
    """Sections of plan files beside `attention`: classes of entries, which describe modules whose heads are split."""
    storages: ClassVar[Sequence[str]] = ()
    """Storages of weights. A load takes the first that finds its weights, in the order of `features()`, and asks the
    core's safetensors files last."""
    encodings: ClassVar[Sequence[str]] = ()
    """Encodings of checkpoints; a load asks them in this order."""
    holdings: ClassVar[Sequence[str]] = ()
    """Holdings of parameters in other forms than tensors; a load asks them in this order."""
    clients: ClassVar[Sequence[str]] = ()
    """Patches of other libraries, held from `enable()` to `disable()`."""
    model_methods: ClassVar[Sequence[str]] = ()
    """Classes whose methods a loaded model has before those of the core; each calls `super()`."""
    model_patches: ClassVar[Sequence[str]] = ()
    """Patches of other libraries, held as long as a model lives that was loaded with a plan."""

    def planners(self) -> Mapping[str, Planner]:
        """Values of `tp_plan`: name -> the way to make a plan."""
        return {}

    def shares(
        self, plan: Plan, model: PreTrainedModel, group: TensorParallelGroup, request: LoadRequest
    ) -> tuple[tuple[float, ...] | None, str] | None:
        """Shares of the ranks of a load in place of those of `plan`, None for even ones, and their reason; else None.

        `model` is on the meta device. Collective over all ranks of all copies.
        """
        return None

    def split_heads(self, bound: Binding) -> Mapping[str, SplitHeads]:
        """Split the heads of the modules that the entries of `sections` describe: module -> its heads.

        Adds the splits of children to `bound`, before rules are bound; may complete or replace the rules there.
        """
        return {}

    def check_plan(self, bound: Binding) -> Iterable[str]:
        """Faults of a plan that is bound to a model; notes for the user are added to `bound.notes`."""
        return ()

    def around_start(self) -> AbstractContextManager[Meet]:
        """Context of the start of the ranks' process group; what it returns is called with the store of the launch."""
        return nullcontext(_same_store)

    def transport(self, group: ProcessGroup) -> Transport | None:
        """Transport of the CPU tensors of `group`, of two ranks or more; None if the ranks cannot use one. Collective.

        Called when the ranks of a model, or of the copies of a shard, meet; the first transport that a feature returns,
        in the order of `features()`, is taken.
        """
        return None

    def around_imports(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Context of a `from_pretrained` with a `tp_plan` and these arguments, on this rank alone. It is entered before
        models and the modules of the load are imported, and imports none. It raises no error of one rank."""
        return nullcontext()

    def around_load(self, group: TensorParallelGroup, options: Options) -> AbstractContextManager[Any]:
        """Context of a load with a plan, on all ranks of `group`."""
        return nullcontext()

    def loaded(self, model: Any) -> None:
        """Called with a model at the end of its load with a plan, in the context of `around_load`."""

    def planned(self, arguments: Mapping[str, Any]) -> Planned | None:
        """How to load a model whose arguments of `from_pretrained` ask for a plan otherwise than by `tp_plan`."""
        return None

    def check_save(self, folder: Path, variant: str | None) -> None:
        """Raise for a folder or a variant in which a standard checkpoint would be taken for one of this feature, or be
        hidden by one. A rank that writes calls it, with the folder locked, before it writes there."""

    def sharded(self, module: nn.Module) -> None:
        """Add hooks to a module of a loaded model whose parameters have been sharded."""

    def around_reads(
        self, checkpoint: Checkpoint, requests: Sequence[Request], group: TensorParallelGroup, options: Options
    ) -> AbstractContextManager[Mapping[str, int]]:
        """Context of the reads of `requests`, on all ranks; it gives numbers of the load's report. Collective."""
        return nullcontext({})

    def after_save(self, group: TensorParallelGroup, file: Path, *, writes: bool) -> None:
        """Called on all ranks of all copies when `file` is written, on the ranks where `writes` is true. Collective."""

    def computes(self) -> Compute | None:
        """How torch functions compute on sharded parameters, outside of forwards; None for as the core does."""
        return None

    def around_call(self, caller: Any) -> AbstractContextManager[Any]:
        """Context of what all ranks call: `caller` is a loaded model, for its methods with the decorator `collective`,
        or the group whose tensors a function gathers, inside of `together`."""
        return nullcontext()

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        """Strategies by the names that plans give them."""
        return {}

    def strategy_of(self, value: Any) -> TensorParallelLayer | None:
        """The strategy for a name that no strategy has, or for an object that stands in a plan; else None.

        Raises PlanError for an object that looks like a strategy and would not work.
        """
        return None

    def strategy_hint(self, name: str) -> str:
        """A hint for the error about a name that is no strategy's, such as another library's; "" for none."""
        return ""


@cache
def features() -> Mapping[str, Feature]:
    """All features, sorted by the names of their folders, but those that a feature requires before the feature.

    A feature without those that it requires is left out.
    """
    left = {name: _feature(name) for name in sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]))}
    ordered: dict[str, Feature] = {}
    while ready := [name for name, feature in left.items() if ordered.keys() >= set(feature.requires)]:
        ordered |= {name: left.pop(name) for name in ready}
    return ordered


def _feature(name: str) -> Feature:
    feature: Feature = import_module(f".features.{name}.feature", __package__).FEATURE
    return feature


@cache
def added(kind: str) -> Sequence[Any]:
    """What all features add by the attribute `kind` of `Feature`, imported."""
    found = []
    for name, feature in features().items():
        for path in getattr(feature, kind):
            module, _, attribute = path.rpartition(".")
            found.append(getattr(import_module(f".features.{name}{module}", __package__), attribute))
    return found


@cache
def options() -> Sequence[Option]:
    """Options of all features."""
    return [option for feature in features().values() for option in feature.options]


@cache
def plan_options() -> Sequence[PlanOption]:
    """Those that rewrite a plan, in the order in which they do."""
    return sorted((option for option in options() if isinstance(option, PlanOption)), key=lambda option: option.order)


@cache
def public_names(package: str) -> Mapping[str, str]:
    """Public names of features in a package ("" for the top level): name -> module, relative to `tp_transformers`."""
    return {
        path.rpartition(".")[2]: f"features.{name}{module}"
        for name, feature in features().items()
        for path, module in feature.public.items()
        if path.rpartition(".")[0] == package
    }


T = TypeVar("T")


def first(answers: Iterable[T | None], default: T) -> T:
    """The first of the answers of features that is not None; features after it are not asked."""
    return next((answer for answer in answers if answer is not None), default)


def together(caller: Any) -> ExitStack:
    """Contexts of all features around what all ranks call; `caller`: see `Feature.around_call`."""
    with ExitStack() as stack:  # if one raises, it exits the earlier ones
        for around_call in _around_calls():
            stack.enter_context(around_call(caller))
        return stack.pop_all()


@cache
def _around_calls() -> Sequence[Callable[[Any], AbstractContextManager[Any]]]:
    """Those of features that have one: a context of each of the others would take as long as a small collective."""
    having = (feature for feature in features().values() if type(feature).around_call is not Feature.around_call)
    return [feature.around_call for feature in having]


C = TypeVar("C", bound=Callable[..., Any])


def collective(method: C) -> C:
    """Run a method of a loaded model, which all ranks call, in the contexts of all features: `Feature.around_call`."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with together(self):
            return method(self, *args, **kwargs)

    return cast("C", call)


def _same_store(store: Store, rank: int, size: int) -> Store:
    """Let the ranks use the store of the launch as it is."""
    return store
