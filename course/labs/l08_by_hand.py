"""Solutions that cells of lesson 08 show and use; `make notebooks` writes this."""

import torch
import torch.distributed as dist


def all_reduce_in_two_levels(x, inside, between):
    """[N] -> [N], the sum over all ranks of all nodes."""
    g = inside.size()
    own = torch.empty_like(x.chunk(g)[0])
    dist.reduce_scatter(own, list(x.chunk(g)), group=inside)
    dist.all_reduce(own, group=between)
    total = torch.empty_like(x)
    dist.all_gather(list(total.chunk(g)), own, group=inside)
    return total
