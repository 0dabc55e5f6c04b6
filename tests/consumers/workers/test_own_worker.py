"""What is no worker, when one is named on the command line. One that is, is the README's: tests/end_to_end."""

import pytest

from consumers import BatchWorker, ExternalWorker, TransactionalWorker, workers
from consumers.errors import BadWorker, UnknownWorker
from consumers.runtime.service import check


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("webhook-dispach-worker", UnknownWorker, "did you mean webhook-dispatch-worker"),
        ("nowhere_at_all:Worker", BadWorker, "no module is called 'nowhere_at_all'"),
        ("consumers.worker:Nothing", BadWorker, "has no class Nothing"),
        ("consumers.worker:Policy", BadWorker, "is not a Worker"),
    ],
)
def test_what_is_no_worker_is_refused_with_what_to_do(name, error, said):
    with pytest.raises(error, match=said):
        workers.load(name)


@pytest.mark.parametrize(
    ("base", "method"), [(TransactionalWorker, "handle"), (BatchWorker, "handle_batch"), (ExternalWorker, "call")]
)
def test_a_worker_without_its_handler_does_not_start(base, method):
    class Forgetful(base):  # type: ignore[valid-type, misc]  # one of three, as a parameter
        name = "forgetful-worker"
        event_types = frozenset({"loyalty.earned"})

    with pytest.raises(BadWorker, match=f"has no {method}:"):
        check(Forgetful())
