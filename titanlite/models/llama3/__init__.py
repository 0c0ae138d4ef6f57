"""Llama 3: the plain decoder with the family's tensor-parallel plan."""

from titanlite.models.decoder import Decoder
from titanlite.models.llama3.tensor_plan import block_plan
from titanlite.models.registry import Family

FAMILY = Family(build=Decoder, block_plan=block_plan)
