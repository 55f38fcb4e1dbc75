"""A norm and a linear layer by the name of their weight: what every block of `blocks.py` and `latent.py` begins with."""

from __future__ import annotations

from ..core.graph import GraphBuilder, Value
from .config import DecoderConfig

__all__ = ["linear", "norm"]


def norm(g: GraphBuilder, c: DecoderConfig, x: Value, name: str, *, eps: float = 0.0) -> Value:
    """RMS norm over the last axis of x with the f32 weight `name`.weight. eps: where it is not the model's."""
    return g.rms_norm(x, g.weight(f"{name}.weight", (int(x.shape[-1]),), "f32"), eps=eps or c.rms_norm_eps)


def linear(g: GraphBuilder, x: Value, name: str, out: int, *, bias: bool = False) -> Value:
    """x [n, K] times `name`.weight [out, K], plus `name`.bias [out] if there is one -> [n, out]."""
    w = g.weight(f"{name}.weight", (out, int(x.shape[-1])))
    return g.linear(x, w, g.weight(f"{name}.bias", (out,), "f32") if bias else None)
