"""Answers to the exercises of lesson 22: short sums, small blocks, four bits."""

import torch
from answers import Answers, changed

from course.labs import l22_four_bits as lab

# ---- 22.1 cut off where the largest one ends


def by_log(terms, fraction_bits):
    """The exponent by way of a division that is exact."""
    largest = terms.abs().max(dim=-1, keepdim=True).values
    exponent = torch.floor(torch.log2(largest.clamp(min=1e-300)))
    exponent = torch.where(2**exponent > largest, exponent - 1, exponent)
    unit = 2.0 ** (exponent - fraction_bits)
    whole = (terms / unit).trunc()
    return (whole * unit).sum(-1)


def with_remainders(terms, fraction_bits):
    """What hangs over is taken away."""
    _, n = terms.abs().amax(-1, keepdim=True).frexp()
    unit = 2.0 ** (n - 1 - fraction_bits).double()
    return (terms - torch.fmod(terms, unit)).sum(-1)


def row_by_row(terms, fraction_bits):
    rows = terms.reshape(-1, terms.shape[-1])
    sums = []
    for row in rows:
        _, n = torch.frexp(row.abs().max())
        unit = 2.0 ** (int(n) - 1 - fraction_bits)
        sums.append((torch.trunc(row / unit) * unit).sum())
    return torch.stack(sums).view(terms.shape[:-1])


LARGEST = "largest = terms.abs().amax(-1, keepdim=True)"

ALIGNED = Answers(
    solves="add_aligned",
    takes_ranks=False,
    right={"log2": by_log, "remainders": with_remainders, "row by row": row_by_row},
    wrong={
        "each its own end": (changed(f"{LARGEST} => largest = terms.abs()"), "at its own end"),
        "one end for all": (changed(f"{LARGEST} => largest = terms.abs().max()"), "which row"),
        "no abs": (changed("terms.abs().amax => terms.amax"), "negative number can be the largest"),
        "rounded": (changed("torch.trunc => torch.round"), "cut off, not rounded"),
        "floor": (changed("torch.trunc => torch.floor"), "towards zero as well"),
        "a bit too few": (changed("n - 1 - fraction_bits => n - fraction_bits"), "too few"),
        "a bit too many": (changed("n - 1 - f => n - 2 - f"), "too many"),
        "nothing is cut": (lambda terms, bits: terms.sum(-1), "nothing was cut off"),
        "in place": (
            changed("torch.trunc(terms / unit) * unit => terms.div_(unit)"),
            "has changed",
        ),
        "no sum": (changed(".sum(-1) => "), "shape"),
    },
)

# ---- 22.2 the product in pieces


def by_pieces(a, b, piece=None):
    """An outer loop over pieces."""
    a, b = a.double(), b.double()
    length = a.shape[1]
    piece = piece or length
    total = 0
    for left in range(0, length, piece):
        running = torch.zeros(len(a), len(b), dtype=torch.float64)
        for start in range(left, min(left + piece, length), 32):
            chunk = slice(start, start + 32)
            products = torch.einsum("mk,nk->mnk", a[:, chunk], b[:, chunk])
            terms = torch.cat([products, running.unsqueeze(-1)], -1)
            running = lab.add_aligned(terms, 13)
        total = total + running
    return total


def with_a_list(a, b, piece=None):
    """The sums that have ended are kept in a list."""
    running = torch.zeros(len(a), len(b)).double()
    ended = []
    count = 0
    for own, other in zip(a.double().split(32, 1), b.double().split(32, 1)):
        terms = torch.cat([running[..., None], own[:, None] * other[None]], -1)
        running = lab.add_aligned(terms, 13)
        count += 32
        if count == piece:
            ended.append(running)
            running = torch.zeros_like(running)
            count = 0
    return sum(ended, running)


def row_after_row(a, b, piece=None):
    rows = [by_pieces(a[i : i + 1], b, piece) for i in range(len(a))]
    return torch.cat(rows)


MOVE = "total += running\n            running = torch.zeros_like(total)"

