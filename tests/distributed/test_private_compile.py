"""torch's private compiler options are there."""

from titanlite.distributed import private_compile as private


def test_the_activation_budget_is_the_partitioners():
    import torch._functorch.config as functorch

    before = functorch.activation_memory_budget, functorch.visualize_memory_budget_pareto
    try:
        private.set_activation_budget(0.25, True)
        assert (functorch.activation_memory_budget, functorch.visualize_memory_budget_pareto) == (0.25, True)
    finally:
        private.set_activation_budget(*before)


def test_triton_is_looked_for():
    assert private.has_triton() in (True, False)
