"""torch's private attention operations and tensors do what they are used for."""

import torch
import torch.nn.functional as F

from titanlite.distributed import private_tensor as private


def test_the_compiler_option_is_there():
    import torch._inductor.config as inductor

    before = inductor._micro_pipeline_tp
    try:
        private.overlap_tensor_parallel_collectives(None)
        assert inductor._micro_pipeline_tp
    finally:
        inductor._micro_pipeline_tp = before


def test_flash_gives_attention_its_log_sum_exp_and_gradients():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse, rest = private.flash_forward(q, k, v, True)
        found = private.flash_backward(grad, q, k, v, out, lse, True, rest)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
