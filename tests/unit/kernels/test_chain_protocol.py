"""Who waits for whom in `chain.cu`, as a model that needs no device: its barriers, its threads, and a scheduler that is as unfair
as can be.

A barrier tells two phases apart and no more, a task lies in one of a few places, a ring has a few stages: whether that is enough
depends on how far behind each other its threads may be. So each of them in turn runs only when nobody else can, and whatever is
loaded or stored arrives early or late. The model has the kernel's own constants and its order of waits; what is computed it leaves out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tests.unit.kernels.chain_source import constant

WARPS = 2
"""Of a group that multiplies; the kernel has four, and two are as many as it takes to be apart."""

Runner = Generator[Callable[[], bool], None, None]
"""A thread: it goes on whenever what it has yielded is true."""


class Mistake(AssertionError):
    """What no order of events may lead to."""


class Product(NamedTuple):
    """The tiles of a product of a matrix, alike but for the diagonal."""

    tiles: int
    steps: int
    addends: int


class Task(NamedTuple):
    product: int
    is_mirrored: bool


@dataclass
class Barrier:
    """Counted arrivals, phase after phase. Loads that are under way count as arrivals."""

    count: int
    pending: int = 0
    phases: int = 0

    def arrive(self) -> None:
        self.pending += 1
        if self.pending == self.count:
            self.pending, self.phases = 0, self.phases + 1

    def over(self, phase: int) -> Callable[[], bool]:
        """As the kernel asks it, by the phase's parity. The phase must be the present one or the last, or parity says
        something else."""

        def ask() -> bool:
            if not phase <= self.phases <= phase + 1:
                raise Mistake(f"a thread waits for phase {phase} of a barrier that is in phase {self.phases}")
            return self.phases % 2 != phase % 2

        return ask


@dataclass
class Slot:
    """A place for a task, and the turn that it is of."""

    turn: int = -1
    task: Task | None = None


@dataclass
class Device:
    """What blocks share: tasks, and how many tiles are in memory."""

    products: list[Product]
    taken: int = 0
    stored: int = 0
    done: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks = [
            Task(number, tile % 2 == 1) for number, product in enumerate(self.products) for tile in range(product.tiles)
        ]

    def before(self, product: int) -> int:
        return sum(one.tiles for one in self.products[:product])


class Block:
    """One block: four threads that help, and two groups of warps that multiply by turns."""

    def __init__(self, device: Device, rules: Rules) -> None:
        self.device, self.hasty, self.stages = device, rules.hasty, constant("STAGES")
        self.full, self.empty = ([Barrier(count) for _ in range(self.stages)] for count in (1, WARPS))
        self.order = [Barrier(WARPS) for _ in range(2)]
        self.open = [Barrier(1) for _ in range(rules.places)]
        self.begun, self.ready, self.mirrored = Barrier(1), [Barrier(1), Barrier(1)], [Barrier(1), Barrier(1)]
        self.staged = [[Barrier(WARPS), Barrier(WARPS)] for _ in range(2)]
        self.slots = [Slot() for _ in range(rules.places)]
        self.arriving: list[Callable[[], None]] = []
        """Loads and stores that are under way."""

    def threads(self) -> dict[str, Runner]:
        found: dict[str, Runner] = {"takes": self.take(), "loads": self.load()}
        for who in range(2):
            found[f"stores {who}"] = self.store(who)
            for warp in range(WARPS):
                found[f"multiplies {who}.{warp}"] = self.multiply(who)
        return found

    def stages_of(self, task: Task) -> int:
        product = self.device.products[task.product]
        return product.steps + (product.addends > 1)

    def task_of(self, turn: int) -> Generator[Callable[[], bool], None, Task | None]:
        """What a thread reads when the turn opens; nothing at the end."""
        yield self.open[turn % len(self.open)].over(turn // len(self.open))
        slot = self.slots[turn % len(self.slots)]
        if slot.turn != turn:
            raise Mistake(f"a thread reads the task of turn {turn} where that of turn {slot.turn} lies")
        return slot.task

    def tell(self, turn: int, task: Task | None) -> None:
        slot = self.slots[turn % len(self.slots)]
        slot.turn, slot.task = turn, task

    def take(self) -> Runner:
        device, turn = self.device, 0
        while True:
            if turn > 0:
                yield self.begun.over(turn - 1)
            number, device.taken = device.taken, device.taken + 1
            if number >= len(device.tasks):
                for last in (turn, turn + 1):
                    self.tell(last, None)
                    self.open[last % len(self.open)].arrive()
                return
            task = device.tasks[number]
            self.tell(turn, task)
            needed = device.before(task.product)
            yield lambda needed=needed: device.stored >= needed  # type: ignore[misc]
            self.open[turn % len(self.open)].arrive()
            turn += 1

    def load(self) -> Runner:
        turn = used = 0
        while True:
            task = yield from self.task_of(turn)
            if task is None:
                return
            self.begun.arrive()
            for _ in range(self.stages_of(task)):
                stage, lap = used % self.stages, used // self.stages
                if lap > 0:
                    yield self.empty[stage].over(lap - 1)
                self.arriving.append(self.full[stage].arrive)
                used += 1
            turn += 1

    def store(self, who: int) -> Runner:
        device, turn = self.device, who
        while True:
            task = yield from self.task_of(turn)
            if task is None:
                return
            if device.products[task.product].addends:
                self.arriving.append(self.ready[who].arrive)
            else:
                self.ready[who].arrive()
            for half in range(2):
                yield self.staged[who][half].over(turn // 2)
                read: list[bool] = []
                self.arriving.append(lambda read=read: read.append(True))  # type: ignore[misc]
                yield lambda read=read: bool(read)
                if half == 0:
                    self.mirrored[who].arrive()
            device.stored += 1
            device.done.append(task)
            turn += 2

    def multiply(self, who: int) -> Runner:
        turn = used = 0
        while True:
            task = yield from self.task_of(turn)
            if task is None:
                return
            product = self.device.products[task.product]
            if turn % 2 != who:
                used, turn = used + self.stages_of(task), turn + 1
                continue
            lap = turn // 2
            if who == 1 or lap > 0:
                yield self.order[who].over(lap - (who == 0))
            for step in range(product.steps):
                yield self.full[used % self.stages].over(used // self.stages)
                if step > 0:
                    self.empty[(used - 1) % self.stages].arrive()
                used += 1
            if product.addends > 1 and not self.hasty:
                yield self.full[used % self.stages].over(used // self.stages)
            self.order[1 - who].arrive()
            self.empty[(used - 1) % self.stages].arrive()
            yield self.ready[who].over(lap)
            if product.addends > 1:
                if self.hasty:
                    yield self.full[used % self.stages].over(used // self.stages)
                self.empty[used % self.stages].arrive()
                used += 1
            for half in range(2):
                if half == 1 and task.is_mirrored:
                    yield self.mirrored[who].over(lap)
                self.staged[who][half].arrive()
            turn += 1


@dataclass(frozen=True)
class Rules:
    """What differs between runs."""

    places: int = constant("TURNS")
    """For tasks, and barriers that open turns."""
    hasty: bool = False
    """Whether a group goes on before the addend of the other one, which lies among its operands, is there."""


def run(products: list[Product], rules: Rules, *, slow: str, late: bool, seed: int, blocks: int) -> Device:
    """All of a chain. Threads whose name begins with `slow` go on only when nobody else can, and what is under way arrives
    then, too, if it is `late`."""
    chance, device = random.Random(seed), Device(products)
    alive: list[tuple[Block, str, Runner, list[Callable[[], bool]]]] = []
    everybody = [Block(device, rules) for _ in range(blocks)]
    for block in everybody:
        alive += [(block, name, thread, [next(thread)]) for name, thread in block.threads().items()]
    while alive:
        able = [one for one in alive if one[3][0]()]
        quick = [one for one in able if not one[1].startswith(slow)]
        arriving = [block for block in everybody if block.arriving]
        if arriving and (not late or not quick) and (not able or chance.random() < 0.5):
            pick = chance.choice(arriving).arriving
            pick.pop(chance.randrange(len(pick)))()
            continue
        if not able:
            raise Mistake(f"everybody waits: {[name for _, name, *_ in alive]}")
        one = chance.choice(quick or able)
        try:
            one[3][0] = next(one[2])
        except StopIteration:
            alive.remove(one)
    return device


THREADS = [
    "takes",
    "loads",
    "stores",
    "stores 0",
    "stores 1",
    "multiplies",
    "multiplies 0",
    "multiplies 0.0",
    "multiplies 1.1",
]
CHAINS = {
    "of one step": [Product(9, 1, 0), Product(9, 1, 1), Product(9, 1, 2), Product(9, 1, 0)],
    "with two addends": [Product(8, 1, 2), Product(8, 1, 2), Product(8, 1, 2)],
    "of as many steps as stages": [Product(7, 4, 0), Product(7, 3, 2), Product(7, 4, 1)],
    "of many steps": [Product(5, 9, 0), Product(5, 9, 2)],
    "of one tile": [Product(1, 1, 0), Product(1, 1, 1), Product(1, 1, 2), Product(1, 2, 2)],
    "for which nobody waits": [Product(60, 1, 0)],
    "for which nobody waits, with two addends": [Product(60, 1, 2)],
}


def follow(products: list[Product], slow: str, rules: Rules) -> None:
    for late in (False, True):
        for seed in range(3):
            for blocks in (1, 3):
                found = run(products, rules, slow=slow, late=late, seed=seed, blocks=blocks)
                assert sorted(found.done) == sorted(found.tasks)


def follow_all(rules: Rules) -> None:
    for slow in THREADS:
        for products in CHAINS.values():
            follow(products, slow, rules)


@pytest.mark.parametrize("slow", THREADS)
@pytest.mark.parametrize("products", CHAINS.values(), ids=CHAINS.keys())
def test_nobody_is_lost_however_slow_somebody_is(products: list[Product], slow: str) -> None:
    follow(products, slow, Rules())


@pytest.mark.parametrize("places", [2, 4, 6, 8])
def test_with_fewer_places_for_tasks_somebody_is(places: int) -> None:
    with pytest.raises(Mistake):
        follow_all(Rules(places=places))


def test_who_does_not_wait_for_the_other_group_s_addend_is() -> None:
    with pytest.raises(Mistake, match="of a barrier that is in phase"):
        follow_all(Rules(hasty=True))