PIECES = Answers(
    solves="short_product",
    takes_ranks=False,
    right={"pieces": by_pieces, "a list": with_a_list, "rows": row_after_row},
    wrong={
        "a plain product": (lambda a, b, piece=None: a.double() @ b.double().T, "nothing is lost"),
        "never moved": (changed(f"{MOVE} => pass"), "never moved"),
        "the sum outside": (
            changed(
                "torch.cat([running[..., None], products], dim=-1) => products",
                "running = lab.add_aligned(terms, 13) => running += lab.add_aligned(terms, 13)",
            ),
            "added outside of add_aligned",
        ),
        "not set back": (changed(f"{MOVE} => total += running"), "0 after it was moved"),
        "the last piece": (
            changed("return total + running => return total"),
            "still has something",
        ),
        "only whole pieces": (
            changed(
                "a, b = a.double(), b.double() => "
                "n = a.shape[1] // (piece or 32) * (piece or 32)\n"
                "    a, b = a[:, :n].double(), b[:, :n].double()"
            ),
            "when the loop ends",
        ),
        "float32": (
            changed("return total + running => return (total + running).float()"),
            "expected is float64",
        ),
        "only the last piece": (
            changed("return total + running => return running"),
            "still has something",
        ),
        "no result": (changed("return total + running => pass"), "None"),
    },
)

# ---- 22.3 quantise by tiles


