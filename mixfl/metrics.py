"""What the name of a metric says."""

LOWER = ("loss", "hinge", "spreadout", "error", "perplexity")
WAYS = {"min:": True, "max:": False}  # before a metric's name, in place of what its name says


def lower_is_better(metric: str) -> bool:
    """By its way (`min:eval/regret`), or by its name: losses and errors are better when lower."""
    if metric[:4] in WAYS:
        return WAYS[metric[:4]]
    parts = metric.split("/")
    name = parts[2] if parts[1:2] == ["clients"] and len(parts) > 2 else parts[-1]
    return name in LOWER or name.endswith(("_loss", "_error"))
