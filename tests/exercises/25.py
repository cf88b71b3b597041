"""Answers to the exercises of lesson 25, fine-tuning on many ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers, changed
from torch import nn

from labcode.comm.collectives import copy_to, reduce_from

# ---- 25.1 what counts


def targets_by_a_loop(prompt, answer):
    whole = prompt + answer
    targets = []
    for place in range(1, len(whole)):
        targets.append(whole[place] if place >= len(prompt) else -100)
    return targets


def targets_over_the_prompt(prompt, answer):
    targets = (prompt + answer)[1:]
    targets[: len(prompt) - 1] = [-100] * (len(prompt) - 1)
    return targets


def targets_in_place(prompt, answer):
    prompt += answer
    return [-100] * (len(prompt) - len(answer) - 1) + answer


TARGETS = "[-100] * (len(prompt) - 1) + answer"

TARGETS_OF = Answers(
    solves="targets_of",
    right={
        "a loop": targets_by_a_loop,
        "written over the prompt": targets_over_the_prompt,
        "a comprehension": changed(
            f"return {TARGETS} => return [-100 for _ in prompt[1:]] + answer"
        ),
        "labels of each token, shifted": changed(
            f"return {TARGETS} => return ([-100] * len(prompt) + answer)[1:]"
        ),
    },
    wrong={
        "one place too late": (
            changed("(len(prompt) - 1) => len(prompt)"),
            "which place predicts the first token of the answer",
        ),
        "not shifted, and cut": (
            changed(f"{TARGETS} => ([-100] * len(prompt) + answer)[:-1]"),
            "prompt [11, 12, 13], answer [21, 22]: it returned [-100, -100, -100, 21]: at which",
        ),
        "the first token lost": (
            changed(f"{TARGETS} => [-100] * len(prompt) + answer[1:]"),
            "the first token of the answer is lost",
        ),
        "the prompt counts": (
            changed(f"{TARGETS} => (prompt + answer)[1:]"),
            "the prompt counts as well",
        ),
        "the pair itself": (changed(f"{TARGETS} => prompt + answer"), "that is the pair itself"),
        "zeros": (changed("[-100] => [0]"), "0, which is a token"),
        "the answer alone": (changed(f"{TARGETS} => answer"), "only the answer is there"),
        "a separator at the end": (
            changed(f"{TARGETS} => {TARGETS} + [0]"),
            "5 targets, and the pair has 4 places",
        ),
        "a tensor": (changed(f"{TARGETS} => torch.tensor({TARGETS})"), "return a list of numbers"),
        "the prompt is lengthened": (targets_in_place, "the call has changed a list"),
        "no return": (changed(f"return {TARGETS} => {TARGETS}"), "returned None"),
    },
    takes_ranks=False,
)


# ---- 25.2 pack


def pack_by_tensors(pairs):
    """Tensors of each document, joined; the mask by blocks."""
    tokens, targets, positions, blocks = [], [], [], []
    for prompt, answer in pairs:
        whole = torch.tensor(prompt + answer)
        aim = whole[1:].clone()
        aim[: len(prompt) - 1] = -100
        tokens.append(whole[:-1])
        targets.append(aim)
        positions.append(torch.arange(len(aim)))
        blocks.append(torch.ones(len(aim), len(aim), dtype=torch.bool).tril())
    return torch.cat(tokens), torch.cat(targets), torch.cat(positions), torch.block_diag(*blocks)


def pack_by_writing_into_a_mask(pairs):
    """The row first, then each triangle into a mask of False."""
    lengths = [len(prompt) + len(answer) - 1 for prompt, answer in pairs]
    total = sum(lengths)
    row = torch.zeros(3, total, dtype=torch.int64)
    mask = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for (prompt, answer), length in zip(pairs, lengths):
        end = start + length
        row[0, start:end] = torch.tensor((prompt + answer)[:-1])
        row[1, start:end] = torch.tensor([-100] * (len(prompt) - 1) + answer)
        row[2, start:end] = torch.arange(length)
        for place in range(start, end):
            mask[place, start : place + 1] = True
        start = end
    return row[0], row[1], row[2], mask


def pack_by_starts(pairs):
    """Documents are known by where they start."""
    starts, tokens, targets = [], [], []
    for prompt, answer in pairs:
        start = len(tokens)
        tokens += (prompt + answer)[:-1]
        targets += ([-100] * len(prompt) + answer)[1:]
        starts += [start] * (len(tokens) - start)
    place = torch.arange(len(tokens))
    start = torch.tensor(starts)
    mask = (place[None] <= place[:, None]) & (place[None] >= start[:, None])
    return [torch.tensor(tokens), torch.tensor(targets), place - start, mask]


def pack_all_and_shift(pairs):
    """All pairs one after the other, and shifted afterwards."""
    tokens, counts, positions, documents = [], [], [], []
    for number, (prompt, answer) in enumerate(pairs):
        length = len(prompt) + len(answer)
        tokens += prompt + answer
        counts += [False] * len(prompt) + [True] * len(answer)
        positions += range(length)
        documents += [number] * length
    tokens = torch.tensor(tokens)
    targets = torch.where(torch.tensor(counts), tokens, -100)
    document = torch.tensor(documents)[:-1]
    mask = (document[:, None] == document[None]).tril()
    return tokens[:-1], targets[1:], torch.tensor(positions)[:-1], mask


RETURN = "return torch.tensor(tokens), torch.tensor(targets), torch.tensor(positions), mask"

PACK = Answers(
    solves="pack",
    right={
        "tensors and blocks": pack_by_tensors,
        "triangles written into a mask": pack_by_writing_into_a_mask,
        "by starts, in a list": pack_by_starts,
        "logical and": changed("same.tril() => same & torch.ones_like(same).tril()"),
    },
    wrong={
        "shifted afterwards": (pack_all_and_shift, "only the last token of the row is left out"),
        "with the last tokens": (
            changed(
                "(prompt + answer)[:-1] => prompt + answer",
                f"{TARGETS} => {TARGETS} + [-100]",
            ),
            "with its last token, which has nothing to predict",
        ),
        "over the border, prompts left out": (
            changed(
                "targets += [-100] * (len(prompt) - 1) + answer => "
                "aim = [-100] * (len(prompt) - 1) + answer; "
                "aim[-1] = aim[-1] if number == len(pairs) - 1 else pairs[number + 1][0][0]; "
                "targets += aim"
            ),
            "the first token of the next one",
        ),
        "prompts count": (
            changed("[-100] * (len(prompt) - 1) + answer => (prompt + answer)[1:]"),
            "the prompts count as well",
        ),
        "targets not shifted": (
            changed("[-100] * (len(prompt) - 1) + answer => own"),
            "the targets are the tokens themselves",
        ),
        "positions run through": (
            changed("positions += range(len(own)) => positions = list(range(len(tokens)))"),
            "positions run through the row",
        ),
        "positions from 1": (
            changed("range(len(own)) => range(1, len(own) + 1)"),
            "positions begin at 1",
        ),
        "documents for positions": (
            changed("torch.tensor(positions), mask => document, mask"),
            "positions are numbers of documents",
        ),
        "no tril": (changed("same.tril() => same"), "a token sees what comes after it in its"),
        "triu": (changed("same.tril() => same.triu()"), "row i says whom i sees"),
        "one causal sequence": (
            changed("same.tril() => torch.ones_like(same).tril()"),
            "2 pairs: documents see each other: the mask is that of one causal sequence",
        ),
        "without itself": (changed("same.tril() => same.tril(-1)"), "does not see itself"),
        "the wrong way round": (changed("same.tril() => ~same.tril()"), "wrong way round"),
        "a mask by positions": (
            changed(
                "same.tril() => torch.tensor(positions)[None] <= torch.tensor(positions)[:, None]"
            ),
            "positions alone do not tell",
        ),
        "a mask to be added": (
            changed("same.tril() => torch.zeros(same.shape).masked_fill(~same.tril(), -torch.inf)"),
            "expected is bool",
        ),
        "a batch of one": (
            changed("return torch.tensor(tokens), => return torch.tensor([tokens]),"),
            "without a dim for the batch",
        ),
        "no mask": (changed(", torch.tensor(positions), mask => , mask"), "return four tensors"),
        "lists": (changed("return torch.tensor(tokens) => return tokens"), "tokens: it is a list"),
        "no return": (changed(f"{RETURN} => pass"), "returned None"),
    },
    takes_ranks=False,
)


# ---- 25.3 the loss of a step


def step_with_means_times_counts(model, micro_batches, group):
    """The mean of each micro-batch, times its tokens; one all-reduce of integers, one of losses."""
    own = [int((targets != -100).sum()) for _, targets in micro_batches]
    total = torch.tensor(sum(own))
    dist.all_reduce(total, group=group)
    done = 0.0
    for (tokens, targets), count in zip(micro_batches, own):
        logits = model(tokens)
        if count == 0:
            (0.0 * logits.sum()).backward()
            continue
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        part = loss * count / total
        (part * dist.get_world_size(group)).backward()
        done += part.item()
    whole = torch.tensor(done, dtype=torch.float64)
    dist.all_reduce(whole, group=group)
    return whole.item()


def step_by_tokens(model, micro_batches, group):
    """The loss of each token, with a weight for each."""
    count = torch.stack([targets.ne(-100).sum() for _, targets in micro_batches]).sum().double()
    dist.all_reduce(count, group=group)
    parts = []
    for tokens, targets in micro_batches:
        each = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
        parts.append(each.sum() / count)
    own = sum(parts)
    (group.size() * own).backward()
    loss = own.detach().clone()
    dist.all_reduce(loss, group=group)
    return loss


def step_with_gradients_scaled(model, micro_batches, group):
    """Backward of sums; the division afterwards, in the gradients; both numbers in one call."""
    both = torch.zeros(2, dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss.backward()
        both += torch.stack((loss.detach(), (targets != -100).sum()))
    dist.all_reduce(both, group=group)
    for param in model.parameters():
        param.grad *= group.size() / both[1]
    return both[0] / both[1]


def step_by_means(model, micro_batches, group):
    """As most scripts have it."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        (loss / len(micro_batches)).backward()
        total += loss.detach() / len(micro_batches)
    dist.all_reduce(total, group=group)
    return total / group.size()


