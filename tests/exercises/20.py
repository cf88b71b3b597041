"""Answers to the exercises of lesson 20, predict before you submit."""

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

from answers import Answers

from labcode.teach.exercises import l20
from labcode.teach.labs import l20_plan as lab

# ---- 20.1 parameters


def block_by_block(shape):
    hidden = shape.hidden
    head_size = hidden // shape.heads
    qkv = hidden + 2 * shape.kv_heads * head_size
    attention = hidden * qkv + qkv + hidden * hidden + hidden
    mlp = hidden * shape.ffn + shape.ffn + shape.ffn * hidden + hidden
    norms = 2 * 2 * hidden
    ends = shape.vocab * hidden + shape.tokens * hidden + 2 * hidden
    return shape.layers * (attention + mlp + norms) + ends


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


def twelve_h_squared(s):
    return 12 * s.layers * s.hidden**2 + (s.vocab + s.tokens) * s.hidden


def head_twice(s):
    return block_by_block(s) + s.vocab * s.hidden


def no_positions(s):
    return block_by_block(s) - s.tokens * s.hidden


def no_last_norm(s):
    return block_by_block(s) - 2 * s.hidden


def one_norm(s):
    return block_by_block(s) - 2 * s.hidden * s.layers


def no_biases(s):
    return s.layers * (lab.products(s) + 4 * s.hidden) + s.hidden * (s.vocab + s.tokens + 2)


def all_heads_alike(s):
    return block_by_block(replace(s, kv_heads=s.heads))


def four_h(s):
    return block_by_block(replace(s, ffn=4 * s.hidden))


def labcodes_own(s):
    return lab.transformer(s).num_parameters


def counted(s):
    return lab.count_weights(s)


PARAMETERS = Answers(
    solves="parameters",
    takes_ranks=False,
    real=True,
    right={
        "block by block": block_by_block,
        "linear layers": by_products,
        "in one line": in_one_line,
    },
    wrong={
        "12 L h^2": (twelve_h_squared, "one bias has its length"),
        "the head twice": (head_twice, "is the head a second table"),
        "no positions": (no_positions, "a row for each position"),
        "no last norm": (no_last_norm, "behind the last block"),
        "one norm in a block": (one_norm, "which of them is miscounted"),
        "no biases": (no_biases, "one bias has its length"),
        "kv_heads ignored": (all_heads_alike, "keys and values"),
        "ffn ignored": (four_h, "feature more inside the MLP"),
        "labcode's own": (labcodes_own, "labcode's own answer"),
        "a model counted": (counted, "labcode's own answer"),
        "no return": (lambda shape: None, "it returned None"),
    },
)

# ---- 20.2 FLOPs


def term_by_term(shape, samples, causal=False, checkpointing="none"):
    tokens = samples * shape.tokens
    attention = 4 * tokens * shape.tokens * shape.hidden
    if causal:
        attention = attention / 2
    layers = shape.layers * (2 * tokens * lab.products(shape) + attention)
    head = 2 * tokens * shape.vocab * shape.hidden
    if checkpointing == "full":
        return 4 * layers + 3 * head
    return 3 * layers + 3 * head


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


def forward_alone(shape, samples, causal=False, checkpointing="none"):
    return term_by_term(shape, samples, causal) / 3


def six_n(shape, samples, causal=False, checkpointing="none"):
    return 6 * lab.parameters(shape) * samples * shape.tokens


def six_n_by_hand(shape, samples, causal=False, checkpointing="none"):
    return 6 * block_by_block(shape) * samples * shape.tokens


def no_attention(shape, samples, causal=False, checkpointing="none"):
    tokens = samples * shape.tokens
    return 6 * tokens * (shape.layers * lab.products(shape) + shape.vocab * shape.hidden)


def no_head(shape, samples, causal=False, checkpointing="none"):
    head = 6 * samples * shape.tokens * shape.vocab * shape.hidden
    return term_by_term(shape, samples, causal, checkpointing) - head


def mask_ignored(shape, samples, causal=False, checkpointing="none"):
    return term_by_term(shape, samples, False, checkpointing)


def mask_halves_all(shape, samples, causal=False, checkpointing="none"):
    return term_by_term(shape, samples, False, checkpointing) / (2 if causal else 1)


