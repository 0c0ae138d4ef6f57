"""Pools of ranks that are started once and run many cases: importing torch in each process costs more than most cases.

>>> from tests.worlds import ranks
>>> ranks(2).run(case, "argument")      # calls case("argument") in 2 processes
[result of rank 0, result of rank 1]

``case`` is a module-level function that starts and closes its own ``World``; it finds torchrun's environment variables
set as torchrun would set them. The pool's store outlives the cases and each case counts as a restart, so no case sees
another's addresses. An error in any rank raises here with that rank's traceback, and ends the pool; the next case gets
a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_pools: dict[int, Ranks] = {}

MOST_THREADS = 48
"""Threads of a rank above which its pool is ended and the next case gets a new one: torch keeps some groups of ended
worlds, and their gloo threads spin on connections that the peers have closed."""


def ranks(size: int) -> Ranks:
    """The pool of ``size`` ranks of this test process."""
    if size not in _pools:
        _pools[size] = Ranks(size)
    return _pools[size]


class RankFailed(AssertionError):
    """A case raised in some rank; the message is that rank's traceback."""


class Ranks:
    """Processes that wait for cases."""

    def __init__(self, size: int):
        from torch.distributed import TCPStore

        self.size = size
        self.cases = 0
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.store.port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": 1,
            }
            process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
        """Call ``case(*args)`` in every rank; returns what each returned, by rank."""
        self.cases += 1
        for pipe in self.pipes:
            pipe.send((self.cases, case, args))
        results: list[Any] = [None] * self.size
        threads = 0
        waiting = dict(zip(self.pipes, range(self.size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                self.end()
                raise RankFailed(f"ranks {sorted(waiting.values())} of {case.__name__} gave no answer in {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    ok, value, count = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value, count = False, "the process ended", 0
                if not ok:
                    self.end()
                    raise RankFailed(f"rank {rank} of {self.size} in {case.__name__}:\n{value}")
                results[rank] = value
                threads = max(threads, count)
        if threads > MOST_THREADS:
            self.end()
        return results

    def end(self) -> None:
        """End the processes."""
        _pools.pop(self.size, None)
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, environment: dict[str, Any]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    import torch

    from titanlite.distributed.private import forget_groups

    torch.set_num_threads(1)
    while True:
        try:
            number, case, args = pipe.recv()
        except EOFError:
            return
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        try:
            answer = True, case(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        # The case's objects are gone only now; what torch's caches hold of its groups goes with them.
        gc.collect()
        forget_groups()
        gc.collect()
        pipe.send((*answer, len(os.listdir("/proc/self/task"))))


@contextlib.contextmanager
def world(timeout: int = 300) -> Iterator[Any]:
    """A world for a case that needs no Trainer."""
    from titanlite.config import from_dict
    from titanlite.distributed.world import World

    size = int(os.environ["WORLD_SIZE"])
    config = from_dict({"comm": {"init_timeout_seconds": timeout}}, world_size=size)
    started = World.start(config.comm)
    try:
        yield started
    finally:
        started.close()


@atexit.register
def _end_all() -> None:
    for pool in list(_pools.values()):
        pool.end()
