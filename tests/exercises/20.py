"""Answers to the exercises of lesson 20, predict before you submit."""

from itertools import product

from answers import Answers, changed, of_the_check

from course.exercises import l20
from course.labs import l20_plan as lab

# ---- 20.1 parameters


def linear(inputs, outputs):
    return inputs * outputs + outputs


def by_products(s):
    kv = s.kv_heads * s.hidden // s.heads
    layer = linear(s.hidden, s.hidden) * 2 + linear(s.hidden, kv) * 2
    layer += linear(s.hidden, s.ffn) + linear(s.ffn, s.hidden) + 4 * s.hidden
    return layer * s.layers + s.hidden * (s.vocab + s.tokens + 2)


def in_one_line(s):
    h = s.hidden
    q = h + 2 * h * s.kv_heads // s.heads
    return s.layers * ((h + 1) * q + h * h + 6 * h + (2 * h + 1) * s.ffn) + h * (
        s.vocab + s.tokens + 2
    )


PARAMETERS = Answers(
    solves="parameters",
    takes_ranks=False,
    right={"linear layers": by_products, "in one line": in_one_line},
    wrong=of_the_check("20.1") | {"labcode's own": (lab.count_weights, "labcode's own answer")},
)

# ---- 20.2 FLOPs


def for_each_token(shape, samples, causal=False, checkpointing="none"):
    seen = shape.tokens / 2 if causal else shape.tokens
    forward = shape.layers * (2 * lab.products(shape) + 4 * seen * shape.hidden)
    total = 3 * (forward + 2 * shape.vocab * shape.hidden)
    total += forward * (checkpointing == "full")
    return total * samples * shape.tokens


