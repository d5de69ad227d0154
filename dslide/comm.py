"""The ranks of a run and what they exchange. The only file that knows MPI.

A training step has three exchanges (Exchange below), all of them point-to-point with the receives posted
first and no message of 64 KB or more, which Open MPI would send by a handshake that halves a slow link's
speed. Everything else (start-up, evaluation, stopping) is a small collective and is counted apart.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core

MESSAGE_BYTES = 60_000
_UNDER_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
Floats = NDArray[np.float32]
Meanwhile = Callable[[], bool]  # does a little of some work, and returns False if there is none


def no_work() -> bool:
    """A Meanwhile."""
    return False


class Messages:
    """What a rank sends and receives in one exchange: made known to MPI once, then started any number of
    times. The buffers must stay."""

    def __init__(self, requests: list[Any], sent_bytes: int) -> None:
        self.requests, self.sent_bytes = requests, sent_bytes


class LocalComm:
    """One process: every exchange is the identity. Also the interface of MpiComm."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.payload_bytes = 0  # what this rank sent in training steps
        self.other_bytes = 0  # rows that this rank sent in evaluations
        self.wait_seconds = 0.0  # spent waiting in the training steps' exchanges
        self.paused = False  # evaluation: traffic is counted as other, waits not at all

    def barrier(self) -> None:
        """Returns when every rank has come here."""

    def rest(self) -> None:
        """As `barrier`, for ranks that wait for long: their cores are free."""

    def gather(self, item: Any) -> list[Any] | None:
        """The items of all ranks, in order, on rank 0; None elsewhere. Any picklable object."""
        return [item]

    def bcast(self, item: Any) -> Any:
        """Rank 0's item on every rank."""
        return item

    def agree(self, value: float) -> float:
        """The largest of all ranks' values, the same everywhere."""
        return value

    def prepare(self, sends: list[tuple[int, Any]], receives: list[tuple[int, Any]], tag: int) -> Messages:
        """Messages from and to contiguous (peer, buffer)s, for `start`."""
        return Messages([], 0)

    def start(self, messages: Messages) -> None:
        """Begins to move them; the buffers belong to the exchange until `finish`. All ranks start what they
        have for each other in the same order."""

    def finish(self, messages: Messages, meanwhile: Meanwhile = no_work) -> None:
        """Waits for what was started, and works `meanwhile`."""

    def split(self, parts: int) -> "tuple[LocalComm, int]":
        """Collective. One of `parts` equal groups of consecutive ranks, the own one, and its number."""
        return LocalComm(), 0

    def abort(self, status: int) -> None:
        """Ends the whole job with `status`."""
        raise SystemExit(status)


class MpiComm(LocalComm):
    """The ranks that mpiexec started."""

    def __init__(self, silent: bool = False, world: Any = None) -> None:
        """`silent`: rows never travel (buffers keep zeros), to time a step without links. `world`: MPI's
        communicator, default COMM_WORLD."""
        super().__init__()
        from mpi4py import MPI

        self._mpi, self._world, self._silent = MPI, world or MPI.COMM_WORLD, silent
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def barrier(self) -> None:
        self._world.Barrier()

    def rest(self) -> None:
        request = self._world.Ibarrier()
        while not request.Test():
            time.sleep(1e-3)

    def gather(self, item: Any) -> list[Any] | None:
        return self._world.gather(item)  # type: ignore[no-any-return]

    def bcast(self, item: Any) -> Any:
        return self._world.bcast(item)

    def agree(self, value: float) -> float:
        return float(self._world.allreduce(value, self._mpi.MAX))

    def prepare(self, sends: list[tuple[int, Any]], receives: list[tuple[int, Any]], tag: int) -> Messages:
        requests = []
        if not self._silent:
            for peer, buffer in receives:
                requests += [self._world.Recv_init(part, peer, tag) for part in _parts(buffer)]
            for peer, buffer in sends:
                requests += [self._world.Send_init(part, peer, tag) for part in _parts(buffer)]
        messages = Messages(requests, sum(buffer.nbytes for _, buffer in sends))
        weakref.finalize(messages, _free, requests).atexit = False  # MPI's end frees what is left
        return messages

    def start(self, messages: Messages) -> None:
        if self.paused:
            self.other_bytes += messages.sent_bytes
        else:
            self.payload_bytes += messages.sent_bytes
        self._mpi.Prequest.Startall(messages.requests)

    def finish(self, messages: Messages, meanwhile: Meanwhile = no_work) -> None:
        # Not Waitall, which no signal could interrupt. All exchanges move on in Testall, not this one alone.
        begin = time.perf_counter()
        while not self._mpi.Request.Testall(messages.requests):
            working = time.perf_counter()
            if meanwhile():
                begin += time.perf_counter() - working  # that was no waiting
            else:
                os.sched_yield()  # another rank may need this core to answer
        if not self.paused:
            self.wait_seconds += time.perf_counter() - begin

    def split(self, parts: int) -> tuple[LocalComm, int]:
        group = self.rank * parts // self.size
        return MpiComm(self._silent, self._world.Split(group, self.rank)), group

    def abort(self, status: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(status)


def _parts(buffer: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Pieces of at most MESSAGE_BYTES of a contiguous array; an empty array has none."""
    flat = buffer.reshape(-1).view(np.uint8)
    return [flat[begin : begin + MESSAGE_BYTES] for begin in range(0, flat.nbytes, MESSAGE_BYTES)]


def _free(requests: list[Any]) -> None:
    for request in requests:
        request.Free()


def under_mpi() -> bool:
    """Whether a launcher of MPI started this process; only then is mpi4py imported."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        return int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1"))) > 1
    return any(name in os.environ for name in _UNDER_MPI)


