"""Embedding, greedy choice and the counters at the end of a step."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, token
from tests.inputs import NAN, draw, filled


def at(position: int) -> torch.Tensor:
    return torch.tensor([position], dtype=torch.int32)


def test_embed_reads_the_token_at_the_position_of_each_call() -> None:
    tokens, table, out, position = torch.tensor([4, 0, 2]), draw(5, 7), filled(7), at(0)
    launch = token.bind_embed(tokens, position, table, out)
    for where in (0, 1, 2, 0):
        position.fill_(where)
        launch()
        assert torch.equal(out, table[tokens[where]])


def test_argmax_writes_the_next_token_and_prefers_the_lowest_id_among_equals() -> None:
    logits, tokens, position = torch.tensor([0.5, 3.0, -1.0, 3.0]), torch.zeros(4, dtype=torch.int64), at(2)
    token.bind_argmax(logits, tokens, position)()
    assert tokens.tolist() == [0, 0, 0, 1]
    logits.copy_(torch.tensor([-4.0, -3.0, -2.0, -1.0]))
    position.fill_(0)
    token.bind_argmax(logits, tokens, position)()
    assert tokens.tolist() == [0, 3, 0, 1]


def test_advance_sums_what_was_read_before_it_moves_on() -> None:
    position, full = at(10), torch.full((2, 3), 10, dtype=torch.int32)
    packed = torch.tensor([[4, 5, 6], [1, 2, 3]], dtype=torch.int32)
    entries, kept_total = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64)
    kept = torch.arange(14, dtype=torch.int32).reshape(2, 7)
    launch = token.bind_advance(position, [full, packed], (packed, entries), (kept, kept_total))
    launch()
    launch()
    # Two steps read 5 + 6 entries where 4 were packed: the step's own entry counts.
    assert entries.tolist() == [[11, 13, 15], [5, 7, 9]]
    assert torch.equal(kept_total, 2 * kept.long())
    assert int(position) == 12 and bool((full == 12).all())
    assert packed.tolist() == [[6, 7, 8], [3, 4, 5]]


def test_totals_do_not_wrap_where_int32_would() -> None:
    lengths, total = torch.full((1, 1), 2**30, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int64)
    launch = token.bind_advance(at(0), [lengths], (lengths, total))
    for _ in range(3):
        launch()
    assert int(total) == 3 * 2**30 + 6


def test_fault_01_what_does_not_fit_is_a_typed_error() -> None:
    lengths, total = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="total has shape"):
        token.bind_advance(at(0), [lengths], (lengths, total))
    with pytest.raises(ShapeError, match="position has shape"):
        token.bind_argmax(draw(4), torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="out has shape"):
        token.bind_embed(torch.zeros(4, dtype=torch.int64), at(0), draw(5, 7), filled(2, 7))


def test_a_broken_step_shows_in_the_token() -> None:
    """argmax over NaN must not pass for a confident choice of some other token."""
    logits, tokens = draw(8), torch.zeros(4, dtype=torch.int64)
    logits[5] = NAN
    token.bind_argmax(logits, tokens, at(0))()
    assert int(tokens[1]) == int(torch.argmax(logits)) == 5


def test_route_looks_up_the_token_at_the_position_and_nothing_past_the_end() -> None:
    table, tokens, position = torch.tensor([False, True, False]), torch.tensor([1, 0, 1]), at(0)
    flag = torch.tensor([-1], dtype=torch.int32)
    launch = token.bind_route(tokens, position, table, flag)
    seen = []
    for where in range(4):
        position.fill_(where)
        launch()
        seen.append(int(flag))
    assert seen == [1, 0, 1, 0]
