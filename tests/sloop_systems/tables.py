"""Answers of every solver to problems drawn from seeds, and of in-network inference to the test vectors.

Each function of `TABLES` returns the answers to one table of problems, in order. They are no tests of what is right:
those stand beside each solver.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, Final

import numpy as np

from sloop.profile.interference import BandwidthLaw, DeviceDemand
from sloop.profile.pairs import BlockCosts
from sloop.solvers import (
    biscale,
    bodies,
    budget,
    flashpoint,
    forecasting,
    frontier,
    harbor,
    highs,
    mixed,
    queueing,
    sponge,
    starts,
)
from sloop.solvers import contents as shared_contents
from sloop.solvers.budget import IndexedPath, Segment, StageOptions
from sloop_systems.asyfunc import solver as asyfunc
from sloop_systems.colocation import igniter, milp, usher
from sloop_systems.colocation.experiments.router import SERVING
from sloop_systems.colocation.experiments.scene import LANGUAGE_MIX, MIXED, VISION, models_of, placed_models
from sloop_systems.colocation.published import IGNITER_V100, IGNITER_V100_MODELS
from sloop_systems.fa2 import solver as fa2
from sloop_systems.ipa import label_setting, lstm
from sloop_systems.ipa import milp as ipa_milp
from sloop_systems.ipa import solver as ipa
from sloop_systems.netnn.emulator import Emulator, run_in_lanes
from sloop_systems.netnn.experiments.offline import flow_model, inputs, small_model
from sloop_systems.netnn.mapper import Fabric, place
from sloop_systems.netnn.network import FloatNetwork
from sloop_systems.netnn.program import compile_network
from sloop_systems.netnn.quantiser import quantise
from sloop_systems.paldia import solver as paldia
from tests.sloop_systems.ipa.scene import drawn, fan, large

Answers = list[Any]


def latencies_ms(random: Random, batch_max: int) -> tuple[float, ...]:
    """By batch from 1: a fixed part and a part in proportion, with a slight curve."""
    alone, fixed, curve = random.uniform(10, 200), random.uniform(0.1, 0.7), random.uniform(0, 0.01)
    return tuple(alone * (fixed + (1 - fixed) * batch + curve * batch * batch) for batch in range(1, batch_max + 1))


def grid_ms(random: Random, cores_max: int, batch_max: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Latencies by cores and batch, from 1 each."""
    parallel = random.uniform(0.6, 0.98)
    alone = latencies_ms(random, batch_max)
    return np.array([[each * (1 - parallel + parallel / cores) for each in alone] for cores in range(1, cores_max + 1)])


def paths_of(random: Random, stages: int, alone_ms: Sequence[float]) -> list[IndexedPath]:
    """A tree of stages, or one with stages that meet: a path to each leaf, with one to five times the time it needs."""
    before = [random.randrange(stage) for stage in range(1, stages)]
    chains = []
    for leaf in sorted(set(range(stages)) - set(before)):
        chain = [leaf]
        while chain[-1]:
            chain.append(before[chain[-1] - 1])
        chains.append(tuple(reversed(chain)))
    if random.random() < 0.5 and len(chains) > 1:
        chains = [(*chain, stages - 1) if chain[-1] != stages - 1 else chain for chain in chains]
    return [IndexedPath(chain, random.uniform(1, 5) * sum(alone_ms[at] for at in chain)) for chain in chains]


def fa2_problem(seed: int) -> tuple[list[fa2.Fa2Stage], list[IndexedPath]]:
    """Two to six stages."""
    random = Random(seed)
    costs = [latencies_ms(random, 8) for _ in range(random.randint(2, 6))]
    stages = [fa2.Fa2Stage(f"s{at}", random.uniform(1, 40), own) for at, own in enumerate(costs)]
    return stages, paths_of(random, len(stages), [own[0] for own in costs])


def fa2_answers() -> Answers:
    """Every mode and every baseline."""
    found: Answers = []
    for seed in range(30):
        stages, paths = fa2_problem(seed)
        found += [fa2.solve(stages, paths, mode=mode, polish=seed % 2 == 0) for mode in ("tree", "paper")]
        found += [fa2.largest_share(stages, paths, replicas_max=6), fa2.ds2(stages), fa2.inferline(stages, paths)]
        found += [fa2.inferline_full(stages, paths), fa2.grandslam(stages, paths, [2] * len(stages))]
        if seed < 10:
            found.append(fa2.solve(stages, paths, mode="milp"))
        own_ms, rate_rps = stages[0].latency_ms, stages[0].rate_rps
        limits = {"network_ms_max": 40.0, "limit_ms": 900.0, "slo_ms": 1000.0}
        found.append(fa2.fa2_single(own_ms, rate_rps, **limits, replicas_max=16))
    return found


