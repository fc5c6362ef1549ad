"""What preflight can find wrong with an adapter; the codes are a contract (`loraflow check --json`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Problem", "ProblemCode"]

ProblemCode = Literal[
    "unknown_module",
    "missing_pair",
    "bad_shape",
    "rank_mismatch",
    "rank_too_large",
    "not_finite",
    "empty_tensor",
    "incomplete",
    "truncated_file",
    "missing_file",
    "bad_config",
    "unsupported_feature",
    "base_mismatch",
]


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        code: Stable word, see `ProblemCode`.
        message: What was expected, what was found, what to do.
        tensor: The tensor's name in the file, where one is concerned.
    """

    code: ProblemCode
    message: str
    tensor: str | None = None

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" + (f" (tensor {self.tensor})" if self.tensor else "")

    def to_dict(self) -> dict[str, Any]:
        """JSON form: ``{"code", "message"}`` and ``"tensor"`` where one is concerned."""
        out: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.tensor is not None:
            out["tensor"] = self.tensor
        return out
