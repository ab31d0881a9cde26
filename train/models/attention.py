"""Multi-head self-attention that can be split by heads."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Scaled dot-product self-attention. `[B, T, D]` to `[B, T, D]`.

    The rows of `qkv` are grouped by head, each with its query, key and value. Consecutive rows are whole heads, so a
    tensor-parallel rank that holds a part of them computes that many heads.

    Source: Vaswani et al., "Attention Is All You Need", 2017.
    """

    def __init__(self, hidden_dim: int, num_heads: int, *, causal: bool = False, dropout: float = 0.0):
        super().__init__()
        self.num_heads, self.head_dim, self.causal, self.dropout = num_heads, hidden_dim // num_heads, causal, dropout
        self.qkv = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2)  # [B, local heads, T, 3, head_dim]
        q, k, v = heads.unbind(-2)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out