def sponge_answers() -> Answers:
    """The setting by each criterion."""
    found: Answers = []
    for seed in range(60):
        random = Random(seed)
        grid = sponge.SpongeGrid(tuple(map(float, range(1, 17))), grid_ms(random, 16, 16))
        count, rate_rps, way_ms = random.randint(0, 60), random.uniform(1, 80), random.uniform(0, 400)
        budgets_ms = np.sort(np.array([random.uniform(100, 1200) for _ in range(count)]))
        for holds in (
            sponge.holds_burst(grid, count, way_ms, 1000.0),
            sponge.holds_per_batch(grid, budgets_ms),
            sponge.holds_steady(grid, rate_rps, way_ms, 1000.0) & sponge.keeps_up(grid, rate_rps),
        ):
            found.append(sponge.cheapest(grid, holds))
        found += [sponge.best_effort(grid, budgets_ms, rate_rps), sponge.startable(grid, 500.0)]
        found.append(sponge.max_rate_rps(grid))
    return found


def biscale_answers() -> Answers:
    """All programs, by both rules of throughput."""
    found: Answers = []
    for seed in range(24):
        random = Random(seed)
        stages = [biscale.BiscaleStage(np.maximum(1.0, grid_ms(random, 8, 8))) for _ in range(random.randint(1, 4))]
        slo_ms = int(random.uniform(1.2, 4) * sum(float(own.latency_ms[0, 0]) for own in stages))
        for throughput in ("pure", "with_queue"):
            problem = biscale.chain(stages, slo_ms, throughput=throughput, cores_total=60)
            for rate_rps in (0.0, 3.0, 17.5, 60.0):
                horizontal = problem.horizontal(rate_rps)
                found.append(horizontal)
                if horizontal is not None:
                    counts = [own.replicas for own in horizontal]
                    found += [problem.vertical(2 * rate_rps, counts), problem.split(3 * rate_rps, counts)]
                    found += [problem.enlarged(horizontal), problem.carries(rate_rps, [(2, 2)] * len(stages))]
                    present = [biscale.StageReplicas((1, 2), (4,)) for _ in stages]
                    found += [biscale.replicas_carry(problem, rate_rps, present)]
                    found.append(biscale.small_first(problem, rate_rps, present, horizontal))
            if problem.horizontal(0) is not None:
                found.append(problem.horizontal_within_cores(900.0))
    return found


def budget_answers() -> Answers:
    """Options within budgets, on trees and on graphs."""
    found: Answers = []
    for seed in range(40):
        random = Random(seed)
        count = random.randint(1, 6)
        options = [
            StageOptions(
                np.array([random.randint(0, 9) for _ in range(4)]), np.array([random.randint(0, 12) for _ in range(4)])
            )
            for _ in range(count)
        ]
        paths = paths_of(random, count, [6.0] * count)
        segments = [Segment(path.stages, int(path.slo_ms)) for path in paths]
        found += [budget.forests(paths, [1.0] * count, ties) for ties in ("first", "loosest", "best")]
        found.append(budget.cheapest_by_forests(options, paths, [1.0] * count))
        if all(each.stages == path.stages for each, path in zip(segments, paths, strict=True)) and is_tree(segments):
            tree = budget.cheapest_tree(options, segments)
            found.append(tree)
            if tree is not None:
                found.append(budget.improved(options, budget.segment_matrix(segments, count), tree))
        if seed < 15:
            found.append(budget.cheapest_by_milp(options, segments))
    return found


def is_tree(segments: Sequence[Segment]) -> bool:
    """Whether each stage has at most one before it."""
    before: dict[int, set[int]] = {}
    for segment in segments:
        for one, other in pairwise(segment.stages):
            before.setdefault(other, set()).add(one)
    return all(len(own) == 1 for own in before.values())