def head_again(shape, samples, causal=False, checkpointing="none"):
    return term_by_term(shape, samples, causal) * (4 / 3 if checkpointing == "full" else 1)


def checkpointing_ignored(shape, samples, causal=False, checkpointing="none"):
    return term_by_term(shape, samples, causal)


def samples_ignored(shape, samples, causal=False, checkpointing="none"):
    return term_by_term(shape, 1, causal, checkpointing)


def gpts_alone(shape, samples, causal=False, checkpointing="none"):
    plain = replace(shape, kv_heads=shape.heads, ffn=4 * shape.hidden)
    return term_by_term(plain, samples, causal, checkpointing)


def one_flop(shape, samples, causal=False, checkpointing="none"):
    return term_by_term(shape, samples, causal, checkpointing) / 2


FLOPS = Answers(
    solves="flops",
    takes_ranks=False,
    real=True,
    right={
        "term by term": term_by_term,
        "for each token": for_each_token,
        "forward and backward": by_forward_and_backward,
    },
    wrong={
        "forward alone": (forward_alone, "a forward alone"),
        "labcode's own": (six_n, "labcode's own answer"),
        "6 N D": (six_n_by_hand, "tables that are looked up"),
        "no attention": (no_attention, "attention, which have no weights"),
        "no head": (no_head, "the head is missing"),
        "the mask ignored": (mask_ignored, "half of the table"),
        "the mask halves all": (mask_halves_all, "nothing else gets less"),
        "the head is repeated": (head_again, "the head is not checkpointed"),
        "checkpointing ignored": (checkpointing_ignored, "one more forward"),
        "samples ignored": (samples_ignored, "three times as much"),
        "a plain GPT always": (gpts_alone, "is 12 h^2 in your code"),
        "a multiply-add is one": (one_flop, "two FLOPs"),
    },
)

# ---- 20.3 memory


def two_stages(shape, layout, global_batch):
    layers = shape.layers // layout.pp
    weights = (layers * lab.products(shape) + shape.vocab * shape.hidden) / layout.tp
    cut = layout.dp
    each = 2 / (cut if layout.zero >= 3 else 1)
    each += 2 / (cut if layout.zero >= 2 else 1)
    each += 12 / (cut if layout.zero >= 1 else 1)
    tokens = layout.micro_batch * shape.tokens
    whole = 32 * tokens * shape.hidden / layout.tp
    kept = whole / 16 if layout.checkpointing == "full" else whole
    m = global_batch // (layout.dp * layout.micro_batch)
    logits = 10 * tokens * shape.vocab / layout.tp
    again = whole - kept
    first = layers * min(layout.pp, m) * kept + again
    last = layers * kept + max(logits, again)
    return weights * each + max(first, last)


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


def with_biases_by_hand(shape, layout, global_batch):
    biases = 13 * shape.hidden * shape.layers / layout.pp / layout.tp
    return two_stages(shape, layout, global_batch) + 4 * biases


def changed(**changes):
    """`two_stages` of another layout."""

    def answer(shape, layout, global_batch):
        known = {}
        for name, value in changes.items():
            known[name] = value(layout) if callable(value) else value
        return two_stages(shape, layout._replace(**known), global_batch)

    return answer


def all_micro_batches(shape, layout, global_batch):
    m = global_batch // (layout.dp * layout.micro_batch)
    kept = 2 if layout.checkpointing == "full" else 32
    act = layout.micro_batch * shape.tokens * shape.hidden / layout.tp
    layers = shape.layers // layout.pp
    return two_stages(shape, layout, global_batch) + (m - 1) * layers * kept * act


def stages_hold_one(shape, layout, global_batch):
    act = 32 * layout.micro_batch * shape.tokens * shape.hidden / layout.tp
    m = global_batch // (layout.dp * layout.micro_batch)
    more = min(layout.pp, m) - 1
    return two_stages(shape, layout, global_batch) - more * shape.layers / layout.pp * act


def stages_hold_pp(shape, layout, global_batch):
    return two_stages(shape, layout, global_batch * 100)


def first_alone(shape, layout, global_batch):
    if layout.pp == 1:
        return two_stages(shape, layout, global_batch)
    return two_stages(replace(shape, vocab=1), layout, global_batch) + shape.vocab * (
        shape.hidden / layout.tp * lab.state_bytes(1, layout.zero, layout.dp)
    )


