"""The switch's arithmetic, its instruction set, its registers, and what it counts."""

import ast
import inspect

import numpy as np
import pytest

from sloop_systems.netnn import switch
from sloop_systems.netnn.mapper import Fabric, NoCapacity
from sloop_systems.netnn.network import SIGNED, requantise
from sloop_systems.netnn.packets import Packet, packets_of
from sloop_systems.netnn.program import compile_network
from sloop_systems.netnn.switch import (
    OPERATIONS,
    Multiplier,
    Pipeline,
    ProgramBuilder,
    Register,
    depth_of_product,
    multiplied,
    products8,
    products16,
)
from tests.sloop_systems.netnn.models import flow_model, picture_model, rows_of, small_model


@pytest.mark.parametrize("multiplier", ["shift-add", "lut16"])
@pytest.mark.parametrize("is_signed", [True, False])
def test_all_products_of_two_bytes(multiplier: Multiplier, is_signed: bool) -> None:
    x = np.repeat(np.arange(-128, 128) if is_signed else np.arange(256), 256)
    w = np.tile(np.arange(-128, 128), 256)
    assert (multiplied(x.tolist(), w.tolist(), multiplier, is_signed=is_signed) == x * w).all()


def test_tables_of_products() -> None:
    assert products16().nbytes == 131_072
    assert products8().nbytes == 65_536
    assert (products16().min(), products16().max()) == (-16_256, 16_384)
    unsigned = products16(is_signed=False)
    assert (unsigned.min(), unsigned.max()) == (-32_640, 32_385)
    assert multiplied([100, -100], [77, 77], "lut8").tolist() == [7680, -7936]  # 7700 and -7700, rounded down


def test_a_product_takes_few_stages() -> None:
    assert depth_of_product("shift-add") == 4
    assert depth_of_product("lut16") == 1


def test_a_product_is_fourteen_counted_operations() -> None:
    made = ProgramBuilder("shift-add")
    made.multiply("x", "w", is_product=True)
    fields, _ = made.program().run({"x": np.array([3], np.int32), "w": np.array([-5], np.int32)})
    assert (fields[switch.OPS], fields[switch.PRODUCTS]) == (14, 1)
    assert [each.operation for each in made.instructions if each.is_counted].count("shl") == 7


def test_constants_of_more_than_a_byte() -> None:
    made = ProgramBuilder("shift-add")
    to = made.multiply("x", 1984)
    fields, _ = made.program().run({"x": 31})
    assert fields[to] == 31 * 1984


@pytest.mark.parametrize("shift", [0, 1, 7, 30])
def test_requantisation(shift: int) -> None:
    made = ProgramBuilder("lut16")
    to = made.requantise("sums", shift)
    sums = np.array([-(2**30), -1, 0, 1, 63, 64, 65, 127, 128, 2**20, 2**30], np.int32)
    fields, _ = made.program().run({"sums": sums})
    assert fields[to].tolist() == requantise(sums.astype(float), shift).tolist()


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 16, 25, 160])
def test_sums_take_one_addition_less_than_lanes(lanes: int) -> None:
    made = ProgramBuilder("lut16")
    to = made.sum_lanes("x", lanes)
    values = np.arange(4 * lanes, dtype=np.int32).reshape(4, lanes) ** 2
    fields, _ = made.program().run({"x": values})
    assert fields[to].tolist() == values.sum(axis=1).tolist()
    assert fields[switch.OPS] == 4 * (lanes - 1)
    assert made.program().depth() == int(np.ceil(np.log2(lanes))) + 1  # and one move


def test_no_instruction_multiplies_divides_or_is_floating_point() -> None:
    assert not {name for name in OPERATIONS if "mul" in name or "div" in name or "mod" in name or name.startswith("f")}
    for network in (small_model(), picture_model(inputs=SIGNED), flow_model()):
        for multiplier in ("shift-add", "lut16", "lut8"):
            program = compile_network(network)
            for layer in program.layers:
                for unit in Pipeline(program, layer.label, 0, multiplier).programs:
                    assert {each.operation for each in unit.instructions} <= set(OPERATIONS)
                    kinds = {np.asarray(value).dtype.kind for value in unit.constants.values()}
                    assert kinds <= {"i"}


def test_no_step_of_the_interpreter_multiplies() -> None:
    steps = {step.__name__ for step in switch._STEPS.values()} | {
        "_predicated",
        "_counted",
        "_effect",
        "_pairs",
        "_beside",
    }
    tree = ast.parse(inspect.getsource(switch))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in steps}
    assert found.keys() == steps
    wrong = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
    assert not [name for name, node in found.items() for each in ast.walk(node) if isinstance(each, wrong)]


