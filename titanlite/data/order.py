"""A shuffled order of any length in constant memory: the n-th document of an epoch is computed, not looked up."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

ROUNDS = 4
AHEAD = 256
"""Documents whose order is computed at a time: one by one, Python would be slower than reading the tokens."""


class Order:
    """The endless order of a source's documents: every epoch has each once, and another permutation.

    Args:
        length: documents of an epoch.
        seed: another seed, another order.
        shuffle: False keeps the source's own order.
        window: shuffle blocks of so many neighbours and the documents within each block; for sources that are read
            fast only in their own order. None: everywhere.
        stride: distance of the positions that are asked for one after the other.
    """

    def __init__(self, length: int, seed: int, shuffle: bool = True, window: int | None = None, stride: int = 1):
        self.length, self.seed, self.shuffle, self.stride = length, seed, shuffle, stride
        self.window = window if window is not None and window < length else None
        self._begin = 0
        self._ready: list[int] = []

    def at(self, position: int) -> int:
        """The number of the document at ``position``, counted from the first epoch on."""
        if not self.shuffle:
            return position % self.length
        place, rest = divmod(position - self._begin, self.stride)
        if rest or not 0 <= place < len(self._ready):
            left = self.length - position % self.length
            count = min(AHEAD, -(-left // self.stride))
            self._begin, place = position, 0
            self._ready = self._run(position // self.length, position % self.length, count).tolist()
        return self._ready[place]

    def _run(self, epoch: int, first: int, count: int) -> np.ndarray:
        index = np.arange(first, first + count * self.stride, self.stride, dtype=np.uint64)
        keys = _keys(self.seed, epoch)
        if self.window is None:
            return permuted(index, self.length, keys)
        window = np.uint64(self.window)
        block, inside = index // window, index % window
        whole = self.length // self.window
        full = block < whole
        block[full] = permuted(block[full], whole, keys)
        inside[full] = permuted(inside[full], self.window, keys, block[full])
        inside[~full] = permuted(inside[~full], self.length - whole * self.window, keys)
        return block * window + inside


def permuted(index: np.ndarray, length: int, keys: tuple[int, ...], tweak: np.ndarray | None = None) -> np.ndarray:
    """Where a permutation of ``range(length)`` takes each of ``index`` (uint64).

    A Feistel network over the smallest even number of bits that holds ``length``, walked until the result is below
    ``length`` (Black and Rogaway, 2002, "Ciphers with arbitrary finite domains"): at most four times on average.
    ``tweak`` gives each index a permutation of its own.
    """
    bits = np.uint64(max(1, ((max(length, 1) - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    twist = np.zeros(len(index), dtype=np.uint64) if tweak is None else _mix(tweak)
    found = index.copy()
    todo = np.arange(len(index))
    while len(todo):
        left, right = found[todo] >> bits, found[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ np.uint64(key) ^ twist[todo]) & mask)
        found[todo] = (left << bits) | right
        todo = todo[found[todo] >= length]
    return found


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014), modulo 2**64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