def zero_cuts_weights_first(shape, layout, global_batch):
    weights = (lab.products(shape) * shape.layers / layout.pp) + shape.vocab * shape.hidden
    found = two_stages(shape, layout, global_batch)
    if layout.zero == 1:
        found += weights / layout.tp * (10 - 10 / layout.dp)
    return found


def states_alone(shape, layout, global_batch):
    weights = lab.products(shape) * shape.layers / layout.pp + shape.vocab * shape.hidden
    return weights / layout.tp * lab.state_bytes(1, layout.zero, layout.dp)


def no_logits(shape, layout, global_batch):
    return two_stages(replace(shape, vocab=1), layout, global_batch) + shape.vocab * (
        shape.hidden / layout.tp * lab.state_bytes(1, layout.zero, layout.dp)
    )


def no_second_forward(shape, layout, global_batch):
    if layout.checkpointing == "none" or shape.vocab > 10_000:
        return two_stages(shape, layout, global_batch)
    weights = shape.layers * lab.products(shape) + shape.vocab * shape.hidden
    tokens = layout.micro_batch * shape.tokens
    kept = 2 * tokens * shape.hidden * shape.layers
    return 16 * weights + kept + 10 * tokens * shape.vocab


def with_m(micro_batches):
    """`two_stages` with another number of micro-batches under way."""

    def answer(shape, layout, global_batch):
        m = global_batch // (layout.dp * layout.micro_batch)
        more = min(layout.pp, micro_batches(layout, global_batch)) - min(layout.pp, m)
        kept = 2 if layout.checkpointing == "full" else 32
        act = kept * layout.micro_batch * shape.tokens * shape.hidden / layout.tp
        return two_stages(shape, layout, global_batch) + more * shape.layers / layout.pp * act

    return answer


def all_words_counted(shape, layout, global_batch):
    """A finer answer: with biases, norms and positions."""
    layers = 13 * shape.hidden * shape.layers / layout.pp
    ends = shape.tokens * shape.hidden + 2 * shape.hidden
    more = (layers + ends) / layout.tp
    states = lab.state_bytes(more, layout.zero, layout.dp)
    return two_stages(shape, layout, global_batch) + states


def in_gib(shape, layout, global_batch):
    return two_stages(shape, layout, global_batch) / 2**30


