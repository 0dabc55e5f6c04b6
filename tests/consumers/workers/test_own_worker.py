"""What is no worker, when one is named on the command line. One that is, is the README's: tests/end_to_end."""

import pytest

from consumers import workers
from consumers.errors import BadWorker, UnknownWorker


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