def with_view(x, rows, columns):
    x = x.float()
    height, width = x.shape
    view = x.reshape(height // rows, rows, width // columns, columns)
    amax = view.abs().amax(dim=3).amax(dim=1)
    scale = 448 / torch.where(amax == 0, torch.full_like(amax, 448.0), amax)
    scaled = view * scale[:, None, :, None]
    return scaled.reshape(height, width).to(torch.float8_e4m3fn), scale


def with_loops(x, rows, columns):
    scale = torch.ones(x.shape[0] // rows, x.shape[1] // columns)
    q = torch.zeros(x.shape).to(torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            amax = x[place].float().abs().max()
            if amax > 0:
                scale[i, j] = 448 / amax
            q[place] = (x[place].float() * scale[i, j]).to(torch.float8_e4m3fn)
    return q, scale


def with_pooling(x, rows, columns):
    x = x.float()
    pooled = torch.nn.functional.max_pool2d(x.abs()[None, None], (rows, columns))[0, 0]
    scale = torch.where(pooled > 0, 448 / pooled, 1.0)
    whole = torch.kron(scale, torch.ones(rows, columns))
    return (x * whole).to(torch.float8_e4m3fn), scale


AMAX = "amax((1, 3), keepdim=True)"

TILES = Answers(
    solves="quantize_tiles",
    takes_ranks=False,
    right={"view": with_view, "loops": with_loops, "pooling": with_pooling},
    wrong={
        "one scale": (
            changed(
                "amax = tiles.abs() => amax = 0 * tiles.abs().amax((1, 3), keepdim=True) + x"
                ".float().abs().max() # "
            ),
            "all tiles have the same scale",
        ),
        "the way back": (changed("448 / amax => amax / 448"), "the way back"),
        "no abs": (changed("tiles.abs() => tiles"), "negative number"),
        "zeros": (changed("torch.where(amax > 0, 448 / amax, 1.0) => 448 / amax"), "zeros"),
        "to 1": (changed("448 / amax, 1.0 => 1 / amax, 1.0"), "becomes 1"),
        "not scaled": (changed("(tiles * scale) => tiles"), "its own tile"),
        "float": (changed(".to(torch.float8_e4m3fn) => "), "float8_e4m3fn"),
        "e5m2": (changed("float8_e4m3fn => float8_e5m2"), "float8_e4m3fn"),
        "four dims": (changed("scale[:, 0, :, 0] => scale"), "shape"),
    },
)

# ---- 22.4 the cast by chance


def with_a_table(x, chance):
    """Neighbours are looked up."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    size = x.abs().clamp(max=6.0)
    place = torch.searchsorted(table, size.contiguous(), right=True).clamp(max=7)
    below, above = table[place - 1], table[place]
    share = (size - below) / (above - below)
    return torch.sign(x) * torch.where(chance < share, above, below)


def by_adding(x, chance):
    """floor(steps + chance), on numbers with their sign."""
    x = x.clamp(-6, 6)
    _, n = torch.frexp(x)
    spacing = torch.ldexp(torch.ones_like(x), (n - 1).clamp(min=0) - 1)
    return torch.floor(x / spacing + chance.clamp(max=1 - 2**-20)) * spacing


def the_other_end(x, chance):
    """Up if the chance is large."""
    size = x.abs()
    spacing = torch.full_like(size, 0.5)
    spacing[size >= 2] = 1.0
    spacing[size >= 4] = 2.0
    steps = size / spacing
    up = chance > 1 - (steps - steps.floor())
    return x.sign() * ((steps.floor() + up) * spacing).clamp(max=6)


SPACING = "spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))"
UP = "goes_up = chance < steps - below"

CHANCE = Answers(
    solves="to_e2m1",
    takes_ranks=False,
    right={"a table": with_a_table, "by adding": by_adding, "the other end": the_other_end},
    wrong={
        "to nearest": (changed(f"{UP} => goes_up = steps - below > 0.5"), "whatever the chance"),
        "the farther one": (changed("chance < steps => chance > steps"), "more probable"),
        "a half": (changed("chance < steps - below => chance < 0.5"), "0.1"),
        "one spacing": (
            changed(f"{SPACING} => spacing = torch.full_like(size, 0.5)"),
            "neighbours",
        ),
        "too wide": (changed(f"{SPACING} => spacing = torch.ones_like(size)"), "neighbours"),
        "no end": (changed(".clamp(max=6.0) => "), "saturates"),
        "no sign": (
            changed("torch.copysign(rounded.clamp(max=6.0), x) => rounded.clamp(max=6.0)"),
            "other sign",
        ),
        "own chance": (
            changed("chance < => torch.rand(size.shape) <"),
            "no others are drawn",
        ),
        "one chance": (changed("chance < => chance.flatten()[0] <"), "whatever the chance"),
        "in place": (changed("size = x.abs() => size = x.abs_()"), "other sign"),
    },
)

# ---- 22.5 the random Hadamard transform


def with_kron(x, signs):
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    matrix = two
    for _ in range(3):
        matrix = torch.kron(two, matrix)
    blocks = x.reshape(-1, 16)
    return ((blocks * signs) @ matrix).reshape(x.shape)


def by_butterflies(x, signs):
    """The fast transform: sums and differences, four times."""
    y = x.unflatten(-1, (-1, 16)) * signs
    for k in range(4):
        pairs = y.unflatten(-1, (-1, 2, 2**k))
        above, below = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([above + below, above - below], -2).flatten(-3)
    return (y / 4).flatten(-2)


def by_bits(x, signs):
    """The sign of an entry is the parity of the bits that both places share."""
    q = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    q = torch.diag(signs) @ q / 16**0.5
    return torch.cat([part @ q for part in x.split(16, -1)], -1)


HADAMARD = Answers(
    solves="hadamard",
    takes_ranks=False,
    right={"kron": with_kron, "butterflies": by_butterflies, "bits": by_bits},
    wrong={
        "not divided": (changed("h / 4 => h"), "4 times too long"),
        "by 16": (changed("h / 4 => h / 16"), "4 times too short"),
        "no signs": (changed(" * signs => "), "signs are not used"),
        "signs after": (
            changed(" * signs => ", "(blocks @ (h / 4)) => (blocks @ (h / 4) * signs)"),
            "before the rotation",
        ),
        "no minus": (changed("[h, -h] => [h, h]"), "length"),
        "another order": (changed("[h, -h] => [-h, h]"), "made of"),
        "in place": (
            changed("x.unflatten(-1, (-1, 16)) * signs => x.unflatten(-1, (-1, 16)).mul_(signs)"),
            "has changed",
        ),
        "blocks": (changed(".flatten(-2) => "), "shape"),
    },
)

# ---- 22.6 the three products


def with_contiguous(x, w, dy, quantize, rotate):
    of_tokens = [rotate(one.T.contiguous()) for one in (dy, x)]
    w4 = quantize(w, square=True)
    dw = quantize(of_tokens[0], stochastic=True).matmul(quantize(of_tokens[1]).T)
    return quantize(x).matmul(w4.T), quantize(dy, stochastic=True).matmul(w4), dw


def from_the_transpose(x, w, dy, quantize, rotate):
    """The squares of the transpose are the same numbers."""
    w4 = quantize(w.T.contiguous(), square=True).T
    y = torch.einsum("th,fh->tf", quantize(x), w4)
    dx = torch.einsum("tf,fh->th", quantize(dy, stochastic=True), w4)
    dw = quantize(rotate(dy.T), stochastic=True) @ quantize(rotate(x.T)).T
    return [y, dx, dw]


def the_other_way_round(x, w, dy, quantize, rotate):
    """dW as the transpose of xᵀ dy."""
    weight = quantize(w, square=True)
    x_rotated = quantize(rotate(x.T), stochastic=False)
    dy_rotated = quantize(rotate(dy.T), stochastic=True)
    dw = (x_rotated @ dy_rotated.T).T
    return (weight @ quantize(x).T).T, quantize(dy, stochastic=True) @ weight, dw


GRADIENT = "of_gradient = quantize(rotate(dy.T), stochastic=True)"
INPUT = "of_input = quantize(rotate(x.T))"

PRODUCTS = Answers(
    solves="products",
    takes_ranks=False,
    right={
        "contiguous": with_contiguous,
        "from the transpose": from_the_transpose,
        "the other way round": the_other_way_round,
    },
    wrong={
        "plain": (
            lambda x, w, dy, quantize, rotate: (x @ w.T, dy @ w, dy.T @ x),
            "none of its operands",
        ),
        "rows for the weight": (changed("(w, square=True) => (w)"), "one scale for a square"),
        "nearest everywhere": (changed(", stochastic=True => "), "in both of its products"),
        "chance once": (
            changed(f"{GRADIENT} => of_gradient = quantize(rotate(dy.T))"),
            "one of its two products",
        ),
        "chance for x": (
            changed("y = quantize(x) => y = quantize(x, stochastic=True)"),
            "only gradients",
        ),
        "no rotation": (
            changed("rotate(dy.T) => dy.T", "rotate(x.T) => x.T"),
            "neither operand is rotated before",
        ),
        "rotated before the transpose": (
            changed("rotate(dy.T) => rotate(dy).T", "rotate(x.T) => rotate(x).T"),
            "transpose first",
        ),
        "squares for the gradient": (
            changed("quantize(dy, stochastic=True) => quantize(dy, stochastic=True, square=True)"),
            "only the weight has them",
        ),
        "half a rotation": (changed("rotate(x.T) => x.T"), "only dy is rotated"),
        "transposed afterwards": (
            changed(
                f"{GRADIENT} => of_gradient = quantize(dy, stochastic=True).T",
                f"{INPUT} => of_input = quantize(x).T",
            ),
            "runs over the tokens",
        ),
        "rotated after the cast": (
            changed(
                f"{GRADIENT} => of_gradient = rotate(quantize(dy.T, stochastic=True))",
                f"{INPUT} => of_input = rotate(quantize(x.T))",
            ),
            "rotated before its cast",
        ),
        "rotated along the features": (
            changed(
                f"{GRADIENT} => of_gradient = quantize(rotate(dy), stochastic=True).T",
                f"{INPUT} => of_input = quantize(rotate(x)).T",
            ),
            "along the features",
        ),
    },
)

ANSWERS = {
    "22.1": ALIGNED,
    "22.2": PIECES,
    "22.3": TILES,
    "22.4": CHANCE,
    "22.5": HADAMARD,
    "22.6": PRODUCTS,
}
