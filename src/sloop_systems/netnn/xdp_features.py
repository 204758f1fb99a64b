"""The code of the feature extractor, compiled to BPF: a program of the network stack that makes packets."""

from sloop_systems.netnn.bpf import (
    BROADCAST,
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    R10,
    TC_DROP,
    TC_OK,
    BpfAssembler,
    KernelCall,
    KernelMap,
)
from sloop_systems.netnn.packets import ETHERTYPE, HEADER_BYTES, MAGIC
from sloop_systems.netnn.xdp_code import lock, swapped
from sloop_systems.netnn.xdp_layout import (
    AT_COUNT,
    AT_FEATURES,
    AT_HEAD,
    AT_INFERENCE,
    AT_INFERENCE_NUMBER,
    AT_LABEL,
    AT_LOCK,
    AT_MAGIC,
    AT_MESSAGES_SENT,
    AT_NEXT,
    AT_PART,
    AT_PASSED,
    AT_POOL,
    AT_POSITION,
    AT_QUEUE,
    AT_REFUSED,
    AT_RUNNING,
    AT_SLOT_VERSION,
    AT_STARTED,
    AT_TAIL,
    AT_TYPE,
    AT_VERSION,
    ETHERNET_BYTES,
    LABEL_FEATURES,
    LABEL_GENERATES,
    PAYLOAD,
    STALLED_NS,
    WINDOWS_PER_PASS,
    FeatureLayout,
    FeatureMaps,
    aligned,
    payload_room,
)


def broadcast(ports: KernelMap) -> BpfAssembler:
    """A program that sends every packet to all devices of a map. XDP copies a packet at a third of the cost of the
    network stack, and units take these copies as they are."""
    code = BpfAssembler()
    code.map_address(R1, ports)
    code.mov(R2, 0)
    code.mov(R3, BROADCAST)
    code.call(KernelCall.REDIRECT_MAP)
    code.exit()
    return code


