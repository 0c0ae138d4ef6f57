"""A shuffled order of any length in constant memory: the n-th document of an epoch is computed, not looked up."""

from __future__ import annotations

import hashlib
from functools import lru_cache

ROUNDS = 4


def shuffled(position: int, length: int, seed: int) -> tuple[int, int]:
    """Epoch and document number at ``position`` of the endless order of ``length`` documents.

    Each epoch is another permutation. It is a Feistel network over the smallest even number of bits that holds
    ``length``, walked until the result is below ``length`` (Black and Rogaway, 2002, "Ciphers with arbitrary finite
    domains"): at most four rounds of walking on average, since the domain is less than four times as large.

    >>> sorted(shuffled(position, 5, seed=1)[1] for position in range(5))
    [0, 1, 2, 3, 4]
    """
    epoch, index = divmod(position, length)
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = _keys(seed, epoch)
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = (left << half) | right
        if index < length:
            return epoch, index


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
