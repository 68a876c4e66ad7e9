"""Norms that don't depend on the batch."""

from torch import nn

from mixfl.errors import MixflError

CHANNELS, GROUPS = 8, 32  # at least so many channels in a group, at most so many groups
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def with_group_norm(module: nn.Module) -> nn.Module:
    """The module with a GroupNorm in place of each BatchNorm, with its weight and bias.

    The module itself is changed, unless it is a BatchNorm.

    >>> type(mixfl.pytorch.with_group_norm(torch.nn.BatchNorm1d(8))).__name__
    'GroupNorm'
    """
    changed: dict[int, nn.Module] = {}  # a norm that is used twice stays one

    def converted(child: nn.Module) -> nn.Module:
        if not isinstance(child, BATCH_NORMS):
            return child
        if id(child) not in changed:
            changed[id(child)] = _group_norm(child)
        return changed[id(child)]

    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None:
                parent._modules[name] = converted(child)
    return converted(module)


def _group_norm(norm) -> nn.GroupNorm:
    channels = norm.num_features
    if channels == 1 and isinstance(norm, nn.BatchNorm1d):
        raise MixflError(
            "BatchNorm1d(1): normalizing one number by itself leaves nothing. Remove this layer."
        )
    groups = max(
        (g for g in range(1, GROUPS + 1) if channels % g == 0 and channels // g >= CHANNELS),
        default=1,
    )
    made = nn.GroupNorm(groups, channels, norm.eps, norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)