def test_a_cell_of_another_epoch_reads_as_its_initial_value() -> None:
    register = Register("sums", 4, 32, is_activation=True, slots=2)
    made = ProgramBuilder("lut16")
    to = made.put("reg_read", "place", made.constant(np.array([7, 8])), detail=register)
    made.put("reg_write", "place", "value", detail=register)
    program = made.program()
    place, value = np.array([1, 3]), np.array([50, 60], np.int32)
    given = {"place": place, "value": value, "slot": 1}
    assert program.run(given | {"epoch": 0})[0][to].tolist() == [7, 8]
    assert program.run(given | {"epoch": 0})[0][to].tolist() == [50, 60]
    assert program.run(given | {"epoch": 1})[0][to].tolist() == [7, 8]
    assert program.run(given | {"epoch": 1, "slot": 0})[0][to].tolist() == [7, 8]


def test_memory_is_what_the_table_counts() -> None:
    program = compile_network(flow_model())
    cells = [Pipeline(program, layer.label, 0).memory_cells for layer in program.layers]
    assert cells == [1296, 5680, 13, 25, 1]


def drops(packets: list[Packet], slots: int = 8) -> dict[str, int]:
    """What a unit of the first layer drops."""
    pipeline = Pipeline(compile_network(small_model(), Fabric(slots=slots)), 0, 0)
    for packet in packets:
        pipeline.receive(packet.build())
    return pipeline.counts.drops


def test_packets_that_are_dropped() -> None:
    program = compile_network(small_model())
    (row,) = rows_of(small_model(), 1)
    old, new = packets_of(program, row, 3), packets_of(program, row, 11)  # the same slot
    first = {"version": 1, "label": 0, "inference": 3, "source": 0, "position": 0, "values": (1, 0, 0, 1)}
    assert drops([*old, *old[:5]]) == {"duplicate": 5}
    assert drops([*old[:9], new[0], *old[9:12], *old[:2]]) == {"old epoch": 5}
    assert drops([Packet(**first | {"version": 2})]) == {"unknown version": 1}  # type: ignore[arg-type]
    assert drops([Packet(**first | {"label": 1})]) == {"unknown label": 1}  # type: ignore[arg-type]
    assert drops([Packet(**first | {"values": (1,)})]) == {"malformed": 1}  # type: ignore[arg-type]
    assert drops([Packet(**first | {"position": 57, "cell": 19})]) == {"malformed": 1}  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 8, 65_536])
def test_epochs_are_compared_as_serial_numbers(slots: int) -> None:
    epochs = 2**32 // slots
    (row,) = rows_of(small_model(), 1)
    program = compile_network(small_model(), Fabric(slots=slots))

    def packet(epoch: int) -> Packet:
        return packets_of(program, row, epoch * slots)[0]

    assert drops([packet(0), packet(epochs // 2 - 1)], slots) == {}
    assert drops([packet(epochs // 2 - 1), packet(epochs - 2), packet(0)], slots) == {}  # around the end
    assert drops([packet(5), packet(4)], slots) == {"old epoch": 1}
    assert drops([packet(1), packet(epochs // 2), packet(0)], slots) == {"old epoch": 1}


@pytest.mark.parametrize("multiplier", ["shift-add", "lut16"])
def test_no_packet_takes_more_stages_than_its_passes_have(multiplier: Multiplier) -> None:
    """A program longer than a pipeline is one that recirculates anyway, for its products."""
    for network in (small_model(), flow_model(), picture_model()):
        program = compile_network(network)
        for layer in program.layers:
            passes = max(1, -(-max(layer.products_in_order) // program.fabric.products_per_pass))
            depth = max(each.depth() for each in Pipeline(program, layer.label, 0, multiplier).programs)
            assert depth <= passes * program.fabric.stages, layer.name


@pytest.mark.parametrize(
    ("fabric", "multiplier", "message"),
    [
        (Fabric(products_per_pass=9), "shift-add", "9 products in one pass take 72 operations .* a stage has 64 ALUs"),
        (Fabric(products_per_pass=65), "lut16", "65 products in one pass take 65 operations"),
        (Fabric(stages=7), "shift-add", "5 products and their sum take 8 stages; a pipeline has 7"),
    ],
)
def test_budgets_of_a_pipeline(fabric: Fabric, multiplier: Multiplier, message: str) -> None:
    program = compile_network(small_model(), fabric)
    with pytest.raises(NoCapacity, match=message):
        Pipeline(program, 0, 0, multiplier)


def test_budgets_that_are_kept() -> None:
    program = compile_network(small_model(), Fabric(products_per_pass=20))
    Pipeline(program, 0, 0, "lut16")
    Pipeline(compile_network(small_model(), Fabric(products_per_pass=8)), 0, 0, "shift-add")
