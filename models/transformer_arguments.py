"""Checks the arguments that Transformers are made with."""


def check(
    *,
    num_layers: int,
    model_dim: int,
    hidden_dim: int,
    num_heads: int,
    vocab_size: int,
    max_length: int,
    head_dim: int | None,
    dropout: float,
    logit_limit: float | None,
    feed_forward_scale: float | None,
) -> None:
    """Checks that all arguments are in their ranges.

    The arguments are those of `models.transformer_lm.transformer_lm` and
    `models.translation.translation`.

    Raises:
        ValueError: If one is not; all of them are named at once.
    """
    counts = {
        "num_layers": num_layers,
        "model_dim": model_dim,
        "hidden_dim": hidden_dim,
        "num_heads": num_heads,
        "vocab_size": vocab_size,
        "max_length": max_length,
        "head_dim": head_dim,
        "logit_limit": logit_limit,
        "feed_forward_scale": feed_forward_scale,
    }
    problems = [
        f"`{name}` must be positive. Received: {name}={value}."
        for name, value in counts.items()
        if value is not None and not value > 0
    ]
    if model_dim % 2:
        problems.append(
            "`model_dim` must be even, for sines and cosines of the positions. "
            f"Received: model_dim={model_dim}."
        )
    if head_dim is None and num_heads > 0 and model_dim % num_heads:
        problems.append(
            "`num_heads` must divide `model_dim`. Received: "
            f"num_heads={num_heads} and model_dim={model_dim}. "
            "Pass `head_dim` for heads of another size."
        )
    if not 0 <= dropout < 1:
        problems.append(
            f"`dropout` must be from 0 to below 1. Received: dropout={dropout}."
        )
    if problems:
        raise ValueError("\n".join(problems))