def ipa_answers() -> Answers:
    """Label setting on chains and graphs, the linear program, and what to do if nothing is feasible."""
    found: Answers = []
    for seed in range(40):
        stages, goal = drawn(seed, coarse=seed % 2 == 0, paths=seed % 3 == 0)
        solved = label_setting.solve(stages, goal)
        found += [solved.solution, solved.gave_up, label_setting.best_effort(stages, goal)]
        found.append([ipa.pareto_options(ipa.options_of(stage)) for stage in stages])
        if seed % 4 == 1:
            found.append(ipa_milp.solve(stages, goal))
    found += [label_setting.solve(*large(seed, 30.0)).solution for seed in range(2)]
    found += [label_setting.solve(*fan(seed)).solution for seed in range(2)]
    names = ["a", "b", "c"]
    for measure in ("pas", "pas_rank", "norm_prod"):
        found.append(ipa.scores(measure, (0.5, 0.7, 0.9), (1.0, 2.0, 8.0), names))
    sizes = [ipa.VariantSizes(lambda batch, cores, base=base: base * batch / cores, (1, 2, 4, 8)) for base in (50, 400)]  # type: ignore[misc]
    found.append(ipa.base_allocation(sizes, threshold_rps=5.0, batch_max=8))
    return found


def colocation_answers() -> Answers:
    """The most goodput of the thesis' models, by each metric."""
    found: Answers = []
    for metric in ("peak_occupancy", "occupancy", "sm_use"):
        for names, rate_rps, slo_ms in ((VISION, 500, 200), (MIXED, 300, 300), (LANGUAGE_MIX, 400, 250)):
            models = models_of(names, rate_rps, slo_ms, metric)
            for devices in (1, 3, 5):
                placed = milp.most_goodput(models, devices)
                found += [placed, milp.planned_rates(models, placed.contents)]
    found.append(shared_contents.possible_contents([each.options[:3] for each in models]))
    found.append(shared_contents.relabelled([["a", "b"], ["c"], ["a"]], [["c"], ["a", "b"], ["b"]]))
    found += [milp.mean_batch(8, rate_rps, 100.0, timer=timer) for rate_rps in (3, 90) for timer in (True, False)]
    return found


def usher_answers() -> Answers:
    """Groups and placements."""
    found: Answers = []
    for metric in ("peak_occupancy", "occupancy"):
        for names, rate_rps, slo_ms in ((VISION, 500, 200), (MIXED, 300, 300), (LANGUAGE_MIX, 400, 250)):
            models = models_of(names, rate_rps, slo_ms, metric)
            found.append(usher.grouped(models))
            found += [usher.plan(models, devices) for devices in (1, 2, 4, 6)]
    return found


def igniter_answers() -> Answers:
    """Shares of devices by the public coefficients."""
    found: Answers = []
    for seed in range(20):
        random = Random(seed)
        workloads = [
            igniter.IgniterWorkload(name, model, random.uniform(50, 900), random.uniform(15, 200))
            for name, model in sorted(IGNITER_V100_MODELS.items())
        ]
        for check_new in (True, False):
            planned = igniter.plan(IGNITER_V100, workloads, check_new=check_new)
            found.append([[(each.workload.name, each.batch, each.share) for each in own] for own in planned])
    return found


def harbor_answers() -> Answers:
    """Placements on owned and rented devices of one kind and of two, and least changes."""
    found: Answers = []
    for names, rate_rps, slo_ms in ((VISION, 500.0, 200.0), (MIXED, 300.0, 300.0), (LANGUAGE_MIX, 400.0, 250.0)):
        models = placed_models(names, rate_rps, slo_ms)
        for kind in (
            harbor.DeviceKind("V100", 3),
            harbor.DeviceKind("V100", 1, rentable=4, usd_per_h=2.5),
        ):
            problem = harbor.HarborProblem(models, (kind,), SERVING)
            placed = harbor.place(problem)
            found += [placed, harbor.replaced(problem, placed.contents[:1], gain=0.02)]
    model = models[0]
    for option in model.options[0]:
        found.append([SERVING.in_time_rps(model, 0, option, replicas) for replicas in (1, 2, 3)])
    return found