_comm: LocalComm | None = None


def world() -> LocalComm:
    """The communicator of this process, made at the first call. UserError if mpi4py is needed and absent."""
    global _comm
    if _comm is None:
        if under_mpi():
            try:
                _comm = MpiComm()
            except ImportError as error:
                from dslide.errors import UserError

                raise UserError(
                    f"started by MPI, but mpi4py can't be imported ({error}): pip install 'dslide[mpi]'"
                ) from error
        else:
            _comm = LocalComm()
    return _comm


def silent() -> LocalComm:
    """As `world`, but rows never travel: to time a step's computation alone."""
    return MpiComm(silent=True) if under_mpi() else LocalComm()


def cuts(total: int, parts: int, block: int = 1) -> list[int]:
    """Offsets [parts + 1] of near-equal parts of `total` items; inner borders lie on whole blocks."""
    blocks = -(-total // block)
    return [min(total, block * (blocks * part // parts)) for part in range(parts + 1)]


def local_threads(comm: LocalComm) -> int:
    """The cores that this rank may use, shared fairly with ranks that may use the very same ones."""
    cores = frozenset(os.sched_getaffinity(0))
    everyone = comm.bcast(comm.gather((os.uname().nodename, cores)))
    return max(1, len(cores) // everyone.count((os.uname().nodename, cores)))


@dataclass(frozen=True)
class _Part:
    """A part's rows of an Exchange's buffers, and its messages."""

    own: Floats  # [n, own units]
    h: Floats  # [n, H]
    dh: Floats  # [n, H]
    packed: list[NDArray[np.uint8]]  # each rank's activations; int8: values, then scales
    sent: dict[int, NDArray[np.uint8]]  # gradients by peer, as packed
    arrived: dict[int, NDArray[np.uint8]]
    lses: Floats  # [P, n]
    gather: Messages
    normalise: Messages
    scatter: Messages


def aligned_rows(count: int, width: int) -> Floats:
    """Zeros [count, width] that begin where a cache line does: numpy's may lie anywhere, and vectors across
    two lines take twice as long to read."""
    line, size = 64, 4 * count * width
    memory = np.zeros(size + line, np.uint8)
    begin = -memory.ctypes.data % line
    return memory[begin : begin + size].view(np.float32).reshape(count, width)


class Exchange:
    """The rows and sums that a step exchanges, and their buffers.

    `hidden_cuts` [P + 1] are the ranks' borders in a row of H hidden units. A step goes: `own` -> (fill it)
    -> `start_gather`, `finish_gather` -> `gathered` -> `start_normalise`, `finish_normalise` -> `grad`
    -> (fill it) -> `scatter` -> (other work) -> `collect`. `start_gather` to `scatter` each take a part,
    a slice of the batch's points; several may be under way together, begun on all ranks in the same order.
    With one rank all of it is the identity on one buffer. `payload` of a point over all ranks is exactly
    2 (P - 1) H b + P (P - 1) (2 s + 4) bytes: b a value, s a row's scale (int8: 1 and 4).
    """

    def __init__(self, comm: LocalComm, hidden_cuts: list[int], wire: str, max_rows: int) -> None:
        self.comm, self.cuts, self.wire = comm, hidden_cuts, wire
        hidden, rank = hidden_cuts[-1], comm.rank
        self.widths = np.diff(hidden_cuts).tolist()
        self.peers = [peer for peer in range(comm.size) if peer != rank]
        self._h = aligned_rows(max_rows, hidden)
        self._dh = aligned_rows(max_rows, hidden)
        self._lse = np.zeros(max_rows, np.float32)  # over all ranks
        self._pending: list[tuple[slice, Messages]] = []  # parts whose gradients are under way
        self._gathering: dict[int, Messages] = {}  # by a part's first point
        self._normalising: dict[int, Messages] = {}
        self._parts: dict[tuple[int, int], _Part] = {}  # those that there have been
        if comm.size == 1:
            return
        mine = self.widths[rank]
        sizes = self._sizes(wire)
        self._own = aligned_rows(max_rows, mine).ravel()  # activations, then the summed gradient
        self._packed = [np.zeros(max_rows * size, np.uint8) for size in sizes]  # activations, one a rank
        self._sent = {peer: np.zeros(max_rows * sizes[peer], np.uint8) for peer in self.peers}  # gradients
        self._arrived = {peer: np.zeros(max_rows * sizes[rank], np.uint8) for peer in self.peers}
        self._lses = np.zeros((comm.size, max_rows), np.float32)

    def _sizes(self, wire: str) -> list[int]:
        return [_core.row_bytes(wire, width) for width in self.widths]

    def own(self, rows: int) -> Floats:
        """[rows, own units], to be filled with this rank's activations."""
        if self.comm.size == 1:
            return self._h[:rows]
        mine = self.widths[self.comm.rank]
        return self._own[: rows * mine].reshape(rows, mine)

    def gather(self, rows: int, meanwhile: Meanwhile = no_work) -> Floats:
        """All ranks' activations [rows, H] from everyone's `own`, the own ones too as after the wire."""
        whole = slice(0, rows)
        self.start_gather(whole)
        self.finish_gather(whole, meanwhile)
        return self.gathered(rows)

    def gathered(self, rows: int) -> Floats:
        """All ranks' activations [rows, H]; of a point whose gathering has not ended an earlier batch's."""
        return self._h[:rows]

    def start_gather(self, part: slice) -> None:
        """Starts to send everyone the part's rows of `own` [rows, own units], and to receive theirs."""
        if self.comm.size == 1:
            return
        rank, of = self.comm.rank, self._part(part)
        _core.pack_rows(of.own, 0, self.widths[rank], self.wire, of.packed[rank])
        self.comm.start(of.gather)
        self._gathering[part.start] = of.gather

    def finish_gather(self, part: slice, meanwhile: Meanwhile = no_work) -> None:
        """Waits for the part's activations of all ranks; its rows of `gathered` are then there."""
        if self.comm.size == 1:
            return
        rank, of = self.comm.rank, self._part(part)
        _core.unpack_rows(of.packed[rank], self.wire, of.h, self.cuts[rank], self.cuts[rank + 1])
        self.comm.finish(self._gathering.pop(part.start), meanwhile)
        for peer in self.peers:
            _core.unpack_rows(of.packed[peer], self.wire, of.h, self.cuts[peer], self.cuts[peer + 1])

    def _part(self, part: slice) -> _Part:
        key = part.start, part.stop
        if key not in self._parts:
            self._parts[key] = self._make_part(part)
        return self._parts[key]

    def _make_part(self, part: slice) -> _Part:
        rank, sizes = self.comm.rank, self._sizes(self.wire)

        def rows(buffer: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
            return buffer[part.start * size : part.stop * size]

        packed = [rows(buffer, size) for buffer, size in zip(self._packed, sizes, strict=True)]
        sent = {peer: rows(self._sent[peer], sizes[peer]) for peer in self.peers}
        arrived = {peer: rows(self._arrived[peer], sizes[rank]) for peer in self.peers}
        lses, prepare = self._lses[:, part], self.comm.prepare
        return _Part(
            own=self.own(part.stop)[part],
            h=self._h[part],
            dh=self._dh[part],
            packed=packed,
            sent=sent,
            arrived=arrived,
            lses=lses,
            gather=prepare([(p, packed[rank]) for p in self.peers], [(p, packed[p]) for p in self.peers], 1),
            normalise=prepare([(p, lses[rank]) for p in self.peers], [(p, lses[p]) for p in self.peers], 2),
            scatter=prepare(list(sent.items()), list(arrived.items()), 3),
        )

    def start_normalise(self, lse: Floats, part: slice) -> None:
        """Starts to exchange the log-sum-exps `lse` [n] over this rank's rows of the part's n points."""
        if self.comm.size == 1:
            self._lse[part] = lse
            return
        of = self._part(part)
        of.lses[self.comm.rank] = lse
        self.comm.start(of.normalise)
        self._normalising[part.start] = of.normalise

    def finish_normalise(self, part: slice, meanwhile: Meanwhile = no_work) -> Floats:
        """The log-sum-exps [n] over all ranks of the part's n points, the same bits everywhere."""
        if self.comm.size > 1:
            self.comm.finish(self._normalising.pop(part.start), meanwhile)
            self._lse[part] = combine_lse(self._part(part).lses)
        return self._lse[part]

    def grad(self, rows: int) -> Floats:
        """[rows, H], to be filled with this rank's part of the hidden gradient."""
        return self._dh[:rows]

    def scatter(self, part: slice) -> None:
        """Starts to send everyone their units of the part's rows of `grad`, and to receive the own ones."""
        if self.comm.size == 1:
            return
        of = self._part(part)
        for peer, buffer in of.sent.items():
            _core.pack_rows(of.dh, self.cuts[peer], self.cuts[peer + 1], self.wire, buffer)
        self.comm.start(of.scatter)
        self._pending.append((part, of.scatter))

    def collect(self, rows: int, meanwhile: Meanwhile = no_work) -> Floats:
        """The sum over ranks, in their order, of the own units' gradients [rows, own units], of all parts."""
        *_, (_, total) = self.collect_parts(rows, meanwhile)
        return total

    def collect_parts(self, rows: int, meanwhile: Meanwhile = no_work) -> Iterator[tuple[slice, Floats]]:
        """As `collect`, one part after another as they arrive: the part, and the sums, which are there to
        the part's end."""
        if self.comm.size == 1:
            yield slice(0, rows), self._dh[:rows]
            return
        total = self.own(rows)
        while self._pending:
            part, messages = self._pending[0]
            self.comm.finish(messages, meanwhile)
            self._pending.pop(0)
            self._sum(part, total[part])
            yield part, total

    def _sum(self, part: slice, total: Floats) -> None:
        """Sets `total` [part's points, own units] to the sum of what has arrived, in the order of ranks."""
        rank, of = self.comm.rank, self._part(part)
        total[:] = 0
        for peer in range(self.comm.size):
            if peer == rank:
                total += of.dh[:, self.cuts[rank] : self.cuts[rank + 1]]
            else:
                _core.unpack_rows(of.arrived[peer], self.wire, total, 0, self.widths[rank], add=True)

    def abandon(self) -> None:
        """Waits for all that is under way and forgets it; every rank must have started the same."""
        gradients = [messages for _, messages in self._pending]
        for messages in [*self._gathering.values(), *self._normalising.values(), *gradients]:
            self.comm.finish(messages)
        self._gathering, self._normalising, self._pending = {}, {}, []


def combine_lse(lses: NDArray[Any]) -> NDArray[Any]:
    """log(sum(exp(lses))) over axis 0 in their own type; -inf where every entry is, nan and +inf pass."""
    top = np.maximum.reduce(lses)
    finite = np.isfinite(top)
    if finite.all():
        return _log_sum_exp(lses, top)
    with np.errstate(divide="ignore", over="ignore"):
        return _log_sum_exp(lses, np.where(finite, top, lses.dtype.type(0)))


def _log_sum_exp(lses: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
    terms = lses - shift
    total = np.add.reduce(np.exp(terms, out=terms))
    return np.add(shift, np.log(total, out=total), out=total)


def payload_per_point(hidden: int, ranks: int, wire: str) -> int:
    """Bytes that all ranks together send for one training point; neither features nor labels matter."""
    value, scale = {"fp32": (4, 0), "bf16": (2, 0), "int8": (1, 4)}[wire]
    return 2 * (ranks - 1) * hidden * value + ranks * (ranks - 1) * (2 * scale + 4)


def leave(status: int) -> None:
    """Exits; under MPI a failing rank ends the whole job instead of leaving the others waiting for it."""
    if status != 0 and isinstance(_comm, MpiComm) and _comm.size > 1:
        _comm.abort(status)
    raise SystemExit(status)


def rank() -> int:
    """This process's rank, 0 before `world` was called."""
    return _comm.rank if _comm is not None else 0


def rank_name() -> str:
    """ "rank 1 of 2: " where there are several, for messages."""
    return f"rank {_comm.rank} of {_comm.size}: " if _comm is not None and _comm.size > 1 else ""
