"""Hostile input to everything that reads what others wrote: one sentence each time, no hang, bounded memory.

The short form runs with the other tests and draws the same inputs each time. The long form, `make fuzz`, draws new
ones, FUZZ_INPUTS of them for each target. `tests/fuzz/guided.py` goes by coverage, where atheris is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from artifact.errors import UserError
from tests.fuzz.targets import targets

LONG = int(os.environ.get("FUZZ_INPUTS", "0"))
INPUTS = LONG or 25
MOST_CPU_S = 20  # of one input; processor time, because a busy machine must not fail a test
MOST_BYTES = 3 << 30  # of address space beyond what the process holds when an input begins
HOSTILE_TEXT = (
    "../../x",
    "/etc/passwd",
    "\\input{/etc/passwd}",
    "<script>alert(1)</script>",
    "%s{0}",
    "\0",
    "é" * 300,
    "",
)
HOSTILE_NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, 5e-324, 0.1)


def altered(original: bytes) -> st.SearchStrategy[bytes]:
    """The bytes of a valid input with a few edits: replaced, cut out, repeated, inserted, or cut off."""
    words = st.one_of(
        st.binary(max_size=12),
        st.sampled_from([n.to_bytes(8, "little") for n in (0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)]),
    )
    edit = st.tuples(st.integers(0, len(original)), st.sampled_from(("put", "insert", "cut", "repeat", "end")), words)

    def apply(edits: list[tuple[int, str, bytes]]) -> bytes:
        data = original
        for at, kind, word in edits:
            rest = data[at + len(word) :]
            if kind == "put":
                data = data[:at] + word + rest
            elif kind == "insert":
                data = data[:at] + word + data[at:]
            elif kind == "cut":
                data = data[:at] + rest
            elif kind == "repeat":
                data = data[:at] + data[at : at + 64] * 3 + data[at:]
            else:
                data = data[:at]
        return data

    return st.lists(edit, min_size=1, max_size=4).map(apply)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HOSTILE_NUMBERS),
    st.floats(),
    st.sampled_from(HOSTILE_TEXT),
    st.text(max_size=20),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.sampled_from(("a", "low", "schema", "type")), st.integers(-3, 3), max_size=2),
)


def edited(original: bytes) -> st.SearchStrategy[bytes]:
    """The JSON document with a few of its values, at any depth, replaced or left out."""

    def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        if where:
            yield where
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield from places(inner, (*where, key))

    document = json.loads(original)
    every = list(places(document))

    def apply(edits: list[tuple[tuple[Any, ...], Any, bool]]) -> bytes:
        changed = json.loads(original)
        for where, value, drop in edits:
            holder = changed
            with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier edit took this place away
                for key in where[:-1]:
                    holder = holder[key]
                if drop:
                    del holder[where[-1]]
                else:
                    holder[where[-1]] = value
        return json.dumps(changed).encode()

    edits = st.lists(st.tuples(st.sampled_from(every), VALUES, st.booleans()), min_size=1, max_size=3)
    return edits.map(apply)


def inputs(name: str) -> st.SearchStrategy[bytes]:
    """Altered valid inputs for the most part, JSON edited as JSON, and now and then bytes of no meaning."""
    target = targets()[name]
    kinds = [altered(each) for each in target.seeds] + [st.binary(max_size=200), st.sampled_from(target.seeds)]
    if target.is_json:
        kinds = [edited(each) for each in target.seeds] * 3 + kinds
        kinds.append(st.integers(1, 4000).map(lambda depth: b"[" * depth * 25))
    return st.one_of(kinds)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Little memory and little processor time, for as long as one input takes."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"one input took more than {MOST_CPU_S} s of processor time")

    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is bounded through Linux's /proc")
@pytest.mark.parametrize("name", sorted(targets()))
def test_hostile_input_is_one_sentence(name: str) -> None:
    target = targets()[name].run
    shown = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
    ignored = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

    @seed(int.from_bytes(os.urandom(4)) if LONG else 1)
    @settings(max_examples=INPUTS, deadline=None, derandomize=not LONG, suppress_health_check=ignored, phases=shown,
              database=None)  # fmt: skip
    @given(inputs(name))
    def attack(data: bytes) -> None:
        with bounded():
            try:
                target(data)
            except UserError as sentence:
                assert str(sentence).strip() and "Traceback" not in str(sentence)

    attack()


def test_valid_inputs_are_taken() -> None:
    """Otherwise every alteration would only meet the first check."""
    for name, target in targets().items():
        if name != "paths":
            for each in target.seeds:
                target.run(each)


def test_a_header_that_claims_terabytes_costs_nothing() -> None:
    """One of each kind, whatever is drawn: counts and lengths far beyond the file."""
    data = targets()["gguf"].seeds[0]
    for at, size in ((8, 8), (16, 8), (24, 8)):  # tensors, keys, length of the first key
        huge = data[:at] + (2**62).to_bytes(size, "little") + data[at + size :]
        with bounded(), pytest.raises(UserError, match="not a readable GGUF"):
            targets()["gguf"].run(huge)
    where = data.index(b"counts") + 6 + 4 + 4
    huge = data[:where] + (2**62).to_bytes(8, "little") + data[where + 8 :]
    with bounded(), pytest.raises(UserError, match="elements of an array do not fit"):
        targets()["gguf"].run(huge)
    for key, value in (("hidden_size", 2**17), ("vocab_size", 2**24), ("num_hidden_layers", 2**12)):
        document = json.loads(targets()["config"].seeds[0]) | {key: value}
        with bounded(), pytest.raises(UserError):
            targets()["config"].run(json.dumps(document).encode())
