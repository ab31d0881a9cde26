"""Cross-entropy for next-token prediction."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from muster.errors import ConfigError
from muster.train.objectives.classification import labels_that_do_not_fit


class LanguageModeling:
    """Mean cross-entropy per token of `[B, T, classes]` logits and `[B, T] int64` next tokens."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(outputs, Tensor) and outputs.dim() != 3:
            raise ConfigError(
                f"objective=language_modeling expects logits [B, T, classes], but the model returns {outputs.dim()} dimensions: try objective=classification"
            )
        try:
            return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())
        except (IndexError, RuntimeError, ValueError, TypeError) as error:
            raise labels_that_do_not_fit("language_modeling", outputs, targets, error) from error

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return sums over samples: `loss`, the mean over tokens, and `accuracy`, the fraction of correct tokens."""
        right = (outputs.argmax(-1) == targets).float().mean(-1).sum()
        return {"loss": self(outputs, targets) * len(targets), "accuracy": right}
