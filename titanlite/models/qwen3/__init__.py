"""Qwen3, dense: the plain decoder with norms on queries and keys (https://arxiv.org/abs/2505.09388)."""

from functools import partial

from titanlite.models.decoder import Decoder
from titanlite.models.qwen3.attention import NormedAttention
from titanlite.models.qwen3.tensor_plan import block_plan
from titanlite.models.registry import Family

FAMILY = Family(build=partial(Decoder, attention=NormedAttention), block_plan=block_plan)
