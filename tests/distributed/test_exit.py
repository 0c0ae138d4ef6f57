"""Ranks end with exit code 0, time after time: gloo's threads abort a process whose groups end in the wrong place."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest

from tests.command import ROOT

RANK = """
import torch, torch.distributed as dist
from titanlite.config import from_dict
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.world import World

def main():
    config = from_dict({}, world_size=2)
    world = World.start(config.comm)
    mesh = Mesh.build(config, world)
    one = torch.ones(1)
    dist.all_reduce(one, group=mesh.dim("dp_shard").get_group())
    world.close()
    assert one.item() == 2

main()
"""


def _start_and_stop():
    """Exit codes of two ranks that meet, add up a number, and end."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pair = [subprocess.Popen([sys.executable, "-c", RANK], env=env | {"RANK": str(rank)}) for rank in range(2)]
    return [process.wait(120) for process in pair]


def test_ten_starts_and_stops_are_clean():
    assert [_start_and_stop() for _ in range(10)] == [[0, 0]] * 10


@pytest.mark.full
def test_two_hundred_starts_and_stops_are_clean():
    assert [_start_and_stop() for _ in range(200)] == [[0, 0]] * 200
