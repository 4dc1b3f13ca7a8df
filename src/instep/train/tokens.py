"""How many tokens a step has: for the log, and the speed in tokens per second."""


def count_tokens(weight: float | None, num_samples: int, of_data: int | None) -> int | None:
    """Return the tokens of a global batch; None: nobody counts them.

    `weight` is the sum of the weights that the loss gave (None: it gave none). Whole numbers, more than there are
    samples, are taken for tokens; other weights (of classes, say) are not. `of_data`: what the data says.
    """
    if weight is not None and weight > num_samples and float(weight).is_integer():
        return int(weight)
    return of_data
