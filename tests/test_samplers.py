"""Samplers against their formulas: hash families, buckets, selections, draws, corrections, shards."""

from math import comb

import numpy as np
import pytest
from reference import in_batch_log_q
from synthetic import make_points
from test_reference import LABELS, Case, setting

from dslide import _core
from dslide.config import LshConfig, SamplerConfig
from dslide.evaluation import core_csr
from dslide.samplers import TableSampler, functions_key, make_sampler, make_tables, rebuilds_due

DIM, TABLES = 40, 4000  # one code a table: that many draws of a code
BIN = 8


@pytest.fixture(scope="module")
def pool():
    return _core.Pool(2)


def agreement(pool, a, b, **options):
    """The share of codes in which two vectors agree."""
    x = np.stack([a, b]).astype(np.float32)
    codes = _core.hash_codes(pool, x, 5, k=1, l=TABLES, **options)
    return float((codes[:, 0] == codes[:, 1]).mean())


def near(share, theory):
    """Within four standard deviations of a share of draws that are independent, or nearly so."""
    return abs(share - theory) < 4 * np.sqrt(max(theory * (1 - theory), 1e-3) / TABLES)


def pairs_of_vectors():
    """From nearly the same to unrelated."""
    random = np.random.default_rng(3)
    for mix in (0.1, 0.5, 1.0, 3.0):
        a, noise = random.standard_normal((2, DIM))
        yield a, a + mix * noise


def winner_theory(a, b, there=None):
    """P(the largest of 8 random coordinates is the same), given that one of them is `there` (default: all).

    Coordinate i wins in both where the other 7 come from those that are smaller in both, or not there.
    """
    there = np.ones(len(a), bool) if there is None else there
    wins = 0
    for i in np.flatnonzero(there):
        beaten = ~there | ((a < a[i]) & (b < b[i]))
        wins += comb(int(beaten.sum()), BIN - 1)
    return wins / (comb(len(a), BIN) - comb(int((~there).sum()), BIN))


@pytest.mark.parametrize(("projections", "slack"), [("dense", 0.0), ("sparse", 0.03)])
def test_simhash_agrees_as_often_as_the_angle_says(pool, projections, slack):
    """1 - angle / pi: exact for normal projections (Goemans & Williamson 1995), nearly for sparse ones."""
    for a, b in pairs_of_vectors():
        angle = np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        share = agreement(pool, a, b, family="simhash", projections=projections)
        assert near(share, 1 - angle / np.pi) or abs(share - 1 + angle / np.pi) < slack


@pytest.mark.parametrize("family", ["wta", "dwta"])
def test_winner_take_all_agrees_as_often_as_ranks_do(pool, family):
    for a, b in pairs_of_vectors():
        assert near(agreement(pool, a, b, family=family), winner_theory(a, b))


def test_dwta_borrows_for_empty_bins(pool):
    """Two vectors with values in the same few places: a bin without any takes a code of one that has some."""
    random = np.random.default_rng(4)
    there = np.zeros(DIM, bool)
    there[random.permutation(DIM)[:6]] = True
    a, b = np.where(there, random.standard_normal((2, DIM)), 0)
    share = agreement(pool, a, b, family="dwta")
    assert abs(share - winner_theory(a, b, there)) < 0.05
    assert agreement(pool, a, -a, family="dwta") < 0.9  # where `zeros: values` would find none empty


