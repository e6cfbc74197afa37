"""The exception tree and its words."""

from __future__ import annotations

import pickle

import numpy
import pytest
import torch

from symcomm import errors
from symcomm.errors import BadArgumentError
from symcomm.types import ReduceOp, make_premul_sum

pytestmark = pytest.mark.without_torch


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([], "none"), ([3], "3"), ([1, 0], "0, 1"), ([0, 1, 2], "0-2"), ([7, 0, 1, 2, 4, 6], "0-2, 4, 6, 7")],
)
def test_words_for_ranks(ranks, words):
    assert errors.format_ranks(ranks) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (4e-7, "0.4 us"), (1.2e-05, "12 us"), (0.0034, "3.4 ms"), (0.03, "30 ms"), (0.301, "300 ms"),
        (0.991, "990 ms"), (0.996, "1 s"), (999.7e-6, "1 ms"), (0.001, "1 ms"), (1.5, "1.5 s"), (5, "5 s"),
        (9.99, "10 s"), (12, "12 s"), (12.34, "12.3 s"), (1800, "30 min"),
    ],
)  # fmt: skip
def test_words_for_seconds(seconds, words):
    assert errors.format_seconds(seconds) == words


def test_words_for_exit():
    assert errors.format_exit(3) == "exited with code 3"
    assert errors.format_exit(-9) == "died with SIGKILL"


def test_all_errors_are_runtime_errors_and_named():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), RuntimeError)


def test_bad_argument_is_one_sentence():
    error = errors.bad_argument("all_reduce", "root", 7, "0 to 3", "pass a rank of this group")
    assert str(error) == "all_reduce: root must be 0 to 3, got 7; pass a rank of this group."
    assert isinstance(error, ValueError)


class Unspeakable:
    def __repr__(self):
        raise ValueError("no words")


def without_memory():
    tensor = torch.ones(6)
    tensor.untyped_storage().resize_(0)  # torch's own repr of it reads address 0
    return tensor


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (without_memory, "Tensor(6) of torch.float32"),
        (lambda: [without_memory()], "[Tensor(6) of torch.float32]"),
        (lambda: torch.ones(2, 3), "Tensor(2, 3) of torch.float32"),
        (Unspeakable, "an object of Unspeakable"),
        (lambda: 10**9999, "an object of int"),
        (lambda: "x" * 10**6, f"'{'x' * 97}...{'x' * 98}'"),
        (lambda: list(range(1000)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
    ],
)
def test_whatever_was_passed_is_told_in_one_line(got, words: str):
    assert str(errors.bad_argument("all_reduce", "op", got(), "known")) == f"all_reduce: op must be known, got {words}."


@pytest.mark.parametrize(
    ("got", "end"),
    [("all_redcue", "; did you mean all_reduce?"), ("AllReduce", "; did you mean all_reduce?"), ("nothing", ".")],
)
def test_a_bad_choice_names_the_nearest(got: str, end: str):
    error = errors.bad_choice("bench", "WHAT", got, ["all_reduce", "barrier"])
    assert str(error) == f"bench: WHAT must be one of all_reduce, barrier, got {got!r}{end}"


@pytest.mark.parametrize("factor", ["x", None, [2.0], 1j, numpy.empty(0)])
def test_a_factor_that_is_no_number_is_refused_where_it_is_given(factor):
    for call, make in {"make_premul_sum": make_premul_sum, "ReduceOp.PREMUL_SUM": ReduceOp.PREMUL_SUM}.items():
        with pytest.raises(BadArgumentError) as raised:
            make(factor)
        assert (
            str(raised.value)
            == f"{call}: factor must be a number or a tensor with at least one element, got {factor!r}."
        )
    assert make_premul_sum(2).factor == 2 and make_premul_sum(True).factor is True


def test_deadline_names_who_is_missing():
    error = errors.deadline("barrier 'x'", 1.5, missing=[2, 3, 4], arrived=[0, 1])
    assert str(error) == "barrier 'x' timed out after 1.5 s: ranks 2-4 did not come (there: 0, 1)."
    assert error.missing == [2, 3, 4] and isinstance(error, TimeoutError)


@pytest.mark.parametrize(
    "error",
    [errors.RankFailedError("gone", [2]), errors.DeadlineError("late", [1]), errors.SymcommError("x")],
)
def test_errors_survive_pickling(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and back.__dict__ == error.__dict__
