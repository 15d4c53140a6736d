"""The choice of an all-reduce on GPUs, held against tables that other projects publish."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_transformers.ranks.all_reduce.choice import IN_RANK_ORDER, Situation, Way, candidates, choose, obstacle
from tp_transformers.ranks.all_reduce.ways import Facts, situation_of

KIB, MIB = 1 << 10, 1 << 20

VLLM = {
    (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB},
    (10, 0): {2: 8 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB},
    (10, 3): {2: 4 * MIB, 4: 32 * MIB, 6: 32 * MIB, 8: 64 * MIB},
}
"""vLLM, distributed/device_communicators/all_reduce_utils.py, commit 00d618a: SYMM_MEM_ALL_REDUCE_MAX_SIZES."""
VLLM_MULTIMEM = {(9, 0): [4, 6, 8], (10, 0): [6, 8], (10, 3): [6, 8]}
"""The same, symm_mem.py, commit 00859a5: _WORLD_SIZES_MULTIMEM; two_shot_all_reduce_ otherwise."""
SGLANG = {2: 64 * MIB, 4: 64 * MIB, 6: 128 * MIB, 8: 128 * MIB}
"""SGLang, distributed/device_communicators/all_reduce_utils.py, commit 25b38cc: for capabilities 9 and 10."""
TORCHTITAN_ONE_SHOT, TORCHTITAN_TWO_SHOT = 128 * KIB, 16 * MIB
"""torchtitan, distributed/comms.py, commit 08342a6: without multicast, on 8 H100; for 2, 4 and 8 ranks."""
TORCH_TWO_SHOT = 10 * MIB
"""torch, csrc/distributed/c10d/symm_mem/intra_node_comm.cu: kTwoShotThreshBytes."""

H100 = Situation(8, True, "nvlink", True, (9, 0), (2, 13), (2, 30, 7))
ALL = frozenset(Way)
NCCLS = (Way.NCCL, Way.NCCL_SYMMETRIC)
BF16 = torch.bfloat16


@pytest.mark.parametrize("capability", VLLM)
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_sizes_with_multicast_are_those_of_vllm(capability: tuple[int, int], ranks: int) -> None:
    situation, most = replace(H100, ranks=ranks, capability=capability), VLLM[capability][ranks]
    kernel = choose(most, BF16, situation, ALL)
    if ranks == 2:  # one step moves no more bytes than two
        assert kernel is Way.ONE_SHOT
    else:
        assert kernel is (Way.MULTIMEM if ranks in VLLM_MULTIMEM[capability] else Way.TWO_SHOT)
    assert choose(most + 2, BF16, situation, ALL) in NCCLS
    assert choose(SGLANG[ranks] + 2, BF16, situation, ALL) in NCCLS


@pytest.mark.parametrize("ranks", [4, 8])
def test_sizes_without_multicast_are_those_of_torchtitan(ranks: int) -> None:
    situation = replace(H100, ranks=ranks, multicast=False)
    assert choose(TORCHTITAN_ONE_SHOT, BF16, situation, ALL) is Way.ONE_SHOT
    assert choose(TORCHTITAN_ONE_SHOT + 2, BF16, situation, ALL) is Way.TWO_SHOT
    assert choose(TORCHTITAN_TWO_SHOT, BF16, situation, ALL) is Way.TWO_SHOT
    assert choose(TORCHTITAN_TWO_SHOT + 2, BF16, situation, ALL) in NCCLS
    a100 = replace(situation, capability=(8, 0))
    assert choose(TORCH_TWO_SHOT, BF16, a100, ALL) is Way.TWO_SHOT
    assert choose(TORCH_TWO_SHOT + 2, BF16, a100, ALL) in NCCLS


def test_short_ones_take_one_step_as_in_inductor() -> None:
    from torch._inductor import config

    assert config._collective.one_shot_all_reduce_threshold_bytes == TORCHTITAN_ONE_SHOT


@pytest.mark.parametrize(
    ("changed", "way"),
    [
        ({"peers": "pcie", "ranks": 2, "multicast": False}, Way.ONE_SHOT),
        ({"peers": "pcie", "ranks": 4, "multicast": False}, Way.NCCL),  # vLLM: at most two GPUs without NVLink
        ({"peers": "none"}, Way.NCCL),
        ({"ranks": 3}, Way.NCCL),  # not measured
        ({"capability": (7, 5)}, Way.NCCL_SYMMETRIC),
        ({"capability": (7, 5), "nccl": (2, 26, 5)}, Way.NCCL),
        ({"capability": (7, 5), "nccl": (2, 29, 7)}, Way.NCCL),  # a race until 2.30.7
        ({"capability": (7, 5), "torch": (2, 8)}, Way.NCCL),
        ({"one_machine": False}, Way.NCCL),
    ],
)
def test_a_short_one_elsewhere(changed: dict[str, object], way: Way) -> None:
    assert choose(8 * KIB, BF16, replace(H100, **changed), ALL) is way


situations = st.builds(
    Situation,
    ranks=st.integers(2, 72),
    one_machine=st.booleans(),
    peers=st.sampled_from(["nvlink", "pcie", "none"]),
    multicast=st.booleans(),
    capability=st.sampled_from([(7, 0), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]),
    torch=st.sampled_from([(2, 8), (2, 9), (2, 13)]),
    nccl=st.sampled_from([(2, 21, 5), (2, 27, 3), (2, 29, 7), (2, 30, 7), (3, 0, 0)]),
    deterministic=st.booleans(),
)
dtypes = st.sampled_from([torch.float32, BF16, torch.float16, torch.float64, torch.int64])
working = st.sets(st.sampled_from(list(Way)))


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 1 << 40), dtypes, situations, working, st.none() | st.sampled_from(list(Way)))
def test_every_choice_is_possible(
    nbytes: int, dtype: torch.dtype, situation: Situation, works: set[Way], asked: Way | None
) -> None:
    way = choose(nbytes, dtype, situation, works, asked)
    assert way is Way.NCCL or way in works
    assert not obstacle(way, dtype, situation)
    assert asked in (None, way) or way is Way.NCCL
    if not situation.one_machine:
        assert way in NCCLS
    if situation.deterministic:
        assert way in (*IN_RANK_ORDER, Way.NCCL)
    if way is Way.MULTIMEM:
        assert situation.multicast
    if way in (Way.ONE_SHOT, Way.TWO_SHOT, Way.MULTIMEM):
        assert dtype in (torch.float32, BF16)
        assert situation.peers != "none"
    assert asked is not None or way in {*candidates(situation), Way.NCCL}
    if asked in works and not obstacle(asked, dtype, situation) and nbytes:
        assert way is asked


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1 << 40), situations.filter(lambda each: each.peers != "none" and each.capability >= (8, 0)))
def test_a_deterministic_sum_has_one_order_at_all_sizes(nbytes: int, situation: Situation) -> None:
    situation = replace(situation, deterministic=True, one_machine=True)
    assert choose(nbytes, BF16, situation, ALL) in IN_RANK_ORDER


def test_a_situation_is_that_of_the_weakest_rank() -> None:
    def facts(rank: int, link: str = "nvlink", **changed: object) -> Facts:
        reach = {f"gpu {other}": link for other in range(3) if other != rank}
        return replace(Facts("host", f"gpu {rank}", reach, True, (9, 0), (2, 13), (2, 30, 7)), **changed)

    ranks = [facts(0), facts(1), facts(2)]
    assert situation_of(ranks) == replace(H100, ranks=3)
    assert situation_of([*ranks[:2], facts(2, "pcie")]).peers == "pcie"
    assert situation_of([*ranks[:2], facts(2, reach={"gpu 0": "nvlink"})]).peers == "none"  # it does not see gpu 1
    assert situation_of([*ranks[:2], facts(2, gpu="gpu 1")]).peers == "none"  # two ranks on one GPU
    assert not situation_of([*ranks[:2], facts(2, machine="other")]).one_machine
    assert not situation_of([*ranks[:2], facts(2, multicast=False)]).multicast
    assert situation_of([*ranks[:2], facts(2, capability=(8, 0))]).capability == (8, 0)
    assert situation_of([*ranks[:2], facts(2, deterministic=True)]).deterministic