def by_forward_and_backward(shape, samples, causal=False, checkpointing="none"):
    def forward(with_head):
        count = lab.products(shape) * shape.layers
        count += shape.vocab * shape.hidden * with_head
        scores = shape.tokens**2 * shape.hidden * shape.layers * 2
        return 2 * samples * (count * shape.tokens + scores // (2 if causal else 1))

    passes = forward(1) + 2 * forward(1)
    return passes + forward(0) if checkpointing != "none" else passes


FLOPS = Answers(
    solves="flops",
    takes_ranks=False,
    right={"for each token": for_each_token, "forward and backward": by_forward_and_backward},
    wrong=of_the_check("20.2"),
)

# ---- 20.3 memory


def by_a_loop(shape, layout, global_batch):
    dp, pp, tp, zero, b, checkpointing = layout
    state = {1: 12, 2: 2, 3: 2}
    per_weight = sum(size / dp if zero >= stage else size for stage, size in state.items())
    found = []
    for stage in range(pp):
        layers = shape.layers / pp
        weights = layers * lab.products(shape)
        weights += shape.vocab * shape.hidden * (stage in (0, pp - 1))
        act = b * shape.tokens * shape.hidden
        kept = act * (2 if checkpointing == "full" else 32)
        under_way = min(pp - stage, global_batch / dp / b)
        passing = act * 32 - kept
        if stage == pp - 1:
            passing = max(passing, 10 * b * shape.tokens * shape.vocab)
        found.append((weights * per_weight + layers * under_way * kept + passing) / tp)
    return max(found)


WEIGHTS = "layers * lab.products(shape) + shape.vocab * shape.hidden"
ALL_WEIGHTS = f"{WEIGHTS} + (13 * layers + shape.tokens + 2) * shape.hidden"

MEMORY = Answers(
    solves="memory",
    takes_ranks=False,
    right={
        "every stage": by_a_loop,
        "biases, norms, positions": changed(f"{WEIGHTS} => {ALL_WEIGHTS}"),
    },
    wrong=of_the_check("20.3") | {"labcode's own": (lab.memory, "labcode's own answer")},
)

# ---- 20.4 the rule of two levels


def by_counting(cluster, ranks, stride):
    nodes = {rank * stride // cluster.gpus_per_node for rank in range(ranks)}
    if len(nodes) == 1:
        return cluster.inside.beta_bytes_per_s
    rate = cluster.between.beta_bytes_per_s / (len(nodes) - 1) * (ranks - 1)
    if len(nodes) == ranks:
        return rate
    return min(rate, cluster.inside.beta_bytes_per_s)


def without_ceil(cluster, ranks, stride):
    per_node = min(max(cluster.gpus_per_node // stride, 1), ranks)
    nodes = -(-ranks // per_node)
    links = [cluster.inside.beta_bytes_per_s]
    if nodes > 1:
        links.append(cluster.between.beta_bytes_per_s * (ranks - 1) / (nodes - 1))
    return min(links) if per_node > 1 or nodes == 1 else links[-1]


BUS = Answers(
    solves="bus_bytes_per_s",
    takes_ranks=False,
    right={"counts nodes": by_counting, "a list": without_ceil},
    wrong=of_the_check("20.4") | {"labcode's own": (lab.bus_bytes_per_s, "labcode's own answer")},
)

# ---- 20.5 the step


def in_pieces(shape, layout, global_batch, cluster):
    def compute():
        flops = lab.flops(shape, layout.micro_batch, checkpointing=layout.checkpointing)
        return flops / cluster.flops_per_s / layout.tp / layout.pp

    def act():
        return 2 * layout.micro_batch * shape.tokens * shape.hidden

    def tp():
        each = lab.all_reduce_s(cluster, layout.tp, 1, act())
        forwards = 2 if layout.checkpointing == "full" else 1
        return each * (2 * forwards + 2) * (shape.layers // layout.pp)

    def pp():
        if layout.pp == 1:
            return 0
        return 2 * lab.send_s(cluster, layout, act() / layout.tp)

    def dp():
        parts = layout.tp * layout.pp
        size = 2 * lab.parameters(shape) / parts
        return lab.all_reduce_s(cluster, layout.dp, layout.tp, size)

    stage = compute() + tp()
    end = dp()
    if layout.zero < 3:
        can_hide = end * (1.0, 0.5, 0.5)[layout.zero]
        end -= 0.85 * min(can_hide, compute() * 2 / 3)
    if layout.zero >= 3:
        end = 0
        stage = max(stage, 1.5 * dp()) + 0.15 * min(stage, 1.5 * dp())
    stage += pp()
    micro_batches = global_batch / layout.dp / layout.micro_batch
    return stage * micro_batches + stage * (layout.pp - 1) + end


def by_the_bubble(shape, layout, global_batch, cluster):
    """The ideal time, times 1 + (pp-1)/m."""
    m = global_batch // (layout.dp * layout.micro_batch)
    flops = lab.flops(shape, global_batch / layout.dp, checkpointing=layout.checkpointing)
    total = flops / layout.tp / layout.pp / cluster.flops_per_s
    last_backward = total / m * 2 / 3
    act = 2 * layout.micro_batch * shape.tokens * shape.hidden
    count = {"none": 4, "full": 6}[layout.checkpointing]
    total += count * m * shape.layers / layout.pp * lab.all_reduce_s(cluster, layout.tp, 1, act)
    size = 2 * lab.parameters(shape) / (layout.tp * layout.pp)
    tail = lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    if layout.zero == 3:
        over = 1.5 * tail * m
        total = max(total, over) + 0.15 * min(total, over)
        tail = 0.0
    else:
        whole = tail
        hidden = min(tail if layout.zero == 0 else tail / 2, last_backward)
        tail = whole - hidden + hidden * 0.15
    if layout.pp > 1:
        total += 2 * m * lab.send_s(cluster, layout, act / layout.tp)
    return total * (1 + (layout.pp - 1) / m) + tail


STEP = Answers(
    solves="step_s",
    takes_ranks=False,
    right={"in pieces": in_pieces, "by the bubble": by_the_bubble},
    wrong=of_the_check("20.5") | {"labcode's own": (lab.step_s, "labcode's own answer")},
)

# ---- 20.6 the search


def by_product(shape, cluster, gpus, global_batch):
    sizes = range(1, gpus + 1)
    found = []
    room = cluster.memory_bytes - lab.RESERVED_BYTES
    for dp, pp, tp in product(sizes, sizes, sizes):
        if dp * pp * tp != gpus or global_batch % dp or shape.layers % pp:
            continue
        if shape.kv_heads % tp or shape.ffn % tp or tp > cluster.gpus_per_node:
            continue
        choices = product(
            lab.stages_of_zero(dp, pp), lab.divisors(global_batch // dp), ("none", "full")
        )
        for choice in choices:
            layout = lab.Layout(dp, pp, tp, *choice)
            needed = lab.memory(shape, layout, global_batch)
            if needed <= room:
                step = lab.step_s(shape, layout, global_batch, cluster)
                found.append([step, needed, layout])
    return sorted(found, key=lambda entry: entry[0])


def filtered(shape, cluster, gpus, global_batch):
    def all_of_them():
        for tp, pp in product(lab.divisors(gpus), lab.divisors(gpus)):
            if gpus % (tp * pp) == 0:
                dp = gpus // (tp * pp)
                for b in range(1, global_batch // dp + 1):
                    for zero in lab.stages_of_zero(dp, pp):
                        yield lab.Layout(dp, pp, tp, zero, b, "none")
                        yield lab.Layout(dp, pp, tp, zero, b, "full")

    def is_legal(layout):
        return not (
            layout.tp > cluster.gpus_per_node
            or shape.kv_heads % layout.tp
            or shape.ffn % layout.tp
            or shape.layers % layout.pp
            or global_batch % (layout.dp * layout.micro_batch)
        )

    found = []
    for layout in filter(is_legal, all_of_them()):
        needed = lab.memory(shape, layout, global_batch)
        if needed + lab.RESERVED_BYTES <= cluster.memory_bytes:
            entry = lab.Found(lab.step_s(shape, layout, global_batch, cluster), needed, layout)
            found.append(entry)
    return sorted(found)


SEARCH = Answers(
    solves="search",
    takes_ranks=False,
    right={"by product": by_product, "filtered": filtered},
    wrong=of_the_check("20.6") | {"labcode's own": (lab.search, "labcode's own answer")},
)

# ---- 20.7 a plan


def defended(layout):
    """The layout with what is true of it."""
    cluster = lab.cluster(l20.TASK["cluster"])
    batch = l20.TASK["global_batch"]
    lost = lab.losses(l20.TASK_SHAPE, layout, batch, cluster)
    limit = max(lost, key=lost.__getitem__)
    needed = lab.memory(l20.TASK_SHAPE, layout, batch)
    share = lost[limit] / lab.step_s(l20.TASK_SHAPE, layout, batch, cluster)
    return [layout, needed / 2**30, limit, share]


def with_change(place, value):
    found = defended(lab.Layout(8, 8, 2, 1, 1, "none"))
    found[place] = value
    return tuple(found)


_GIB = defended(lab.Layout(8, 8, 2, 1, 1, "none"))[1]

PROPOSAL = Answers(
    solves=("layout", "memory_gib", "limit", "lost_share"),
    takes_ranks=False,
    solution=False,
    right={
        "eight stages": defended(lab.Layout(8, 8, 2, 1, 1, "none")),
        "four stages": defended(lab.Layout(16, 4, 2, 1, 1, "none")),
        "little memory": defended(lab.Layout(4, 8, 4, 1, 1, "none")),
    },
    wrong={
        "too few GPUs": (defended(lab.Layout(8, 4, 2, 1, 1, "none")), "there are 128 GPUs"),
        "tp over nodes": (defended(lab.Layout(8, 1, 16, 1, 1, "none")), "stay in one node"),
        "too full": (defended(lab.Layout(128, 1, 1, 3, 2, "none")), "Fits: no"),
        "slow": (defended(lab.Layout(8, 8, 2, 1, 1, "full")), "Fast: no"),
        "GB for GiB": (with_change(1, _GIB * 1.0737), "In GiB"),
        "another limit": (with_change(2, "tp"), "something else costs more"),
        "no such limit": (with_change(2, "network"), "`limit` is one of"),
        "percent": (with_change(3, 13.0), "Share"),
    },
)

ANSWERS = {
    "20.1": PARAMETERS,
    "20.2": FLOPS,
    "20.3": MEMORY,
    "20.4": BUS,
    "20.5": STEP,
    "20.6": SEARCH,
    "20.7": PROPOSAL,
}
