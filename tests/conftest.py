from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_generator() -> Iterator[None]:
    """Modules that a test makes by itself get the same parameters whichever tests ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