class FeatureCode:
    """The code of the first switch: a program of the network stack that turns a packet of features into the messages
    of its inference, `WINDOWS_PER_PASS` in each pass of one packet over a cable of its own; inferences wait in a queue.
    """

    def __init__(self, layout: FeatureLayout, maps: FeatureMaps, copies: int, itself: int) -> None:
        """`copies`: the device of its cable on which `broadcast` copies packets to all units of the first layer.
        `itself`: that of its cable on which it gets the packet back that makes messages."""
        self._layout, self._program, self._maps = layout, layout.program, maps
        self._copies, self._itself = copies, itself
        self._payload = payload_room(self._program)

    _KEY, _FLOW, _INDEX, _SLOT = -4, -16, -24, -32

    def build(self) -> BpfAssembler:
        """The program."""
        code = self.code = BpfAssembler()
        self._base = -40 - aligned(6 + HEADER_BYTES + self._payload)
        self._frame = self._base + 6
        """Where on the stack the packet is made after its Ethernet header, such that all fields are aligned."""
        code.mov(R6, R1)
        self._parse()
        self._admit()
        code.label("pass")
        self._make_messages()
        self._endings()
        return code

    def _read_packet(self, offset: int, size: int) -> None:
        """The bytes of the packet to _FLOW of the stack."""
        code = self.code
        code.mov(R1, R6)
        code.mov(R2, offset)
        code.mov(R3, R10)
        code.add(R3, self._FLOW)
        code.mov(R4, size)
        code.call(KernelCall.SKB_LOAD_BYTES)

    def _parse(self) -> None:
        """R8 = the inference. A packet that makes messages goes on to the next pass."""
        code = self.code
        self._read_packet(AT_TYPE, 8)
        code.jump_if(R0, "!=", 0, "foreign")
        code.load(2, R3, R10, self._FLOW)
        code.jump_if(R3, "!=", swapped(ETHERTYPE), "foreign")
        code.load(2, R3, R10, self._FLOW + 2)
        code.jump_if(R3, "!=", swapped(MAGIC), "drop")
        code.load(1, R3, R10, self._FLOW + AT_LABEL - AT_TYPE)
        code.mov(R9, R3)
        lock(self.code, self._maps.registers, R7, "drop")
        code.jump_if(R9, "==", LABEL_GENERATES, "pass")
        code.jump_if(R9, "!=", LABEL_FEATURES, "unlock")
        self._read_packet(AT_INFERENCE, 4)
        code.load(4, R8, R10, self._FLOW)
        code.from_network_order(R8, 32)

    def _find_slot(self) -> None:
        """R9 = the state of the slot whose number is at _KEY."""
        code = self.code
        code.mov(R2, R10)
        code.add(R2, self._KEY)
        code.map_address(R1, self._maps.state)
        code.call(KernelCall.MAP_LOOKUP)
        code.jump_if(R0, "==", 0, "unlock")
        code.mov(R9, R0)

    def _admit(self) -> None:
        """Takes the features of a newer epoch into their slot and the slot into the queue. The packet makes messages
        itself if no other does."""
        code, program, layout = self.code, self._program, self._layout
        code.mov(R3, R8)
        code.bit_and(R3, program.slots - 1)
        code.store(4, R10, self._KEY, R3)
        self._find_slot()
        code.load(4, R3, R9, AT_STARTED)
        code.jump_if(R3, "==", 0, "newer")
        code.load(4, R4, R9, AT_INFERENCE_NUMBER)
        code.mov(R5, R8)
        code.shift_right(R4, program.slot_bits)
        code.shift_right(R5, program.slot_bits)
        code.sub(R5, R4)
        code.shift_left(R5, 32 + program.slot_bits)
        code.jump_if(R5, "s<=", 0, "refuse")
        code.label("newer")
        code.load(8, R3, R7, AT_HEAD)
        code.load(8, R4, R7, AT_TAIL)
        code.mov(R5, R4)
        code.sub(R5, R3)
        code.jump_if(R5, ">=", layout.queue, "refuse")
        code.bit_and(R4, layout.queue - 1)
        code.shift_left(R4, 2)
        code.mov(R5, R7)
        code.add(R5, R4)
        code.load(4, R3, R10, self._KEY)
        code.store(4, R5, AT_QUEUE, R3)
        code.value_address(R4, self._maps.version)
        code.load(4, R4, R4, 0)
        code.store(4, R9, AT_SLOT_VERSION, R4)
        code.store(4, R9, AT_INFERENCE_NUMBER, R8)
        code.store(4, R9, AT_STARTED, 1)
        code.store(4, R9, AT_NEXT, 0)
        self._take_features()
        self._start()

    def _take_features(self) -> None:
        """Copies the features into the slot, R9, which is then in the queue."""
        code, program = self.code, self._program
        code.mov(R1, R6)
        code.mov(R2, PAYLOAD)
        code.mov(R3, R9)
        code.add(R3, AT_FEATURES)
        code.mov(R4, program.input_count)
        code.call(KernelCall.SKB_LOAD_BYTES)
        code.jump_if(R0, "!=", 0, "refuse")
        code.load(8, R4, R7, AT_TAIL)
        code.add(R4, 1)
        code.store(8, R7, AT_TAIL, R4)

    def _start(self) -> None:
        """Goes on if no other packet makes messages, or if that is lost; shortens the packet to that of a message."""
        code = self.code
        code.call(KernelCall.KTIME_NS)
        code.load(8, R3, R7, AT_RUNNING)
        code.jump_if(R3, "==", 0, "start")
        code.load(8, R3, R7, AT_PASSED)
        code.sub(R0, R3)
        code.constant(R3, STALLED_NS)
        code.jump_if(R0, "s<", R3, "unlock")
        code.label("start")
        code.store(8, R7, AT_RUNNING, 1)
        code.mov(R1, R6)
        code.mov(R2, PAYLOAD + self._payload)
        code.mov(R3, 0)
        code.call(KernelCall.SKB_CHANGE_TAIL)
        code.jump_if(R0, "!=", 0, "stop")

    def _make_messages(self) -> None:
        """Up to `WINDOWS_PER_PASS` messages of the first inference in the queue."""
        code, layout = self.code, self._layout
        code.call(KernelCall.KTIME_NS)
        code.store(8, R7, AT_PASSED, R0)
        code.load(8, R3, R7, AT_HEAD)
        code.load(8, R4, R7, AT_TAIL)
        code.jump_if(R3, "==", R4, "stop")
        code.bit_and(R3, layout.queue - 1)
        code.shift_left(R3, 2)
        code.mov(R5, R7)
        code.add(R5, R3)
        code.load(4, R3, R5, AT_QUEUE)
        code.store(4, R10, self._KEY, R3)
        self._find_slot()
        self._begin_frame()
        code.mov(R3, 0)
        code.store(8, R10, self._INDEX, R3)
        code.label("message")
        code.load(4, R3, R9, AT_NEXT)
        code.value_address(R4, self._maps.order)
        code.load(4, R5, R4, 0)
        code.jump_if(R3, ">=", R5, "finished")
        code.jump_if(R3, ">=", layout.order_max, "finished")
        code.mov(R5, R3)
        code.add(R5, 1)
        code.store(4, R9, AT_NEXT, R5)
        code.shift_left(R3, 2)
        code.add(R4, R3)
        code.load(4, R3, R4, 4)
        code.jump_if(R3, ">=", self._program.layers[0].messages, "unlock")
        self._fill_frame()
        self._send_copy()
        code.load(8, R3, R10, self._INDEX)
        code.add(R3, 1)
        code.store(8, R10, self._INDEX, R3)
        code.jump_if(R3, "<", WINDOWS_PER_PASS, "message")
        code.jump("pass again")
        code.label("finished")
        code.load(8, R3, R7, AT_HEAD)
        code.add(R3, 1)
        code.store(8, R7, AT_HEAD, R3)
        code.load(8, R4, R7, AT_TAIL)
        code.jump_if(R3, "==", R4, "stop")

    def _begin_frame(self) -> None:
        """The header's fields that all messages of an inference share."""
        code, frame = self.code, self._frame - ETHERNET_BYTES
        for offset in range(self._base, -40, 8):
            code.store(8, R10, offset, 0)
        code.store(2, R10, frame + AT_MAGIC, swapped(MAGIC))
        code.load(4, R3, R9, AT_SLOT_VERSION)
        code.from_network_order(R3, 16)
        code.store(2, R10, frame + AT_VERSION, R3)
        code.load(4, R3, R9, AT_INFERENCE_NUMBER)
        code.from_network_order(R3, 32)
        code.store(4, R10, frame + AT_INFERENCE, R3)

    def _fill_frame(self) -> None:
        """The fields and values of message R3."""
        code, layout, frame = self.code, self._layout, self._frame - ETHERNET_BYTES
        code.value_address(R8, self._maps.gather)
        code.shift_left(R3, layout.gather_bits)
        code.add(R8, R3)
        for offset, size, field in ((0, 1, AT_COUNT), (2, 2, AT_POSITION), (4, 2, AT_POOL), (6, 2, AT_PART)):
            code.load(size, R3, R8, offset)
            code.store(size, R10, frame + field, R3)
        for tap in range(layout.taps):
            code.load(4, R3, R8, 8 + 4 * tap)
            code.bit_and(R3, (1 << layout.feature_bits) - 1)
            code.add(R3, R9)
            code.load(1, R4, R3, AT_FEATURES)
            code.store(1, R10, frame + PAYLOAD + tap, R4)

    def _send_copy(self) -> None:
        """A copy of the packet, with the frame's contents, to where it is copied for every unit."""
        code = self.code
        code.mov(R1, R6)
        code.mov(R2, ETHERNET_BYTES)
        code.mov(R3, R10)
        code.add(R3, self._frame)
        code.mov(R4, HEADER_BYTES + self._payload)
        code.mov(R5, 0)
        code.call(KernelCall.SKB_STORE_BYTES)
        code.mov(R1, R6)
        code.mov(R2, self._copies)
        code.mov(R3, 0)
        code.call(KernelCall.CLONE_REDIRECT)
        code.load(8, R3, R7, AT_MESSAGES_SENT)
        code.add(R3, 1)
        code.store(8, R7, AT_MESSAGES_SENT, R3)

    def _endings(self) -> None:
        code = self.code
        code.label("pass again")
        code.store(1, R10, self._FLOW, LABEL_GENERATES)
        code.mov(R1, R6)
        code.mov(R2, AT_LABEL)
        code.mov(R3, R10)
        code.add(R3, self._FLOW)
        code.mov(R4, 1)
        code.mov(R5, 0)
        code.call(KernelCall.SKB_STORE_BYTES)
        self._unlock()
        code.mov(R1, self._itself)
        code.mov(R2, 0)
        code.call(KernelCall.REDIRECT)
        code.exit()
        code.label("refuse")
        code.load(8, R3, R7, AT_REFUSED)
        code.add(R3, 1)
        code.store(8, R7, AT_REFUSED, R3)
        code.jump("unlock")
        code.label("stop")
        code.store(8, R7, AT_RUNNING, 0)
        code.label("unlock")
        self._unlock()
        code.label("drop")
        code.mov(R0, TC_DROP)
        code.exit()
        code.label("foreign")
        code.mov(R0, TC_OK)
        code.exit()

    def _unlock(self) -> None:
        code = self.code
        code.mov(R0, 1)
        code.mov(R2, 0)
        code.exchange_if_equal(R7, AT_LOCK, R2)