def mixed_answers() -> Answers:
    """The cheapest mixes, the largest share, and parts of deadlines."""
    found: Answers = []
    for seed in range(60):
        random = Random(seed)
        pools = [mixed.MixNodes(random.randint(0, 3), random.randint(0, 4), random.uniform(0.2, 3)) for _ in range(2)]
        stages = [
            mixed.MixStage(
                random.uniform(0, 120),
                tuple(
                    mixed.MixOption(
                        random.uniform(5, 60), random.uniform(0.1, 2), random.randint(1, 8), random.randint(0, 2), pool,
                        random.choice((0.25, 0.5, 1.0)),
                    )
                    for pool in (0, 1)
                ),
            )
            for _ in range(random.randint(1, 3))
        ]  # fmt: skip
        found += [mixed.cheapest(stages, pools, start=0.1), mixed.largest_share(stages, pools)]
        timed = [
            mixed.TimedCosts(np.array([random.uniform(5, 90) for _ in range(5)]), np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
            for _ in range(4)
        ]
        found.append(mixed.deadline_parts(timed, paths_of(random, 4, [60.0] * 4)))
    return found


def paldia_answers() -> Answers:
    """Splits between waiting and running together, and choices of hardware."""
    found: Answers = []
    for seed in range(40):
        random = Random(seed)
        demand = DeviceDemand(bandwidth=random.uniform(0.1, 0.9))
        model = paldia.DeviceModel((0.0, *latencies_ms(random, 16)), BandwidthLaw(random.uniform(0, 0.8)), demand)
        count = random.randint(1, 300)
        for sharing in ("hybrid", "together", "queue", "resident"):
            split = paldia.best_split(model, count, sharing)
            found += [split, paldia.workers_needed(model, count, split)]
        found.append(paldia.executed_ms(model, paldia.batches_of(count // 2, 16), paldia.batches_of(count, 16), 8))
        offers = [
            paldia.HardwareOffer(f"kind-{at}", random.uniform(0.1, 3), random.uniform(50, 400), random.random(), at > 2)
            for at in range(6)
        ]
        limits = {"cpu_limit_ms": 150.0, "gpu_limit_ms": 250.0, "tolerance_ms": 50.0}
        found += [paldia.choose_hardware(offers, choice, **limits) for choice in ("slo_first", "tolerance", "fastest")]
    return found


def block_costs(seed: int) -> BlockCosts:
    """A model of twelve blocks, with a body of four cores and a shadow of eight."""
    random = Random(seed)
    alone = [latencies_ms(random, 8) for _ in range(12)]
    body = np.array([(0.0, *(each / 4 for each in own)) for own in alone])
    shadow = np.array([(0.0, *(each / 7 for each in own)) for own in alone])
    sizes = tuple(random.uniform(1e5, 4e7) for _ in alone)
    compute = tuple(random.uniform(1, 100) for _ in alone)
    crossing = tuple(random.uniform(1e3, 3e5) for _ in range(13))
    return BlockCosts(body, shadow, sizes, compute, crossing, 4.0, 8.0, float(body.sum(axis=0)[-1]))


def asyfunc_answers() -> Answers:
    """Shadows by each objective, bodies, and batches chosen beforehand."""
    found: Answers = []
    for seed in range(20):
        costs = block_costs(seed)
        random = Random(seed)
        order = sorted(range(12), key=lambda at: costs.size_bytes[at] / costs.compute[at])
        candidates = bodies.shadow_candidates(costs, order)
        found.append(
            [(each.shared.blocks, each.batch, each.split, each.load_ms, each.booked_rps) for each in candidates]
        )
        for objective in ("literal", "printed", "demand"):
            chosen = bodies.choose_shadow(candidates, 50.0, objective, need_rps=random.uniform(0, 9))
            found.append(chosen and (chosen.shared.blocks, chosen.batch))
        table = np.zeros((17, 9))
        table[1:, 1:] = grid_ms(random, 16, 8)
        for rate_rps in (2.0, 30.0):
            slo_ms = 2.5 * float(table[8, 4])
            found.append(bodies.choose_body(table, rate_rps, slo_ms, random.uniform(1, 200)))
            found.append(asyfunc.choose_batching(table, rate_rps, slo_ms, step_ms=50.0))
        found.append(bodies.rank_correlation(costs.size_bytes, costs.compute))
        found.append(bodies.size_share(costs.compute, costs.size_bytes, order, 0.8))
    return found


def piece_costs(seed: int) -> flashpoint.PieceCosts:
    """A model of fourteen layers."""
    random = Random(seed)
    cold, execution = ([random.lognormvariate(0, 0.7) for _ in range(14)] for _ in range(2))
    whole = sum(cold)
    shares, moves = tuple(each / whole for each in cold), tuple(0.1 * random.random() for _ in range(13))
    return flashpoint.PieceCosts(shares, tuple(execution), moves)


DOWNLOADS: Final = flashpoint.PieceDownloads(0.4, 6.0, 4.0, 4.0, 2, 4, is_chain=True, is_shared=True)


def flashpoint_answers() -> Answers:
    """Cuts of models, by the exact solver and by those of others."""
    found: Answers = []
    for seed in range(8):
        costs = piece_costs(seed)
        fronts = flashpoint.plan_fronts(costs)
        found.append(fronts)
        for requests in (1, 7, 60, 400):
            for devices in (2, 5, 12):
                found.append(flashpoint.best_plan(fronts, requests, devices, starts=DOWNLOADS))
                found.append(flashpoint.best_plan(fronts, requests, devices, pieces_max=3, shared_download_s=2.0))
        found += [flashpoint.even_plan(costs, pieces) for pieces in (2, 4)]
        sizes = [each * 1e9 for each in costs.cold_s]
        found += [flashpoint.fewest_pieces(sizes, costs.transfer_s, 3e8), flashpoint.filled_pieces(sizes, 3e8)]
        found.append(flashpoint.coarse_fronts(costs, 4))
    return found


def starts_answers() -> Answers:
    """Whether to start in parts."""
    found: Answers = []
    for seed in range(8):
        random, costs = Random(seed), piece_costs(seed)
        columns = starts.PlanColumns.of(flashpoint.plan_fronts(costs, 5))
        for requests in (1, 20, 300):
            whole_s = sorted(random.uniform(0.5, 12) for _ in range(6))
            found.append(starts.choose_parts(whole_s, columns, DOWNLOADS, costs.exec_whole_s, requests, 5))
            servers = [starts.ServerGroup(random.randint(1, 3), first_s, random.uniform(0.1, 2)) for first_s in whole_s]
            found.append(starts.mean_answer_s(servers, requests))
    return found


def forecasting_answers() -> Answers:
    """Rates, peaks, and the recurrent network with weights drawn from a seed."""
    random = Random(0)
    counts = [random.randint(0, 90) for _ in range(240)]
    rates = forecasting.seconds_rps(counts, 250_000_000)
    found: Answers = [rates, lstm.peaks_of(rates, 5)]
    for bins, units in ((12, 5), (24, 25)):
        flat = np.array([random.uniform(-0.4, 0.4) for _ in range(4 * units * units + 9 * units + 1)])
        network = lstm.LstmNetwork(bins, 5, 20, flat)
        found += [network.forecast([random.randint(1, 400) for _ in range(bins)]) for _ in range(10)]
    return found


def small_answers() -> Answers:
    """Frontiers of prices, queues, and small integer programs."""
    found: Answers = []
    for seed in range(40):
        random = Random(seed)
        choices = [(random.randint(0, 9) / 4, random.randint(0, 9) / 4) for _ in range(12)]
        found += [frontier.frontier(choices), frontier.cheapest(choices, 1.5)]
        rate_rps, batch = random.uniform(0, 90), random.randint(1, 16)
        found += [queueing.fill_ms(batch, rate_rps), queueing.replicas_needed(rate_rps, batch, random.uniform(5, 400))]
        costs = [float(random.randint(-9, 9)) for _ in range(8)]
        rows: list[highs.Row] = [
            ({at: float(random.randint(-4, 9)) for at in range(8)}, -3.0, float(random.randint(4, 20)))
            for _ in range(3)
        ]
        solved = highs.minimise(costs, rows, integers=8, nodes_max=1000)
        found.append((solved.values, solved.proven))
    return found


def floats() -> FloatNetwork:
    """The small model of the test vectors before it was made of integers."""
    model = small_model()
    layers = (replace(own, weights=own.weights / 127.0, bias=own.bias / 1000.0, shift=0) for own in model.layers)
    return FloatNetwork(model.shape, tuple(layers))


def netnn_answers() -> Answers:
    """The test vectors through reference, mapper, program, emulated switches and quantiser."""
    found: Answers = []
    for model in (flow_model(), small_model()):
        for fabric in (Fabric(), Fabric(products_per_pass=4)):
            program = compile_network(model, fabric)
            found += [[layer.units for layer in place(model, fabric)], program.copies, program.time.latency_ns]
        found += [model.run(inputs(model, 6)), run_in_lanes(compile_network(model), inputs(model, 2), seed=1)[0]]
    verdicts, counts = Emulator(compile_network(small_model()), multiplier="shift-add").run(inputs(small_model(), 2))
    found += [[each.logits for each in verdicts], [(each.packets, each.operations) for each in counts.layers]]
    network = quantise(floats(), inputs(small_model(), 50))
    layers = [(layer.weights, layer.bias, layer.shift) for layer in network.layers]
    return [*found, layers, network.run(inputs(small_model(), 20))]


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {
    "asyfunc": asyfunc_answers,
    "biscale": biscale_answers,
    "budget": budget_answers,
    "colocation": colocation_answers,
    "fa2": fa2_answers,
    "flashpoint": flashpoint_answers,
    "forecasting": forecasting_answers,
    "harbor": harbor_answers,
    "igniter": igniter_answers,
    "ipa": ipa_answers,
    "mixed": mixed_answers,
    "netnn": netnn_answers,
    "paldia": paldia_answers,
    "small": small_answers,
    "sponge": sponge_answers,
    "starts": starts_answers,
    "usher": usher_answers,
}
