"""Column- and row-parallel styles under torch's `parallelize_module`, in every placement of input and output."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as theirs
from torch.distributed.tensor.parallel import parallelize_module

from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers import PlanError, full_tensor
from tp_transformers import strategies as ours

TOLERANCE = 1e-12  # float64: only the order of the sums differs
STYLES = (ours.ColwiseParallel, ours.RowwiseParallel)
INPUTS = (None, Replicate(), Shard(0), Shard(1), Shard(-2), Shard(-1), Shard(2), Partial())
OUTPUTS = (None, Replicate(), Shard(0), Shard(1), Shard(-1), Shard(2))
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "ColwiseParallel": (Replicate(), Shard(-1)),
    "RowwiseParallel": (Shard(-1), Replicate()),
}
BATCH, LENGTH, ROWS = 6, 12, 30


def start() -> Any:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return init_device_mesh("cpu", (dist.get_world_size(),))


def own(full: Tensor, placement: Any, mesh: Any, shares: Any = None) -> Tensor:
    """What this rank has of a tensor: its shard, of features by the shares of the ranks, or a summand."""
    if isinstance(placement, Partial):
        return full * (mesh.get_local_rank() + 1) / sum(range(mesh.size() + 1))
    if shares and placement.is_shard() and placement.dim % full.ndim == 2:
        return full.split([full.shape[-1] * share // sum(shares) for share in shares], -1)[mesh.get_local_rank()]
    return distribute_tensor(full, mesh, [placement], src_data_rank=None).to_local()


def differs(found: Tensor | None, expected: Tensor) -> bool:
    return found is None or found.shape != expected.shape or (found - expected).abs().max().item() > TOLERANCE


class Case:
    """A module, its input and a loss; everything in one process is the reference."""

    def __init__(self, module: nn.Module, x: Tensor, mesh: Any) -> None:
        self.module, self.mesh, self.x = module.double(), mesh, x
        full = x.clone().requires_grad_(x.is_floating_point())
        self.output = self.module(full)
        self.factor = torch.rand_like(self.output)
        (self.output * self.factor).sum().backward()
        self.output, self.grad = self.output.detach(), full.grad

    def faults(self, style: Any, takes: Any, leaves: Any, arrives: Any = None) -> list[str]:
        """Differences from one process; `arrives`: the placement of a DTensor as the input, if it is one."""
        local, mesh = style.use_local_output, self.mesh
        shares = style.ranks.shares if hasattr(style, "ranks") else None
        module = parallelize_module(copy.deepcopy(self.module), mesh, style)
        module.zero_grad()
        if arrives is None:
            x: Tensor = own(self.x, takes, mesh, shares).clone()
        else:
            x = distribute_tensor(self.x, mesh, [arrives])
        x = x.detach().requires_grad_(self.x.is_floating_point())
        output = module(x)
        found = []
        if local == isinstance(output, DTensor):
            found.append(f"a {type(output).__name__}")
        if isinstance(output, DTensor):
            if output.placements != (Shard(leaves.dim % output.ndim) if leaves.is_shard() else leaves,):
                found.append(str(output.placements))
            output = output.to_local()
        if differs(output.detach(), own(self.output, leaves, mesh, shares)):
            return [*found, f"output {tuple(output.shape)}"]
        (output * own(self.factor, leaves, mesh, shares)).sum().backward()
        if x.is_floating_point():
            # The gradient of a summand is that of the sum.
            expected = self.grad if isinstance(takes, Partial) else own(self.grad, arrives or takes, mesh, shares)
            grad = x.grad.redistribute(placements=[arrives]).to_local() if isinstance(x.grad, DTensor) else x.grad
            if differs(grad, expected):
                found.append("gradient of the input")
        for (name, param), expected_param in zip(module.named_parameters(), self.module.parameters(), strict=True):
            if differs(full_tensor(param, param.grad), expected_param.grad):
                found.append(f"gradient of {name}")
        return found


def shown(kind: Any) -> str:
    return f"{kind.__module__.partition('.')[0]} {kind.__name__}"


def linear(in_features: int, out_features: int, mesh: Any) -> Case:
    return Case(nn.Linear(in_features, out_features), torch.rand(BATCH, LENGTH, in_features).double(), mesh)


def embedding(rows: int, width: int, mesh: Any) -> Case:
    return Case(nn.Embedding(rows, width), torch.randint(rows, (BATCH, LENGTH)), mesh)


def check_placed(kind: Any, make: Any, sizes: tuple[int, int], local: bool, shares: Any = None) -> None:
    """Run on every rank: each pair of placements."""
    mesh = start()
    case, (takes, leaves) = make(*sizes, mesh), DEFAULTS[kind.__name__]
    for given, left in itertools.product(INPUTS, OUTPUTS):
        # Ids have no features, and no sums.
        if not case.x.is_floating_point() and given in (None, Shard(-1), Shard(2), Partial()):
            continue
        style = kind(input_layouts=given, output_layouts=left, use_local_output=local)
        style = style if shares is None else style.with_shares(shares)
        assert case.faults(style, given or takes, left or leaves) == [], (given, left)


@pytest.mark.parametrize("local", wide([False, True], 1))
@pytest.mark.parametrize("kind", wide([*STYLES, theirs.ColwiseParallel, theirs.RowwiseParallel], 2), ids=shown)
@on_ranks(2)
def test_a_linear_in_every_placement(kind, local) -> None:
    """Torch's own styles, too: the references are right."""
    check_placed(kind, linear, (10, 14), local)


