"""The decoder: token embedding, blocks, norm and output head, in plain PyTorch.

It knows nothing of meshes. A pipeline stage is a decoder whose other parts are None.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from titanlite.models.attention import Attention
from titanlite.models.block import Block
from titanlite.models.loss import Output
from titanlite.models.sizes import DecoderSizes


class Decoder(nn.Module):
    """A Llama-shaped decoder.

    Attributes:
        tok_embeddings, norm, output: None on the pipeline stages that do not have them.
        layers: blocks by their number in the whole model, as text ("0", "1", ...).
    """

    tok_embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: Output | None

    def __init__(self, sizes: DecoderSizes, attention: type[Attention] = Attention):
        super().__init__()
        self.sizes = sizes
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleDict({str(i): Block(sizes, attention) for i in range(sizes.n_layers)})
        self.norm = nn.RMSNorm(sizes.dim, sizes.norm_eps)
        self.output = Output(sizes.dim, sizes.vocab_size)
        self.tie()

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Run the parts that are here.

        x is int64 tokens [b, s] with an embedding, else hidden states [b, s, dim]. Returns hidden states without an
        output head, logits [b, s, vocabulary] without labels, else the sum of the tokens' losses, a 0-dim fp32 tensor.
        Labels [b, s] of -100 do not count. Positions default to 0, 1, ...; documents to one per row.
        """
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x, positions, documents)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x, labels)

    def tie(self) -> None:
        """Let the output head share the embedding's weight where the sizes say so; again after either is replaced."""
        if self.sizes.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = cast(nn.Parameter, self.tok_embeddings.weight)
