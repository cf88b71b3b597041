"""Solutions that cells of lesson 16 show and use; `make notebooks` writes this."""

from torch.utils.checkpoint import CheckpointPolicy
import torch
import torch.nn.functional as F


def at_peak(changes):
    """{purpose: bytes} at the moment when their sum is largest."""
    now = {}
    most = {}
    for purpose, num_bytes in changes:
        now[purpose] = now.get(purpose, 0) + num_bytes
        if sum(now.values()) > sum(most.values()):
            most = dict(now)
    return {purpose: size for purpose, size in most.items() if size}


class LossInChunks(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`, a chunk of the rows at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, num_chunks):
        num_tokens = len(targets)
        loss = hidden.new_zeros(())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        rows = torch.arange(num_tokens)
        for chunk in rows.chunk(num_chunks):
            part = hidden[chunk]
            wanted = targets[chunk]
            logits = part @ weight.T  # [T/n, vocabulary]
            loss += F.cross_entropy(logits, wanted, reduction="sum") / num_tokens
            grad_logits = logits.softmax(dim=-1)
            grad_logits[torch.arange(len(chunk)), wanted] -= 1
            grad_logits /= num_tokens
            grad_hidden[chunk] = grad_logits @ weight
            grad_weight += grad_logits.T @ part
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None, None


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def policy(ctx, op, *args, **kwargs):
    """Whether the output of op(*args) is kept."""
    if "attention" in str(op):
        return CheckpointPolicy.MUST_SAVE
    if op in PRODUCTS:
        num_in, num_out = args[-1].shape
        if num_in <= num_out:  # `down` alone makes fewer features than it takes
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Offload:
    """Keeps on disk what autograd saves, until backward asks for it."""

    def __init__(self, folder, stays):
        self.folder = folder  # a pathlib.Path
        self.stays = stays
        self.num_written = 0

    def pack(self, tensor):
        """What autograd keeps in place of the tensor."""
        if self.stays(tensor):
            return tensor
        path = self.folder / f"{self.num_written}.pt"
        self.num_written += 1
        torch.save(tensor.detach().clone(), path)
        return path

    def unpack(self, kept):
        """The tensor, from what `pack` has returned."""
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = torch.load(kept, weights_only=True)
        kept.unlink()
        return tensor
