"""The transport of CUDA tensors of a process group: all-reduces by the chosen way, everything else by the backend.

Set up for a group as shared memory is, if TP_TRANSFORMERS_ALL_REDUCE asks for it:

    facts of all ranks ─> possible ways ─> buffers ─> check of each way ─> the ways that worked on all ranks

All steps end with a vote, so that all ranks use the same ways. The choice depends on the size and dtype of a tensor,
and on facts about the group alone, as do the sizes of chunks: it is the same on all ranks.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import threading
import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, get_backend_config

from ...errors import MeshError, nearest
from ...logs import get_logger
from ...torch_api import disable_current_modes, get_default_store
from ..messages import exchange
from ..shared_memory.interface import SUM, Transport
from .checked import Vote, check
from .choice import SYMMETRIC_DTYPES, Situation, Way, candidates, choose, obstacle
from .ways import Buffer, Registered, Symmetric, facts_of, situation_of

logger = get_logger(__name__)

VARIABLE = "TP_TRANSFORMERS_ALL_REDUCE"
"""Environment variable: "nccl" (default), "auto", or the name of one way."""
AUTO = "auto"
VALUES = (Way.NCCL.value, AUTO, *(way.value for way in Way if way is not Way.NCCL))

ROOM = 16 << 20
"""Bytes of each buffer; longer tensors pass in chunks."""
DTYPES = (*SYMMETRIC_DTYPES, torch.float16)

_transports: dict[int, Transport | None] = {}
"""The transports of process groups by `id`; None for a group that uses its backend."""


class AllReduce(Transport):
    """Sums of CUDA tensors by the ways that were checked; other collectives, and maxima, by the backend.

    Runs on the current stream. A dispatch mode does not see it, since it may be active on some ranks only. A lost rank
    leaves the kernels of the others waiting, which nothing ends but the process: NCCL's can be aborted, these cannot.
    """

    def __init__(self, situation: Situation, asked: Way | None) -> None:
        """`asked`: as in `choose`. The ways come into `buffers` once they are checked."""
        self.buffers: dict[Way, Buffer] = {}
        self.collectives = 0
        self._situation, self._asked = situation, asked
        self._choices: dict[tuple[int, torch.dtype], Way] = {}
        self._stream: object = None
        self._lock = threading.Lock()
        self._ended = ""

    @property
    def ended(self) -> str:
        """See `Transport`."""
        return self._ended

    def end(self, why: str) -> None:
        """Let later collectives raise. May be called from any thread."""
        self._ended = why

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM, *, by_backend: bool = False) -> bool:
        """Sum `x` over the ranks in place; returns False if the choice is NCCL."""
        if op is not SUM and op != SUM:
            return False
        way = self._choices.get((x.nbytes, x.dtype)) or self._choose(x)
        if way is Way.NCCL or (way is Way.NCCL_SYMMETRIC and torch.cuda.is_current_stream_capturing()):
            return False
        if self._ended:
            raise dist.DistBackendError(f"an all-reduce by {way.value!r}: {self._ended}")
        with self._lock:
            self.collectives += 1
            if not by_backend:
                self._sum(way, x.detach())
            else:
                with disable_current_modes():
                    self._sum(way, x.detach())
        return True

    def check(self, way: Way, buffer: Buffer, vote: Vote) -> str:
        """Add a way if it works on all ranks; returns the reason if it does not. Collective; raises MeshError."""
        self.buffers[way] = buffer
        dtypes = [dtype for dtype in DTYPES if not obstacle(way, dtype, self._situation)]
        why = check(way, partial(self._sum, way), dtypes, buffer.device, buffer.nbytes, vote, variable=VARIABLE)
        if why:
            del self.buffers[way]
        return why

    def _choose(self, x: Tensor) -> Way:
        if len(self._choices) > 4096:
            self._choices.clear()
        way = choose(x.nbytes, x.dtype, self._situation, self.buffers.keys(), self._asked)
        self._choices[x.nbytes, x.dtype] = way
        return way

    def _sum(self, way: Way, x: Tensor) -> None:
        buffer = self.buffers[way]
        self._follow(buffer.device)
        function, flat = buffer.ways[way], x.contiguous().view(-1)
        if x.nbytes <= buffer.nbytes:
            function(flat)
        else:
            for chunk in flat.split(buffer.nbytes // x.itemsize):
                function(chunk)
        if not x.is_contiguous():
            x.copy_(flat.view_as(x))

    def _follow(self, device: torch.device) -> None:
        """Let the current stream wait for the stream of the previous call: they share a buffer.

        Not in a capture, before which torch.cuda.graph waits for the device. Replays of graphs are for the caller to
        order.
        """
        stream = torch.get_device_module(device).current_stream()
        if stream == self._stream:
            return
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream


def transport_of(group: dist.ProcessGroup) -> Transport | None:
    """The transport of CUDA tensors of `group`; None for the backend."""
    return _transports.get(id(group))


def accelerate(group: dist.ProcessGroup) -> None:
    """Set up the transport of `group` if the environment asks for one. Collective; a second call does nothing.

    Raises MeshError on all ranks if the variable has an unknown value or differs between ranks, or if a kernel hangs.
    """
    if id(group) in _transports:
        return
    own, config = (os.environ.get(VARIABLE) or Way.NCCL.value, secrets.token_hex(8)), get_backend_config(group)
    answers, device = [own], torch.device("cpu")
    if group.size() > 1 and "cuda:nccl" in config:
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        answers = [pickle.loads(each) for each in exchange(pickle.dumps(own), group, device)]
    asked = _agreed([value for value, _ in answers])
    _transports[id(group)] = None
    weakref.finalize(group, _transports.pop, id(group), None).atexit = False
    if asked == Way.NCCL.value or group.size() == 1 or "cuda:nccl" not in config:
        return
    store = PrefixStore(f"tp_transformers/{answers[0][1]}", get_default_store())
    _transports[id(group)] = _join(group, device, asked, Vote(store, group.rank(), group.size()))


def _agreed(values: list[str]) -> str:
    """The value of the variable on all ranks. Raises MeshError for an unknown one, or different ones."""
    for rank, value in enumerate(values):
        if value not in VALUES or value != values[0]:
            raise MeshError(
                VARIABLE,
                got=f"{value!r} on rank {rank}" + (f" and {values[0]!r} on rank 0" if value in VALUES else ""),
                expected=f"one of {', '.join(VALUES)} on all ranks{'' if value in VALUES else nearest(value, VALUES)}",
                fix="Leave it out for NCCL.",
            )
    return values[0]


@torch.inference_mode(False)
@torch.no_grad()
def _join(group: dist.ProcessGroup, device: torch.device, asked: str, vote: Vote) -> Transport | None:
    """The transport of this rank with the ways that work on all ranks; None without any. Collective.

    Rank 0 logs the reasons for NCCL: at WARNING if a way failed, or was asked for by its name; else at INFO.
    """
    one = None if asked == AUTO else Way(asked)
    facts, why = vote.on(partial(facts_of, device))
    situation = Situation(vote.size) if why else situation_of(facts)
    others = {one} if one is not None else {*Way} - {Way.NCCL} if why else candidates(situation)
    reasons = {way: why or obstacle(way, torch.float32, situation) for way in Way if way in others}
    transport, level = AllReduce(situation, one), logging.INFO if one is None and not why else logging.WARNING
    for kind in (Symmetric, Registered):
        buffer = kind(group, device, ROOM)
        ways = [way for way in buffer.ways if reasons.get(way) == ""]
        why = vote.on(buffer.allocate)[1] or vote.on(partial(buffer.connect, group))[1] if ways else ""
        for way in ways:
            reasons[way] = why or transport.check(way, buffer, vote)
            level = logging.WARNING if reasons[way] else level
    if vote.rank == 0 and (any(reasons.values()) or not reasons):
        instead = "; ".join(f"{way.value}: {why}" for way, why in reasons.items() if why) or "others: not measured"
        logger.log(level, "%d ranks all-reduce by NCCL in place of %s", vote.size, instead)
    return transport if transport.buffers else None