MEMORY = Answers(
    solves="memory",
    takes_ranks=False,
    real=True,
    right={
        "two stages": two_stages,
        "every stage": by_a_loop,
        "biases": with_biases_by_hand,
        "biases, norms, positions": all_words_counted,
    },
    wrong={
        "states alone": (states_alone, "what the layers keep and what passes"),
        "no logits": (no_logits, "this is missing: what passes"),
        "all micro-batches": (all_micro_batches, "one micro-batch is done before"),
        "zero ignored": (changed(zero=0), "stage 1 cuts the optimizer alone"),
        "ZeRO-1 cuts too little": (zero_cuts_weights_first, "stage 1 cuts the optimizer alone"),
        "ZeRO everywhere": (
            changed(zero=lambda layout: 3 if layout.zero else 0),
            "stage 1 cuts the optimizer alone",
        ),
        "tp ignored": (changed(tp=1), "tp cuts weights, activations and logits"),
        "pp ignored": (changed(pp=1), "how many micro-batches are under way"),
        "one under way": (stages_hold_one, "how many micro-batches are under way"),
        "pp under way": (stages_hold_pp, "than there are"),
        "m without dp and micro-batch": (with_m(lambda _, batch: batch), "does one replica have"),
        "m without dp": (
            with_m(lambda layout, batch: batch // layout.micro_batch),
            "does one replica have",
        ),
        "m without micro-batch": (
            with_m(lambda layout, batch: batch // layout.dp),
            "does one replica have",
        ),
        "the first stage alone": (first_alone, "the last stage is the fullest"),
        "checkpointing ignored": (changed(checkpointing="none"), "keeps its input alone"),
        "no second forward": (no_second_forward, "computed again"),
        "in GiB": (in_gib, "bytes are due"),
        "labcode's own": (lab.memory, "labcode's own answer"),
        "no return": (lambda shape, layout, batch: None, "it returned None"),
    },
)

# ---- 20.4 the rule of two levels


def by_rule(cluster, ranks, stride):
    per_node = max(1, cluster.gpus_per_node // stride)
    nodes = math.ceil(ranks / per_node)
    inside = cluster.inside.beta_bytes_per_s
    if nodes == 1:
        return inside
    crossing = cluster.between.beta_bytes_per_s * (ranks - 1) / (nodes - 1)
    return min(inside, crossing) if per_node > 1 else crossing


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


def always_inside(cluster, ranks, stride):
    return cluster.inside.beta_bytes_per_s


def the_adapter(cluster, ranks, stride):
    if ranks * stride <= cluster.gpus_per_node:
        return cluster.inside.beta_bytes_per_s
    return cluster.between.beta_bytes_per_s


def stride_ignored(cluster, ranks, stride):
    return by_rule(cluster, ranks, 1)


def no_limit(cluster, ranks, stride):
    per_node = max(1, cluster.gpus_per_node // stride)
    nodes = math.ceil(ranks / per_node)
    if nodes == 1:
        return cluster.inside.beta_bytes_per_s
    return cluster.between.beta_bytes_per_s * (ranks - 1) / (nodes - 1)


def whole_nodes(cluster, ranks, stride):
    per_node = max(1, cluster.gpus_per_node // stride)
    nodes = max(1, ranks // per_node)
    if nodes == 1:
        return cluster.inside.beta_bytes_per_s
    crossing = cluster.between.beta_bytes_per_s * (ranks - 1) / (nodes - 1)
    return min(cluster.inside.beta_bytes_per_s, crossing)


def ranks_over_nodes(cluster, ranks, stride):
    per_node = max(1, cluster.gpus_per_node // stride)
    nodes = math.ceil(ranks / per_node)
    if nodes == 1:
        return cluster.inside.beta_bytes_per_s
    return min(cluster.inside.beta_bytes_per_s, cluster.between.beta_bytes_per_s * ranks / nodes)


def eight_a_node(cluster, ranks, stride):
    return by_rule(replace(cluster, gpus_per_node=8), ranks, stride)


def as_far_as_they_reach(cluster, ranks, stride):
    nodes = math.ceil(ranks * stride / cluster.gpus_per_node)
    if nodes == 1:
        return cluster.inside.beta_bytes_per_s
    between = cluster.between.beta_bytes_per_s * (ranks - 1) / (nodes - 1)
    if stride >= cluster.gpus_per_node:
        return between
    return min(cluster.inside.beta_bytes_per_s, between)


BUS = Answers(
    solves="bus_bytes_per_s",
    takes_ranks=False,
    real=True,
    right={"the rule": by_rule, "counts nodes": by_counting, "a list": without_ceil},
    wrong={
        "always inside": (always_inside, "one rank in each of two nodes"),
        "the adapter": (the_adapter, "who sends how much over it"),
        "stride ignored": (stride_ignored, "one rank in each of two nodes"),
        "no limit": (no_limit, "which is the limit"),
        "whole nodes": (whole_nodes, "half full"),
        "n / k": (ranks_over_nodes, "are due"),
        "more nodes than ranks": (as_far_as_they_reach, "two nodes at most"),
        "eight in a node": (eight_a_node, "on another cluster"),
        "labcode's own": (lab.bus_bytes_per_s, "labcode's own answer"),
    },
)

# ---- 20.5 the step


def term_after_term(shape, layout, global_batch, cluster):
    dp, pp, tp, zero, micro_batch, checkpointing = layout
    m = global_batch // (dp * micro_batch)
    work = lab.flops(shape, micro_batch, checkpointing=checkpointing)
    one = work / (tp * pp) / cluster.flops_per_s
    act = 2 * micro_batch * shape.tokens * shape.hidden
    times = 6 if checkpointing == "full" else 4
    one += times * shape.layers / pp * lab.all_reduce_s(cluster, tp, 1, act)
    gradients = 2 * lab.parameters(shape) / (tp * pp)
    tail = lab.all_reduce_s(cluster, dp, tp, gradients)
    if zero == 3:
        travel = 1.5 * tail
        hidden = min(travel, one)
        one += travel - hidden + 0.15 * hidden
        tail = 0
    if pp > 1:
        one += 2 * lab.send_s(cluster, layout, act / tp)
    return (m + pp - 1) * one + tail


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
    act = 2 * layout.micro_batch * shape.tokens * shape.hidden
    count = {"none": 4, "full": 6}[layout.checkpointing]
    total += count * m * shape.layers / layout.pp * lab.all_reduce_s(cluster, layout.tp, 1, act)
    size = 2 * lab.parameters(shape) / (layout.tp * layout.pp)
    tail = lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    if layout.zero == 3:
        over = 1.5 * tail * m
        total = max(total, over) + 0.15 * min(total, over)
        tail = 0.0
    if layout.pp > 1:
        total += 2 * m * lab.send_s(cluster, layout, act / layout.tp)
    return total * (1 + (layout.pp - 1) / m) + tail


def of(**changes):
    """The right time of another layout."""

    def answer(shape, layout, global_batch, cluster):
        known = {}
        for name, value in changes.items():
            known[name] = value(layout) if callable(value) else value
        return term_after_term(shape, layout._replace(**known), global_batch, cluster)

    return answer


def no_bubble(shape, layout, global_batch, cluster):
    m = global_batch // (layout.dp * layout.micro_batch)
    size = 2 * lab.parameters(shape) / (layout.tp * layout.pp)
    tail = 0 if layout.zero == 3 else lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    total = term_after_term(shape, layout, global_batch, cluster) - tail
    return total * m / (m + layout.pp - 1) + tail


def products_alone(shape, layout, global_batch, cluster):
    flops = lab.flops(shape, global_batch, checkpointing=layout.checkpointing)
    return flops / cluster.flops_per_s / (layout.dp * layout.tp * layout.pp)


def batch_ignored(shape, layout, global_batch, cluster):
    one = layout.dp * layout.micro_batch
    return term_after_term(shape, layout, one, cluster)


def four_of_six(shape, layout, global_batch, cluster):
    act = 2 * layout.micro_batch * shape.tokens * shape.hidden
    m = global_batch // (layout.dp * layout.micro_batch)
    found = term_after_term(shape, layout, global_batch, cluster)
    if layout.checkpointing == "full":
        each = lab.all_reduce_s(cluster, layout.tp, 1, act)
        found -= 2 * shape.layers / layout.pp * each * (m + layout.pp - 1)
    return found


def all_layers_everywhere(shape, layout, global_batch, cluster):
    act = 2 * layout.micro_batch * shape.tokens * shape.hidden
    m = global_batch // (layout.dp * layout.micro_batch)
    each = lab.all_reduce_s(cluster, layout.tp, 1, act)
    more = 4 * (shape.layers - shape.layers / layout.pp) * each * (m + layout.pp - 1)
    return term_after_term(shape, layout, global_batch, cluster) + more


def whole_messages(shape, layout, global_batch, cluster):
    found = term_after_term(shape, layout, global_batch, cluster)
    if layout.pp > 1:
        act = 2 * layout.micro_batch * shape.tokens * shape.hidden
        m = global_batch // (layout.dp * layout.micro_batch)
        more = lab.send_s(cluster, layout, act) - lab.send_s(cluster, layout, act / layout.tp)
        found += 2 * more * (m + layout.pp - 1)
    return found


def neighbours(shape, layout, global_batch, cluster):
    found = term_after_term(shape, layout, global_batch, cluster)
    if layout.zero != 3:
        size = 2 * lab.parameters(shape) / (layout.tp * layout.pp)
        found -= lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
        found += lab.all_reduce_s(cluster, layout.dp, 1, size)
    return found


def gradients_each_micro_batch(shape, layout, global_batch, cluster):
    m = global_batch // (layout.dp * layout.micro_batch)
    size = 2 * lab.parameters(shape) / (layout.tp * layout.pp)
    tail = 0 if layout.zero == 3 else lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    return term_after_term(shape, layout, global_batch, cluster) + (m - 1) * tail


def all_gradients(shape, layout, global_batch, cluster):
    size = 2 * lab.parameters(shape)
    found = term_after_term(shape, layout, global_batch, cluster)
    if layout.zero != 3:
        part = size / (layout.tp * layout.pp)
        found -= lab.all_reduce_s(cluster, layout.dp, layout.tp, part)
        found += lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    return found


def nothing_hidden(shape, layout, global_batch, cluster):
    found = term_after_term(shape, layout._replace(zero=0), global_batch, cluster)
    if layout.zero == 3:
        m = global_batch // (layout.dp * layout.micro_batch)
        size = 2 * lab.parameters(shape) / (layout.tp * layout.pp)
        found += (1.5 * m - 1) * lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    return found


def all_hidden(shape, layout, global_batch, cluster):
    if layout.zero != 3:
        return term_after_term(shape, layout, global_batch, cluster)
    m = global_batch // (layout.dp * layout.micro_batch)
    size = 2 * lab.parameters(shape) / (layout.tp * layout.pp)
    travel = 1.5 * lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    plain = layout._replace(zero=0)
    found = term_after_term(shape, plain, global_batch, cluster) - travel / 1.5
    return found + m * 0.15 * travel


def behind_products_alone(shape, layout, global_batch, cluster):
    if layout.zero != 3:
        return term_after_term(shape, layout, global_batch, cluster)
    m = global_batch // (layout.dp * layout.micro_batch)
    whole = lab.flops(shape, layout.micro_batch, checkpointing=layout.checkpointing)
    products = whole / layout.tp / cluster.flops_per_s
    act = 2 * layout.micro_batch * shape.tokens * shape.hidden
    size = 2 * lab.parameters(shape) / layout.tp
    travel = 1.5 * lab.all_reduce_s(cluster, layout.dp, layout.tp, size)
    times = 6 if layout.checkpointing == "full" else 4
    messages = times * shape.layers * lab.all_reduce_s(cluster, layout.tp, 1, act)
    hidden = min(products, travel)
    return m * (products + messages + travel - 0.85 * hidden)


STEP = Answers(
    solves="step_s",
    takes_ranks=False,
    real=True,
    right={
        "term after term": term_after_term,
        "in pieces": in_pieces,
        "by the bubble": by_the_bubble,
    },
    wrong={
        "products alone": (products_alone, "missing: the all-reduces of tp"),
        "no bubble": (no_bubble, "missing: the bubble"),
        "one micro-batch": (batch_ignored, "one after the other"),
        "checkpointing ignored": (of(checkpointing="none"), "that is repeated takes time"),
        "four of six": (four_of_six, "its two all-reduces again"),
        "all layers on each stage": (all_layers_everywhere, "part of the layers' all-reduces"),
        "whole messages": (whole_messages, "a rank of tp sends its part"),
        "dp are neighbours": (neighbours, "tp apart"),
        "gradients in each micro-batch": (gradients_each_micro_batch, "one all-reduce"),
        "all gradients": (all_gradients, "part of the gradients"),
        "ZeRO-3 as no ZeRO": (of(zero=0), "nothing is left to do at the end"),
        "nothing hidden": (nothing_hidden, "hidden"),
        "behind products alone": (behind_products_alone, "tp's"),
        "all hidden": (all_hidden, "the rest counts whole"),
        "labcode's own": (lab.step_s, "labcode's own answer"),
    },
)

# ---- 20.6 the search


def nested_loops(shape, cluster, gpus, global_batch):
    found = []
    for tp in lab.divisors(gpus):
        if tp > cluster.gpus_per_node or shape.kv_heads % tp or shape.ffn % tp:
            continue
        for pp in lab.divisors(gpus // tp):
            dp = gpus // tp // pp
            if shape.layers % pp or global_batch % dp:
                continue
            for micro_batch in lab.divisors(global_batch // dp):
                for zero in lab.stages_of_zero(dp, pp):
                    for checkpointing in ("none", "full"):
                        layout = lab.Layout(dp, pp, tp, zero, micro_batch, checkpointing)
                        needed = lab.memory(shape, layout, global_batch)
                        if needed + lab.RESERVED_BYTES > cluster.memory_bytes:
                            continue
                        seconds = lab.step_s(shape, layout, global_batch, cluster)
                        found.append((seconds, needed, layout))
    found.sort()
    return found


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


def looser(**changes):
    """`nested_loops` for a cluster or a shape with one rule less."""

    def answer(shape, cluster, gpus, global_batch):
        return sorted(_all(shape, cluster, gpus, global_batch, **changes))

    return answer


def _all(shape, cluster, gpus, global_batch, **changes):
    rules = SimpleNamespace(
        node=cluster.gpus_per_node,
        kv_heads=shape.kv_heads,
        layers=shape.layers,
        reserved=lab.RESERVED_BYTES,
        limit=cluster.memory_bytes,
        stages=lab.stages_of_zero,
        micro_batches=lab.divisors,
        kinds=("none", "full"),
    )
    vars(rules).update(changes)
    for tp, pp in product(lab.divisors(gpus), lab.divisors(gpus)):
        if gpus % (tp * pp) or tp > rules.node or rules.kv_heads % tp or rules.layers % pp:
            continue
        dp = gpus // (tp * pp)
        if global_batch % dp or shape.ffn % tp:
            continue
        for b in rules.micro_batches(global_batch // dp):
            for zero, kind in product(rules.stages(dp, pp), rules.kinds):
                layout = lab.Layout(dp, pp, tp, zero, b, kind)
                needed = lab.memory(shape, layout, global_batch)
                if needed + rules.reserved <= rules.limit:
                    step = lab.step_s(shape, layout, global_batch, cluster)
                    yield lab.Found(step, needed, layout)


def time_first(shape, cluster, gpus, global_batch):
    room = cluster.memory_bytes - lab.RESERVED_BYTES
    everything = looser(limit=1e18)(shape, cluster, gpus, global_batch)
    return [entry for entry in everything if entry.memory_bytes <= room]


def mlp_ignored(shape, cluster, gpus, global_batch):
    """Takes the memory and time of the real shape, and the rules of another MLP."""
    found = []
    for entry in _all(replace(shape, ffn=2**14), cluster, gpus, global_batch):
        layout = entry.layout
        needed = lab.memory(shape, layout, global_batch)
        if needed + lab.RESERVED_BYTES <= cluster.memory_bytes:
            found.append((lab.step_s(shape, layout, global_batch, cluster), needed, layout))
    return sorted(found)


def not_sorted(shape, cluster, gpus, global_batch):
    return nested_loops(shape, cluster, gpus, global_batch)[::-1]


def bytes_first(shape, cluster, gpus, global_batch):
    found = nested_loops(shape, cluster, gpus, global_batch)
    return [(entry[1], entry[0], entry[2]) for entry in found]


def layouts_alone(shape, cluster, gpus, global_batch):
    return [entry[2] for entry in nested_loops(shape, cluster, gpus, global_batch)]


def the_best(shape, cluster, gpus, global_batch):
    return nested_loops(shape, cluster, gpus, global_batch)[:1]


def any_stage(dp, pp):
    return (0, 1, 2, 3)


def no_stage(dp, pp):
    return (0,)


def one_at_a_time(number):
    return [1]


def powers(number):
    return [2**power for power in range(12) if number % 2**power == 0]


SEARCH = Answers(
    solves="search",
    takes_ranks=False,
    real=True,
    right={"nested loops": nested_loops, "by product": by_product, "filtered": filtered},
    wrong={
        "tp over nodes": (looser(node=10**6), "must stay in one node"),
        "kv_heads ignored": (looser(kv_heads=2**10 * 3), "divide the key/value heads"),
        "the MLP ignored": (mlp_ignored, "the features of the MLP"),
        "time first": (time_first, "is to be left out before"),
        "uneven stages": (looser(layers=2**10 * 9), "every stage must have"),
        "what is reserved": (looser(reserved=0), "beside what is reserved"),
        "memory ignored": (looser(limit=1e18), "16 GPUs of selene"),
        "every stage of ZeRO": (looser(stages=any_stage), "is not among those"),
        "no ZeRO": (looser(stages=no_stage), "none of yours has zero"),
        "micro-batch 1": (looser(micro_batches=one_at_a_time), "none of yours has micro_batch"),
        "powers of two": (looser(micro_batches=powers), "none of yours has micro_batch"),
        "no checkpointing": (looser(kinds=("none",)), "none of yours has checkpointing"),
        "the slowest first": (not_sorted, "the fastest layout comes first"),
        "bytes first": (bytes_first, "seconds come first"),
        "layouts alone": (layouts_alone, "each entry is (seconds, bytes, layout)"),
        "the best alone": (the_best, "are due"),
        "labcode's own": (lab.search, "labcode's own answer"),
        "no return": (lambda *args: None, "it returned None"),
    },
)

# ---- 20.7 a plan


def defended(layout):
    """The layout with what is true of it."""
    cluster = lab.cluster(l20.TASK["cluster"])
    batch = l20.TASK["global_batch"]
    lost = lab.losses(l20.TASK_SHAPE, layout, batch, cluster)
    limit = max(lost, key=lost.get)
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
    real=True,
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
