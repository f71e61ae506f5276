"""The network: llama's architecture, small. Names and layouts are what llama.cpp expects of arch `llama`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Every width is a multiple of 32, the block size of Q8_0."""

    vocab: int = 1024
    width: int = 64
    layers: int = 4
    heads: int = 2
    feed_forward: int = 192
    context_tokens: int = 1024
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5


class Norm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.feed_forward
        self.heads = shape.heads
        self.attn_norm = Norm(width, shape.norm_epsilon)
        self.attn_q = nn.Linear(width, width, bias=False)
        self.attn_k = nn.Linear(width, width, bias=False)
        self.attn_v = nn.Linear(width, width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = Norm(width, shape.norm_epsilon)
        self.ffn_gate = nn.Linear(width, inner, bias=False)
        self.ffn_up = nn.Linear(width, inner, bias=False)
        self.ffn_down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.attn_norm(x)
        shape = (batch, length, self.heads, width // self.heads)
        q = rotate(self.attn_q(h).view(shape).transpose(1, 2), cos, sin)
        k = rotate(self.attn_k(h).view(shape).transpose(1, 2), cos, sin)
        v = self.attn_v(h).view(shape).transpose(1, 2)
        mixed = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.ffn_norm(x)
        update: Tensor = self.ffn_down(nnf.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return x + update


class Guide(nn.Module):
    """Token ids (batch, length) to hidden states (batch, length, width); `logits` projects on the tied embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocab, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = Norm(shape.width, shape.norm_epsilon)
        head = shape.width // shape.heads
        angles = torch.outer(
            torch.arange(shape.context_tokens).float(),
            shape.rope_base ** (-torch.arange(0, head, 2).float() / head),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                closing = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(parameter, std=0.05 / (2 * shape.layers) ** 0.5 if closing else 0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embd(tokens)
        cos, sin = self.get_buffer("cos")[: tokens.shape[1]], self.get_buffer("sin")[: tokens.shape[1]]
        for block in self.blk:
            x = block(x, cos, sin)
        hidden: Tensor = self.output_norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.token_embd.weight.T


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on interleaved pairs (2i, 2i+1), llama.cpp's way for this architecture."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
