"""Ring attention is attention: against one call over the whole sequence, forwards and backwards."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.worlds import ranks, world
from titanlite.errors import UserError
from titanlite.models.attention import document_mask
from titanlite.parallel.context import ContextParallelKernel, token_order
from titanlite.parallel.ring import Ring

SEQ = 64


def _differences(heads, dtype):
    """The largest difference of result and gradients for each way of running."""
    with world() as started:
        group = dist.group.WORLD
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, n, SEQ, 16, dtype=dtype) for n in (4, heads, heads))
        grad = torch.randn(2, 4, SEQ, 16, dtype=dtype)
        documents = (torch.arange(SEQ) * 5 // SEQ + torch.arange(2)[:, None]).contiguous()
        found = {}
        for gather, balanced, apart in itertools.product((False, True), (False, True), (False, True)):
            whole = [x.clone().requires_grad_() for x in (q, k, v)]
            mask = document_mask(documents) if apart else None
            out = F.scaled_dot_product_attention(*whole, attn_mask=mask, is_causal=not apart, enable_gqa=heads != 4)
            out.backward(grad)
            order = token_order(SEQ, started.size, balanced)
            mine = order.chunk(started.size)[started.rank]
            share = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
            kernel = ContextParallelKernel(Ring(group, gather, balanced))
            got = kernel(*share, documents[:, order] if apart else None)
            got.backward(grad[:, :, mine])
            pairs = [(got, out), *((s.grad, w.grad) for s, w in zip(share, whole, strict=True))]
            found[gather, balanced, apart] = [float((a - b[:, :, mine]).abs().max()) for a, b in pairs]
        return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_every_way_is_attention(size, heads):
    for seen in ranks(size).run(_differences, heads, torch.float32):
        assert len(seen) == 8
        for way, differences in seen.items():
            assert max(differences) < 5e-6, way


def test_bf16_is_as_near_as_bf16_is():
    for seen in ranks(2).run(_differences, 2, torch.bfloat16):
        for way, differences in seen.items():
            assert max(differences) < 0.06, way


def test_a_sequence_that_cannot_be_dealt_is_refused():
    with pytest.raises(UserError, match=r"66 tokens .*context_parallel_degree = 2: it must be a multiple of 4"):
        token_order(66, 2, balanced=True)
    assert token_order(66, 2, balanced=False).tolist() == list(range(66))