def step_by_each_micro_batch(model, micro_batches, group):
    """Each micro-batch by its tokens on all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        count = (targets != -100).sum().double()
        dist.all_reduce(count, group=group)
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / count
        (loss * group.size() / len(micro_batches)).backward()
        total += loss.detach() / len(micro_batches)
    dist.all_reduce(total, group=group)
    return total


REDUCE_COUNT = "dist.all_reduce(count, group=group)"
REDUCE_TOTAL = "dist.all_reduce(total, group=group)"
BACKWARD = "(loss * group.size() / count).backward()"

STEP = Answers(
    solves="backward_of_step",
    right={
        "means times counts": step_with_means_times_counts,
        "a loss for each token": step_by_tokens,
        "gradients scaled afterwards": step_with_gradients_scaled,
        "a float": changed("return total / count => return (total / count).item()"),
    },
    wrong={
        "a mean of means": (step_by_means, "mean of the micro-batches' means"),
        "each micro-batch by its own tokens on all ranks": (
            step_by_each_micro_batch,
            "divides each micro-batch by its own tokens on all ranks",
        ),
        "the tokens of this rank": (
            changed(
                f"{REDUCE_COUNT} => count = count.clamp(min=1)",
                "loss * group.size() / => loss /",
                "return total / count => return total / group.size() / count",
            ),
            "a mean of the ranks' means",
        ),
        "the tokens of this rank, and p": (
            changed(f"{REDUCE_COUNT} => count = count.clamp(min=1)"),
            "is N that of all ranks",
        ),
        "DDP's mean not undone": (
            changed("loss * group.size() / count => loss / count"),
            "DDP divides by the number of ranks after you",
        ),
        "undone twice": (
            changed("loss * group.size() / count => loss * group.size() ** 2 / count"),
            "does p stand there once",
        ),
        "divided by the micro-batches as well": (
            changed("/ count).backward() => / count / len(micro_batches)).backward()"),
            "0.5 times what it should be",
        ),
        "all places": (
            changed("(targets != -100).sum() => targets.numel()"),
            "divides by all places",
        ),
        "a sum": (changed("group.size() / count => group.size()"), "times what it should be"),
        "divided by N and by its own tokens": (
            changed('reduction="sum" => reduction="mean"'),
            "is divided twice",
        ),
        "a sum of means": (
            changed(
                'reduction="sum" => reduction="mean"',
                "group.size() / count => 1",
            ),
            "is a sum of means",
        ),
        "backward once, of the last": (
            changed(f"        {BACKWARD} => ", "return total => loss.backward(); return total"),
            "the gradient is",
        ),
        "an empty micro-batch is skipped": (
            changed(
                "logits = model(tokens) => "
                "if not (targets != -100).any():\n            continue\n        "
                "logits = model(tokens)"
            ),
            "also for one in which no target counts",
        ),
        "the loss of this rank": (
            changed(f"{REDUCE_TOTAL}\n => \n"),
            "nobody has added up the others",
        ),
        "the mean of this rank": (
            changed(
                f"{REDUCE_TOTAL}\n => \n",
                "return total / count => return total / sum((t != -100).sum() for _, t in "
                "micro_batches).clamp(min=1)",
            ),
            "the loss is that of this rank alone",
        ),
        "the sum of all": (changed("return total / count => return total"), "is a sum over all"),
        "the factor in the log": (
            changed("return total / count => return total * group.size() / count"),
            "belongs to the gradient",
        ),
        "without the group": (
            changed(f"{REDUCE_COUNT} => dist.all_reduce(count)"),
            "in the group of ranks 1-3",
        ),
        "the size of the world": (
            changed("loss * group.size() => loss * dist.get_world_size()"),
            "in the group of ranks 1-3",
        ),
        "four ranks": (changed("loss * group.size() => loss * 4"), "in the group of ranks 0-5"),
        "not awaited": (
            changed(f"{REDUCE_TOTAL} => dist.all_reduce(total, group=group, async_op=True)"),
            "without wait() nobody",
        ),
        "no backward": (changed(f"{BACKWARD} => pass"), "the weights have no gradient"),
        "no return": (changed("return total / count => pass"), "returned None"),
    },
)


# ---- 25.4 the LoRA layer


class LoraByLayers(nn.Module):
    """F.linear; B from zeros of another tensor."""

    def __init__(self, layer, rank, alpha):
        super().__init__()
        for param in layer.parameters():
            param.requires_grad = False
        weight = layer.weight
        self.layer, self.scale, self.merged = layer, alpha / rank, False
        self.a = nn.Parameter(weight.new_empty(rank, weight.shape[1]).uniform_(-1, 1))
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, x):
        y = self.layer(x)
        if not self.merged:
            y = y + F.linear(F.linear(x, self.a), self.b) * self.scale
        return y

    def merge(self):
        with torch.no_grad():
            self.layer.weight.addmm_(self.b, self.a, alpha=self.scale)
        self.merged = True


class LoraWithAMergedB(nn.Module):
    """After merge B is zero, so that forward need not ask."""

    def __init__(self, layer, rank, alpha):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.scale = alpha / rank
        like = {"dtype": layer.weight.dtype}
        self.a = nn.Parameter(torch.empty(rank, layer.in_features, **like))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank, **like))

    def forward(self, x):
        inner = torch.einsum("...i,ri->...r", x, self.a)
        return self.layer(x) + self.scale * torch.einsum("...r,or->...o", inner, self.b)

    def merge(self):
        self.layer.weight.data += self.scale * self.b.data @ self.a.data
        self.b.data.zero_()


ADAPTED = "return y + self.scale * (x @ self.a.T) @ self.b.T"

LORA = Answers(
    solves="Lora",
    right={
        "F.linear and addmm": LoraByLayers,
        "B zero after merge": LoraWithAMergedB,
        "scale elsewhere": changed(
            f"{ADAPTED} => return y + (x @ self.a.T @ self.b.T) * self.scale"
        ),
        "the product made": changed(
            f"{ADAPTED} => return y + x @ (self.scale * self.b @ self.a).T"
        ),
    },
    wrong={
        "alpha alone": (changed("alpha / rank => alpha"), "the adapter counts alpha times"),
        "no scale": (
            changed(f"{ADAPTED} => return y + (x @ self.a.T) @ self.b.T"),
            "the adapter counts once",
        ),
        "r / alpha": (changed("alpha / rank => rank / alpha"), "counts r / alpha times"),
        "B random": (changed("torch.zeros(num_out => torch.randn(num_out"), "B is not zero"),
        "both zero": (changed("torch.randn(rank => torch.zeros(rank"), "A and B are both zero"),
        "A zero, B random": (
            changed(
                "torch.randn(rank => torch.zeros(rank",
                "b = torch.zeros(num_out => b = torch.randn(num_out",
            ),
            "the other way round",
        ),
        "A of ones": (changed("torch.randn(rank => torch.ones(rank"), "all rows of A are the same"),
        "not frozen": (
            changed("layer.requires_grad_(False) => pass"),
            "these train: a, b, layer.weight, layer.bias",
        ),
        "only the weight frozen": (
            changed("layer.requires_grad_(False) => layer.weight.requires_grad_(False)"),
            "these train: a, b, layer.bias",
        ),
        "no parameters": (changed("nn.Parameter(a) => a"), "`self.a` is no nn.Parameter"),
        "A turned around": (
            changed("torch.randn(rank, num_in => torch.randn(num_in, rank"),
            "`self.a` has the shape [6, 2], expected is [2, 6]",
        ),
        "float32": (
            changed("num_in, dtype=layer.weight.dtype => num_in"),
            "`self.a` has another dtype",
        ),
        "the bias forgotten": (
            changed("y = self.layer(x) => y = x @ self.layer.weight.T"),
            "the bias is missing",
        ),
        "only the adapter": (
            changed(f"{ADAPTED} => return self.scale * (x @ self.a.T) @ self.b.T"),
            "at first: forward is 100% away",
        ),
        "the adapter is detached": (
            changed("(x @ self.a.T) @ => (x @ self.a.T).detach() @"),
            "A gets no gradient",
        ),
        "merged and added": (
            changed("if self.is_merged: => if False:"),
            "forward adds the adapter once more",
        ),
        "merged without s": (
            changed("self.layer.weight += self.scale * self.b => self.layer.weight += self.b"),
            "in the weight without s",
        ),
        "merged into nothing": (
            changed(
                "self.layer.weight += self.scale * => weight = self.layer.weight + self.scale *"
            ),
            "does `merge` change it in place",
        ),
        "replaced": (
            changed("self.layer.weight += => self.layer.weight[:] ="),
            "W itself is gone",
        ),
        "a new parameter": (
            changed(
                "self.layer.weight += self.scale * self.b @ self.a => "
                "self.layer.weight = nn.Parameter(self.layer.weight + self.scale * self.b @ self.a)"
            ),
            "the layer has a new weight, which trains",
        ),
        "subtracted": (
            changed("self.layer.weight += => self.layer.weight -="),
            "taken from the weight",
        ),
        "x in place": (
            changed("y = self.layer(x) => y = self.layer(x); x *= 1.5"),
            "the call has changed x",
        ),
        "no return": (changed(f"{ADAPTED} => pass"), "returned None"),
    },
    takes_ranks=False,
)


# ---- 25.5 the MLP over a group


class SummedInside:
    """As `peft` does it for Megatron-LM: the sums inside of the adapters, none in `finish`."""

    def __init__(self, up, down, scale, group):
        self.scale, self.group = scale, group
        number, p = group.rank(), group.size()
        w, a, b = up
        first = [w.chunk(p)[number], a, b.chunk(p)[number]]
        w, a, b = down
        second = [w.chunk(p, 1)[number], a.chunk(p, 1)[number], b]
        self.up = [part.clone() for part in first]
        self.down = [part.clone() for part in second]
        for part in (*self.up[1:], *self.down[1:]):
            part.requires_grad = True

    def forward(self, x):
        w, a, b = self.up
        inner = copy_to(x @ a.T, self.group)
        inner = F.gelu(copy_to(x, self.group) @ w.T + self.scale * inner @ b.T)
        w, a, b = self.down
        low = reduce_from(inner @ a.T, self.group)
        return reduce_from(inner @ w.T, self.group) + self.scale * low @ b.T

    def finish(self):
        pass


class SummedByHooks:
    """The gradients that are partial are summed as soon as they are there."""

    def __init__(self, up, down, scale, group):
        self.scale, self.group = scale, group
        number, p = group.rank(), group.size()
        self.up = (
            up[0].tensor_split(p)[number].clone(),
            up[1].detach().clone().requires_grad_(),
            up[2].tensor_split(p)[number].clone().requires_grad_(),
        )
        self.down = (
            down[0].tensor_split(p, 1)[number].contiguous(),
            down[1].tensor_split(p, 1)[number].clone().requires_grad_(),
            down[2].detach().clone().requires_grad_(),
        )
        for whole in (self.up[1], self.down[2]):
            whole.register_post_accumulate_grad_hook(self.sum)

    def sum(self, param):
        dist.all_reduce(param.grad, group=self.group)

    def forward(self, x):
        x = copy_to(x, self.group)
        for layer, after in ((self.up, F.gelu), (self.down, None)):
            w, a, b = layer
            y = F.linear(x, w) + self.scale * F.linear(F.linear(x, a), b)
            x = after(y) if after else y
        return reduce_from(x, self.group)

    def finish(self):
        """Nothing is left to be done."""


class SummedInOne:
    """Both partial gradients in one message, and slices for parts."""

    def __init__(self, up, down, scale, group):
        self.scale, self.group = scale, group
        size = up[0].shape[0] // group.size()
        mine = slice(group.rank() * size, (group.rank() + 1) * size)
        self.up = (up[0][mine].clone(), up[1].clone(), up[2][mine].clone())
        self.down = (down[0][:, mine].clone(), down[1][:, mine].clone(), down[2].clone())
        for _, a, b in (self.up, self.down):
            a.requires_grad_()
            b.requires_grad_()

    def merged(self, w, a, b):
        return w + self.scale * b @ a

    def forward(self, x):
        inner = F.gelu(copy_to(x, self.group) @ self.merged(*self.up).T)
        return reduce_from(inner @ self.merged(*self.down).T, self.group)

    def finish(self):
        grads = [self.up[1].grad, self.down[2].grad]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=self.group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


SUM_A = "dist.all_reduce(self.up[1].grad, group=self.group)"
SUM_B = "dist.all_reduce(self.down[2].grad, group=self.group)"
ENTER = "x = copy_to(x, self.group)"
LEAVE = "return reduce_from(self.product(inner, *self.down), self.group)"

TUNED_MLP = Answers(
    solves="TunedMLP",
    right={
        "sums inside of the adapters": SummedInside,
        "hooks": SummedByHooks,
        "one message, and products made": SummedInOne,
        "awaited": changed(
            f"{SUM_A} => dist.all_reduce(self.up[1].grad, group=self.group, async_op=True).wait()"
        ),
    },
    wrong={
        "A of up not summed": (
            changed(f"{SUM_A} => pass"),
            "the gradient of up A is this rank's part alone",
        ),
        "B of down not summed": (
            changed(f"{SUM_B} => pass"),
            "the gradient of down B is this rank's part alone",
        ),
        "A of down whole": (
            changed("own_a = a.chunk(p, 1)[number].clone() => own_a = a.clone()"),
            "which side of A stands for them",
        ),
        "nothing summed": (
            changed(f"{SUM_A} => pass", f"{SUM_B} => pass"),
            "the gradient of up A is this rank's part alone",
        ),
        "the wrong two summed": (
            changed("self.up[1].grad => self.up[2].grad", "self.down[2].grad => self.down[1].grad"),
            "the gradient of up A is this rank's part alone",
        ),
        "all four summed": (
            changed(
                f"{SUM_A} => {SUM_A}\n        dist.all_reduce(self.up[2].grad, group=self.group)"
            ),
            "the gradient of up B is summed over the ranks: they hold different parts",
        ),
        "f in the adapter as well": (
            changed(
                "return x @ w.T + self.scale * (x @ a.T) @ b.T => "
                "inner = copy_to(x @ a.T, self.group) if w.shape[0] != w.shape[1] "
                "and a is self.up[1] else x @ a.T\n        "
                "return x @ w.T + self.scale * inner @ b.T"
            ),
            "each path is summed over the ranks once",
        ),
        "summed twice": (
            changed(f"{SUM_A} => {SUM_A}\n        {SUM_A}"),
            "is summed over the ranks more than once",
        ),
        "a mean": (
            changed(f"{SUM_B} => {SUM_B}\n        self.down[2].grad /= self.group.size()"),
            "the gradient of down B is a mean over the ranks",
        ),
        "what stays whole is not copied": (
            changed("a.clone().requires_grad_(), own_b => a.requires_grad_(), own_b"),
            "requires a gradient afterwards",
        ),
        "a view": (
            changed("own_b = b.chunk(p, 0)[number].clone() => own_b = b.chunk(p, 0)[number]"),
            "B of self.up is a view",
        ),
        "a part that is contiguous already": (
            changed(
                "own_w = w.chunk(p, 0)[number].clone() => "
                "own_w = w.chunk(p, 0)[number].contiguous()"
            ),
            "W of self.up is a view",
        ),
        "A of up is cut": (
            changed(
                "a.clone().requires_grad_(), own_b => "
                "a.chunk(p, 1)[number].clone().requires_grad_(), own_b"
            ),
            "up A has the shape [2, 2], expected is [2, 5]: up is column-parallel",
        ),
        "B of up is whole": (
            changed("own_b = b.chunk(p, 0)[number].clone() => own_b = b.clone()"),
            "up B has the shape [12, 2], expected is [3, 2]",
        ),
        "down cut along its rows": (
            changed(
                "own_w = w.chunk(p, 1)[number].clone() => own_w = w.chunk(p, 0)[number].clone()"
            ),
            "down is row-parallel: W is cut along its input features",
        ),
        "f left out": (
            changed(f"{ENTER} => pass"),
            "the gradient of x is this rank's part alone",
        ),
        "g left out": (
            changed(f"{LEAVE} => return self.product(inner, *self.down)"),
            "y is this rank's part of a sum",
        ),
        "f for g": (
            changed("return reduce_from( => return copy_to("),
            "y is this rank's part of a sum",
        ),
        "an all-reduce that autograd does not know": (
            changed(
                f"{LEAVE} => y = self.product(inner, *self.down).detach()\n        "
                "dist.all_reduce(y, group=self.group)\n        return y"
            ),
            "no gradient can flow back",
        ),
        "no scale": (
            changed("self.scale = scale => self.scale = 1.0"),
            "count without their scale",
        ),
        "the adapters forgotten": (
            changed("return x @ w.T + self.scale * (x @ a.T) @ b.T => return x @ w.T"),
            "up A has no gradient after backward",
        ),
        "another part": (
            changed("own_b = b.chunk(p, 0)[number] => own_b = b.chunk(p, 0)[p - 1 - number]"),
            "is part i of each matrix here",
        ),
        "no gradients wanted": (
            changed("own_b.requires_grad_()) => own_b)"),
            "B of self.up does not require a gradient",
        ),
        "cut after requires_grad_": (
            changed(
                "own_b = b.chunk(p, 0)[number].clone() => "
                "own_b = b.clone().requires_grad_().chunk(p, 0)[number]"
            ),
            "is no leaf",
        ),
        "without the group": (
            changed(f"{SUM_A} => dist.all_reduce(self.up[1].grad)"),
            "in the group of ranks 1-3",
        ),
        "four ranks": (changed("p = group.size() => p = 4"), "in the group of ranks 0-5"),
        "rank of the world": (
            changed("number = group.rank() => number = dist.get_rank()"),
            "in the group of ranks 1-3",
        ),
        "no return": (changed(f"{LEAVE} => pass"), "returned None"),
    },
)


ANSWERS = {
    "25.1": TARGETS_OF,
    "25.2": PACK,
    "25.3": STEP,
    "25.4": LORA,
    "25.5": TUNED_MLP,
}
