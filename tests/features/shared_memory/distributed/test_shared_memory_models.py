"""Models whose ranks communicate through shared memory."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.models import PROMPTS, load
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.debug import check_replicas
from tp_transformers.ranks.direct import BACKEND, transport_of


def watched_on(folder: str, ranks: list[int]) -> tuple[Tensor, int, int]:
    """Run on every rank: logits where a dispatch mode listens on some ranks, its count, and that of the memory."""
    model = load(folder)
    mode = CommDebugMode() if model.tp_group.rank in ranks else nullcontext()
    memory = transport_of(model.tp_group.process_group)
    before = memory.collectives
    with mode, torch.no_grad():
        logits = model(PROMPTS).logits
    return logits, mode.get_total_counts() if isinstance(mode, CommDebugMode) else 0, memory.collectives - before


@pytest.mark.parametrize("ranks", wide([[1], [0, 1], []], 1))
def test_a_mode_that_listens_on_some_ranks_sees_collectives(pool, cases, ranks) -> None:
    folder = cases(9, 3).folder
    found = pool.run(2, watched_on, folder, ranks)
    plain = pool.run(2, watched_on, folder, [])
    for rank, (logits, counted, begun) in enumerate(found):
        assert torch.equal(logits, plain[rank][0])
        assert begun == plain[rank][2] > 0
        assert (counted > 0) == (rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "size"), [((9, 3), 2), ((8, 1), 3), ((8, 2), 4)])
@on_ranks()
def test_ranks_have_the_same_bits_after_a_hundred_steps(folder) -> None:
    """Of AdamW."""
    model = load(folder)
    assert transport_of(model.tp_group.process_group) is not BACKEND
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        model(PROMPTS, labels=PROMPTS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert check_replicas(model) == {}
