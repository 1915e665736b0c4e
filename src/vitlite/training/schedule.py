"""The learning rate, epoch by epoch."""

import math

from vitlite.training.settings import Settings


def learning_rate(settings: Settings, epoch: float) -> float:
    """Rises linearly, stays, and falls as a half cosine; `epoch` counts from 0 and may lie within one.

    >>> [round(learning_rate(Settings(epochs=10, lr=1.0), epoch), 2) for epoch in (0, 0.5, 1, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = (epoch + 0.001) / settings.warmup  # the very first step moves the weights, too
    left = (settings.epochs - epoch) / (settings.decay * settings.epochs)  # of the epochs in which it falls, 1 to 0
    falling = 0.5 - 0.5 * math.cos(math.pi * min(left, 1.0))
    return settings.lr * min(1.0, rising, falling)
