"""Small decoder-only transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muster.errors import ConfigError
from muster.train.models.attention import Attention


class Gpt(nn.Module):
    """Maps `[B, T] int64` tokens to `[B, T, classes]` logits of the next token; input and output embeddings are tied.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (pre-norm GPT-2).
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "blocks.*.attention.qkv": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp_in": "colwise",
        "blocks.*.mlp_out": "rowwise",
    }

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        dropout: float,
    ):
        super().__init__()
        if len(input_shape) != 1:
            raise ConfigError(
                f"model=gpt expects token sequences [T], but the data's inputs are {list(input_shape)}: use data=text or data=tokens"
            )
        if hidden_dim % num_heads:
            raise ConfigError(f"model.num_heads={num_heads} must divide model.hidden_dim={hidden_dim}")
        self.embedding = Embedding(num_classes, input_shape[0], hidden_dim, dropout)
        self.blocks = nn.ModuleList(Block(hidden_dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, num_classes, bias=False)
        self.head.weight = self.embedding.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # residual projections are scaled down with depth, as in GPT-2
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Embedding(nn.Module):
    """Sum of token and position embeddings. `[B, T] int64` to `[B, T, D]`."""

    def __init__(self, num_tokens: int, length: int, hidden_dim: int, dropout: float):
        super().__init__()
        self.token = nn.Embedding(num_tokens, hidden_dim)
        self.position = nn.Embedding(length, hidden_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return x


class Block(nn.Module):
    """Causal attention and a four times wider MLP, each pre-norm with a residual. `[B, T, D]` to `[B, T, D]`."""

    def __init__(self, hidden_dim: int, num_heads: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden_dim), nn.LayerNorm(hidden_dim)
        self.attention = Attention(hidden_dim, num_heads, causal=True, dropout=dropout)
        self.mlp_in, self.mlp_out = nn.Linear(hidden_dim, 4 * hidden_dim), nn.Linear(4 * hidden_dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x)))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