def test_zeros_as_values_may_win(pool):
    """Of negative values and zeros a zero is the largest."""
    random = np.random.default_rng(5)
    zero = random.permutation(DIM) < DIM // 2
    a, b = np.where(zero, 0, -random.uniform(1, 2, (2, DIM)))
    for family in ("wta", "dwta"):
        values = agreement(pool, a, b, family=family, zeros="values")
        # A bin without zeros: the largest negative value, by chance the same. A bin with one: its first zero.
        no_zero = comb(DIM // 2, BIN) / comb(DIM, BIN)
        assert values > 1 - no_zero - 0.01
        assert near(agreement(pool, a, b, family="dwta"), winner_theory(a, b, ~zero))


def test_doph_agrees_as_often_as_the_sets_overlap(pool):
    """J + (1 - J) / 8 for Jaccard similarity J of the sets of the largest quarter."""
    for a, b in pairs_of_vectors():
        one, two = (set(np.argsort(-v)[: DIM // 4]) for v in (a, b))
        similarity = len(one & two) / len(one | two)
        assert abs(agreement(pool, a, b, family="doph") - similarity - (1 - similarity) / 8) < 0.05


def test_published_packing_is_a_stride_of_two_bits(pool):
    x = np.random.default_rng(6).standard_normal((50, DIM)).astype(np.float32)
    exact = _core.hash_codes(pool, x, 1, family="dwta", k=3, l=7)
    codes = [exact >> 6, exact >> 3 & 7, exact & 7]
    published = _core.hash_codes(pool, x, 1, family="dwta", k=3, l=7, packing="published")
    np.testing.assert_array_equal(published, 16 * codes[0] + 4 * codes[1] + codes[2])


class Layer:
    """An output layer with weights of our choice, and a batch of points on it."""

    def __init__(self, pool, weights, points=24, shard=None):
        self.weights = np.asarray(weights, np.float32)
        self.labels, self.hidden = self.weights.shape
        self.shard = shard or (0, self.labels)
        self.output = _core.OutputLayer(pool, self.labels, *self.shard, self.hidden)
        self.output.weights[:] = self.weights[slice(*self.shard)]
        self.points = make_points(points, 31, self.labels, 7)
        self.batch = _core.Batch(pool, *core_csr(self.points, 31, self.labels))
        self.h = np.random.default_rng(8).standard_normal((points, self.hidden)).astype(np.float32)
        self.at(0)

    def at(self, step):
        self.batch.select(np.arange(len(self.h)), step)

    def own(self):
        """[points, labels], whether a label is the point's own."""
        return np.asarray(self.points.y.todense(), bool)

    def active(self, sampler):
        """[points, labels] of a sampler with a set for every point."""
        found, active = sampler.select(self.batch, self.h), np.zeros((len(self.h), self.labels), bool)
        for row, first, last in zip(
            found["rows"], found["pair_indptr"], found["pair_indptr"][1:], strict=False
        ):
            active[found["pair_points"][first:last], row] = True
        return active


def _hash(pool, x, lsh):
    return _core.hash_codes(pool, x, functions_key(0, 0), family=lsh.family, k=lsh.K, l=lsh.L)


def hits(pool, layer, lsh):
    """[points, labels]: in how many of a point's buckets a label lies, without caps."""
    rows, queries = (_hash(pool, x, lsh) for x in (layer.weights, layer.h))
    return (rows[:, None, :] == queries[:, :, None]).sum(axis=0)


@pytest.fixture(scope="module")
def layer(pool):
    return Layer(pool, np.random.default_rng(9).standard_normal((120, 16)))


def tables(layer, **options):
    defaults = {"K": 2, "L": 12, "bucket_cap": 1000, "min_active": 0, "top_up": 0}
    lsh = LshConfig.model_validate(defaults | options)
    return make_tables(layer.output, lsh, 0), lsh


@pytest.mark.parametrize("family", ["simhash", "dwta", "wta", "doph"])
def test_selections_are_functions_of_the_hits(pool, layer, family):
    own = layer.own()
    for options in ({"selection": "union"}, {"selection": "threshold", "min_hits": 3}):
        sampler, lsh = tables(layer, family=family, **options)
        least = options.get("min_hits", 1)
        np.testing.assert_array_equal(layer.active(sampler), own | (hits(pool, layer, lsh) >= least))
    sampler, lsh = tables(layer, family=family, selection="top-k", beta=7)
    count = np.where(own, 0, hits(pool, layer, lsh))
    expected = own.copy()
    for point in range(len(count)):
        best = np.lexsort((np.arange(layer.labels), -count[point]))[:7]
        expected[point, best[count[point, best] > 0]] = True
    np.testing.assert_array_equal(layer.active(sampler), expected)


def test_vanilla_takes_beta_ids_from_tables_in_random_order(pool, layer):
    sampler, lsh = tables(layer, selection="vanilla", beta=9)
    count = np.where(layer.own(), 0, hits(pool, layer, lsh))
    active = layer.active(sampler) & ~layer.own()
    assert (count[active] > 0).all()
    np.testing.assert_array_equal(active.sum(axis=1), np.minimum(9, (count > 0).sum(axis=1)))
    # One id: the first of the first table that has any, each table being first equally often.
    sampler, lsh = tables(layer, K=4, selection="vanilla", beta=1)
    codes = [_hash(pool, x, lsh) for x in (layer.weights, layer.h)]
    point, draws = 0, 600
    firsts = []
    for t in range(lsh.L):
        there = np.flatnonzero((codes[0][t] == codes[1][t, point]) & ~layer.own()[point])
        firsts += there[:1].tolist()
    expected = np.bincount(firsts, minlength=layer.labels) / len(firsts)
    taken = np.zeros(layer.labels)
    for step in range(draws):
        layer.at(step)
        taken += (layer.active(sampler) & ~layer.own())[point]
    layer.at(0)
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(taken / draws - expected) <= 5 * deviation).all()
    assert len(set(firsts)) > 2


def test_full_buckets_keep_the_last_ids_or_a_uniform_sample(pool):
    """All rows alike, so that one bucket of each table is asked to hold them all."""
    labels, cap, rebuilds = 60, 12, 600
    layer = Layer(pool, np.ones((labels, 16)), points=1)
    layer.h[:] = 1
    free = ~layer.own()[0]
    sampler, _ = tables(layer, L=1, bucket_cap=cap)
    np.testing.assert_array_equal(
        np.flatnonzero(layer.active(sampler)[0] & free), np.arange(48, 60)[free[48:]]
    )
    sampler, _ = tables(layer, L=1, bucket_cap=cap, bucket_policy="reservoir")
    kept = np.zeros(labels)
    for draw in range(rebuilds):
        sampler.rebuild(draw=draw)
        active = layer.active(sampler)[0]
        assert active[free].sum() <= cap
        kept += active
    share = cap / labels
    deviation = np.sqrt(share * (1 - share) / rebuilds)
    assert (np.abs(kept[free] / rebuilds - share) < 4.5 * deviation).all()
    assert (kept[~free] == rebuilds).all()  # a point's own labels need no bucket


def test_top_up_is_uniform_and_only_below_the_bound(pool, layer):
    sampler, lsh = tables(layer, selection="threshold", min_hits=5, min_active=30, top_up=25)
    chosen = layer.own() | (hits(pool, layer, lsh) >= 5)
    sizes = chosen.sum(axis=1)
    expected = np.where(sizes < 30, np.maximum(25, sizes), sizes)
    assert sizes.min() < 25 and sizes.max() > 30
    point, draws = int(sizes.argmin()), 300
    drawn = np.zeros(layer.labels)
    for step in range(draws):
        layer.at(step)
        active = layer.active(sampler)
        np.testing.assert_array_equal(active.sum(axis=1), expected)
        drawn += active[point]
    layer.at(0)
    rest = ~chosen[point]  # ids that were found, but not selected, are as likely as others
    share = (25 - sizes[point]) / rest.sum()
    assert (np.abs(drawn[rest] / draws - share) < 4.5 * np.sqrt(share * (1 - share) / draws)).all()
    assert (drawn[~rest] == draws).all()


@pytest.mark.parametrize("policy", ["fifo", "reservoir"])
@pytest.mark.parametrize("selection", ["union", "vanilla", "top-k", "threshold"])
def test_answers_are_the_same_for_any_number_of_threads(selection, policy):
    answers = []
    for threads in (1, 3):
        layer = Layer(_core.Pool(threads), np.random.default_rng(9).standard_normal((120, 16)))
        sampler, _ = tables(
            layer, selection=selection, bucket_policy=policy, bucket_cap=9, beta=6, min_active=12, top_up=9
        )
        answers.append(layer.active(sampler))
    np.testing.assert_array_equal(*answers)


def test_rebuild_schedules():
    assert [rebuilds_due(s, 100, 1.0) for s in (0, 99, 100, 250, 1000)] == [0, 0, 1, 2, 10]
    # Gaps of 100, 200, 400: rebuilds at 100, 300, 700.
    assert [rebuilds_due(s, 100, 2.0) for s in (0, 99, 100, 299, 300, 699, 700, 1499)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_rebuilds_and_new_functions_happen_when_they_are_due():
    class Tables:
        def __init__(self):
            self.calls = []

        def rebuild(self, draw):
            self.calls.append(draw)

        def new_functions(self, seed):
            self.calls.append("new")

    spy = Tables()
    lsh = LshConfig(rebuild_points=100, rebuild_growth=2, new_functions_points=350)
    sampler = TableSampler(None, spy, lsh, 0)
    for samples in range(0, 800, 50):
        sampler.prepare(samples)
    assert spy.calls == [0, 100, 300, "new", 700]


# Shared sets


def shared_sampler(layer, counts, num_points, batch_size, shard=None, **options):
    config = SamplerConfig.model_validate(options)
    shard = shard or (0, layer.labels)
    return make_sampler(config, layer.output, (layer.labels, *shard), counts, num_points, batch_size, 0).core


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "uniform", "uniform_extras": 40},
        {"kind": "log-uniform", "log_uniform_extras": 40},
        {"kind": "log-uniform", "uniform_extras": 15, "log_uniform_extras": 10},
    ],
    ids=str,
)
def test_draws_have_the_probabilities_that_log_q_subtracts(layer, options):
    counts = np.random.default_rng(10).permutation(layer.labels).astype(np.int64) + 1
    sampler = shared_sampler(layer, counts, 1000, 8, **options)
    drawn, log_q, steps = np.zeros(layer.labels), np.full(layer.labels, np.nan), 1200
    for step in range(steps):
        layer.at(step)
        found = sampler.select(layer.batch, layer.h)
        assert found["shared"] and (np.diff(found["rows"]) > 0).all()
        drawn[found["rows"][found["own_only"] == 0]] += 1
        log_q[found["rows"]] = found["log_q"]
    layer.at(0)
    uniform, ranked = options.get("uniform_extras", 0), options.get("log_uniform_extras", 0)
    rank = np.empty(layer.labels)
    rank[np.argsort(-counts)] = np.arange(layer.labels)
    p = np.log((rank + 2) / (rank + 1)) / np.log(layer.labels + 1)
    assert p.sum() == pytest.approx(1)
    q = 1 - (1 - 1 / layer.labels) ** uniform * (1 - p) ** ranked
    assert (np.abs(drawn / steps - q) < 4.5 * np.sqrt(q * (1 - q) / steps) + 1e-9).all()
    np.testing.assert_allclose(np.exp(log_q), q, rtol=1e-4)


def test_labels_of_a_batch_are_there_as_often_as_log_q_says(pool):
    """The chance that one of the batch's other points has a label, over random batches."""
    labels, n, batch, rounds = 40, 1500, 60, 1500
    points = make_points(n, 31, labels, 11)
    counts = np.bincount(points.y_indices, minlength=labels) // np.arange(1, labels + 1)  # some are rare
    keep = np.zeros(len(points.y_indices), bool)
    for label in range(labels):
        keep[np.flatnonzero(points.y_indices == label)[: max(1, counts[label])]] = True
    indptr = np.concatenate([[0], np.cumsum(keep)])[points.y_indptr].astype(np.int64)
    thinned = _core.Csr(indptr, points.y_indices[keep], None, labels)
    core = _core.Batch(pool, core_csr(points, 31, labels)[0], thinned)
    counts = np.bincount(points.y_indices[keep], minlength=labels).astype(np.int64)
    layer = Layer(pool, np.ones((labels, 4)))
    sampler = shared_sampler(layer, counts, n, batch)
    bare = int(np.flatnonzero(np.diff(indptr) == 0)[0])  # it owns no label: all are its negatives
    random, seen, log_q = np.random.default_rng(12), np.zeros(labels), np.full(labels, np.nan)
    others = np.delete(np.arange(n), bare)
    h = np.zeros((batch, 4), np.float32)
    for step in range(rounds):
        rows = np.concatenate([[bare], random.choice(others, batch - 1, replace=False)])
        core.select(rows.astype(np.int64), step)
        found = sampler.select(core, h)
        seen[found["rows"]] += 1
        log_q[found["rows"]] = found["log_q"]
    q = 1 - (1 - counts / n) ** (batch - 1)
    assert q.min() < 0.2 and q.max() > 0.5
    assert (np.abs(seen / rounds - q) < 4.5 * np.sqrt(q * (1 - q) / rounds) + 0.02).all()
    there = ~np.isnan(log_q)
    np.testing.assert_allclose(
        log_q[there], in_batch_log_q(counts, n, batch, 0, labels)[there], rtol=1e-4, atol=1e-6
    )


def test_proposals_join_the_shared_set_without_a_correction(pool, layer):
    lsh = {"K": 2, "L": 12, "bucket_cap": 1000}
    counts = np.ones(layer.labels, np.int64)
    options = {"lsh_extras": 2, "lsh": lsh, "uniform_extras": 3}
    sampler = shared_sampler(layer, counts, 1000, 24, **options)
    plain = shared_sampler(layer, counts, 1000, 24, uniform_extras=3)
    count = hits(pool, layer, LshConfig.model_validate(lsh))
    best = np.stack([np.lexsort((np.arange(layer.labels), -row))[:2] for row in count])
    proposed = np.unique(best[np.take_along_axis(count, best, 1) > 0])
    one, two = (s.select(layer.batch, layer.h) for s in (sampler, plain))
    np.testing.assert_array_equal(one["rows"], np.union1d(two["rows"], proposed))
    certain = np.isin(one["rows"], proposed)
    assert (one["log_q"][certain] == 0).all() and (one["log_q"][~certain] < 0).all()
    own = np.zeros((len(layer.h), layer.labels), bool)
    own[one["own_points"], one["rows"][one["own_positions"]]] = True
    np.testing.assert_array_equal(own, layer.own())


@pytest.mark.parametrize(
    "options",
    [
        {"uniform_extras": 20},
        {"log_uniform_extras": 20},
        {"kind": "uniform", "uniform_extras": 9, "log_uniform_extras": 9},
        {"kind": "full"},
    ],
    ids=str,
)
def test_shards_together_have_the_one_shards_rows_and_corrections(pool, layer, options):
    """The batch and the draws are global: P ranks see what one sees."""
    counts = np.random.default_rng(13).integers(0, 50, layer.labels)
    whole = shared_sampler(layer, counts, 1000, 24, **options).select(layer.batch, layer.h)
    parts = []
    for shard in ((0, 50), (50, 50), (50, 51), (51, layer.labels)):
        part = shared_sampler(layer, counts, 1000, 24, shard, **options).select(layer.batch, layer.h)
        parts.append({**part, "rows": part["rows"] + shard[0]})
    for key in ("rows", "log_q", "own_only"):
        np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), whole[key])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "uniform", "uniform_extras": 3000},
        {"kind": "log-uniform", "log_uniform_extras": 3000},
        {"kind": "in-batch", "uniform_extras": 3000},
        {"kind": "in-batch", "log_q": False, "lsh_extras": LABELS, "lsh": {"K": 1, "L": 300}},
        {"kind": "lsh", "lsh": {"K": 1, "L": 300, "bucket_cap": LABELS}},
    ],
    ids=str,
)
def test_every_label_sampled_is_the_full_softmax(options):
    """q is 1 then, and the correction nothing."""
    config = setting(activation="relu")
    sampler = SamplerConfig.model_validate(options)
    full = Case(config, "full")
    sampled = Case(config.model_copy(update={"sampler": sampler}), options["kind"])
    if isinstance(sampled.sampler, TableSampler):
        sampled.sampler.refresh(0)
    assert sampled.step(0.05) == pytest.approx(full.step(0.05), rel=1e-5)
    assert sampled.network.output.active_rows == LABELS
    np.testing.assert_allclose(sampled.weights()["U"], full.weights()["U"], rtol=1e-3, atol=1e-5)


def test_own_labels_are_never_corrected():
    """A uniform set that draws next to nothing: a point's loss is that of its own labels alone."""
    config = setting(activation="relu")
    sampler = SamplerConfig.model_validate({"kind": "uniform", "uniform_extras": 1})
    case = Case(config.model_copy(update={"sampler": sampler}), "uniform")
    found = case.sampler.core.select(case.batch, np.zeros((len(case.rows), 1), np.float32))
    drawn = found["rows"][found["own_only"] == 0]
    case.reference.log_q = np.full(LABELS, np.log(1 / LABELS))
    active = case.y > 0
    active[:, drawn] = True
    expected = case.reference.gradients(case.x, case.y, active).loss
    assert case.step(0.05) == pytest.approx(expected, rel=1e-5)
