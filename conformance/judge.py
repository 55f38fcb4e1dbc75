"""The judge: one number per case, the worst element's error over its bound. NMSE is printed beside it and never decides.

NaN and infinities must stand exactly where the oracle has them. Nothing here runs on the backend: results are downloaded first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .bounds import Expected

__all__ = ["Verdict", "judge"]

MAX_F32 = 3.4028235677973366e38  # from here on a number rounds to infinity


@dataclass(frozen=True)
class Verdict:
    """margin: worst error / bound, at most 1 passes; message: "" if it passes, else op, index, values and bound."""

    margin: float
    nmse: float
    index: tuple[int, ...] = ()
    message: str = ""
    rule: str = "bound"


def judge(found: np.ndarray, expected: Expected) -> Verdict:
    """Compares a result with the oracle's. found: f32, f16 … of any shape; the shapes must be equal."""
    y, bound = np.asarray(expected.y, np.float64), np.broadcast_to(expected.bound, np.shape(expected.y))
    if found.shape != y.shape:
        return Verdict(np.inf, np.inf, (), f"the result has shape {list(found.shape)}, not {list(y.shape)}", "contract")
    if not y.size:
        return Verdict(0.0, 0.0)
    x = found.astype(np.float64)
    rule = "exact" if expected.exact else "bound"
    wanted_nan, wanted_inf = np.isnan(y), np.abs(y) >= MAX_F32
    unfit = (np.isnan(x) != wanted_nan) | (np.isinf(x) & ~np.isnan(x) != wanted_inf) | (wanted_inf & (np.sign(x) != np.sign(y)))
    if unfit.any():
        at = tuple(int(i) for i in np.argwhere(unfit)[0])
        where = f"{int(unfit.sum())} of {y.size} elements; first at {list(at)}: {x[at]:.9g} instead of {y[at]:.9g}"
        return Verdict(np.inf, np.inf, at, f"NaN or infinity in the wrong place: {where}", rule)
    plain = ~wanted_nan & ~wanted_inf
    if expected.exact:
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = y.astype(np.float32).astype(np.float64)
            error = np.where(plain, np.abs(x - wanted), 0.0)
        margin = np.where(error > bound, np.inf, 0.0)
    else:
        error = np.where(plain, np.abs(x - np.where(plain, y, 0.0)), 0.0)
        error = np.where(plain, np.maximum(error - expected.slack, 0.0), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            margin = np.where(error == 0, 0.0, error / bound)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(margin)), y.shape))
    worst = float(margin[at])
    power = float((np.where(plain, y, 0.0) ** 2).sum())
    nmse = float((error**2).sum()) / power if power else 0.0
    if worst <= 1:
        return Verdict(worst, nmse, at)
    wrong = int((margin > 1).sum())
    what = "its exact value" if expected.exact else f"bound {bound[at]:.3g} (margin {worst:.3g})"
    text = f"{wrong} of {y.size} elements are wrong; worst at {list(at)}: {x[at]:.9g} instead of {y[at]:.9g}, {what}"
    return Verdict(worst, nmse, at, text, rule)