@pytest.mark.parametrize(("sizes", "shares"), wide([((16, 24), (2, 1, 1)), ((10, 14), None)], 1))
@pytest.mark.parametrize("kind", wide(STYLES, 1))
@on_ranks(3)
def test_uneven_features(kind, sizes, shares) -> None:
    """By shares, no placement describes a shard; plain tensors need none."""
    check_placed(kind, linear, sizes, True, shares)


@pytest.mark.parametrize("size", wide([2, 3], 1))
@pytest.mark.parametrize("kind", STYLES)
@on_ranks()
def test_an_embedding_in_every_placement(kind) -> None:
    check_placed(kind, embedding, (ROWS, 18), True)


@pytest.mark.parametrize("kind", STYLES)
@on_ranks(2)
def test_a_dtensor_arrives_in_any_placement(kind) -> None:
    """DTensors arrive in another placement than the style expects of plain tensors."""
    case, (_, leaves) = linear(10, 14, start()), DEFAULTS[kind.__name__]
    for arrives, left in itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), OUTPUTS):
        style = kind(input_layouts=Shard(1), output_layouts=left)
        assert case.faults(style, Shard(1), left or leaves, arrives) == [], (arrives, left)


@on_ranks(2)
def test_layouts_are_followed_wherever_they_are_set() -> None:
    """Layouts that are set after `__init__`, as attributes, bare or in a tuple."""
    case = linear(10, 14, start())
    for kind, bare in itertools.product(STYLES, (True, False)):
        style = kind()
        style.input_layouts = Shard(1) if bare else (Shard(1),)
        style.output_layouts = Shard(0) if bare else (Shard(0),)
        style.use_local_output = bare
        assert case.faults(style, Shard(1), Shard(0)) == [], (kind, bare)


@on_ranks(3)
def test_the_other_features_of_a_packed_weight_are_chunked() -> None:
    """Features on the other side of a packed weight have torch.chunk's sizes, as of any weight."""
    mesh = start()
    for kind, sizes in ((ours.PackedColwiseParallel, (10, 14)), (ours.PackedRowwiseParallel, (14, 10))):
        for local in (True, False):
            style = kind(parts=1)
            style.input_layouts, style.output_layouts, style.use_local_output = Shard(-1), Shard(-1), local
            assert linear(*sizes, mesh).faults(style, Shard(-1), Shard(-1)) == [], (kind, local)


REFUSED = {
    "output_layouts": [Partial(), Partial("avg"), "Shard(1)", 1],
    "input_layouts": [Partial("max"), "Replicate()", 1, (Shard(0), Shard(1))],
}


@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [(kind, argument, value) for kind in STYLES for argument, values in REFUSED.items() for value in values],
)
def test_what_is_no_placement_of_such_a_layer_is_refused(kind, argument, value) -> None:
    with pytest.raises(PlanError, match=f"{argument} of {kind.__name__}: got .*, expected "):
        kind(**{argument: value})


def from_rank(source: int | None) -> list[float]:
    """Run on every rank: the values of a parameter that each rank has its own values of, one for each rank and part."""
    mesh = start()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(mesh.get_local_rank())
    plan = {"0": ours.ColwiseParallel(), "1": ours.RowwiseParallel(), "2": ours.SequenceParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=source)
    return [float(value) for param in model.parameters() for value in full_tensor(param).unique().tolist()]


@needs("sequence")
@pytest.mark.parametrize("source", [0, 1, None])
def test_values_come_from_the_rank_that_is_named(pool, source) -> None:
    for rank, found in enumerate(pool.run(2, from_rank, source)):
        sharded = [0.0, 1.0] if source is None else [float(source)]
        whole = [float(rank if source is None else source)]
        assert found == [*sharded, *sharded, *sharded, *whole, *whole, *whole]


@needs("sequence")
def test_a_rank_that_is_not_there_is_refused(pool) -> None:
    assert "src_data_rank" in pool.error(2, from_rank, 2)
