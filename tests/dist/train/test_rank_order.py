"""The order in which ranks count along the axes: another order is another set of neighbours, and the same numbers."""

import pytest
from axis_runs import config_of, differences, train_all, world_of
from ranks import run_ranks

from ppctl.config.mapping import to_mapping

PIPELINE = dict(pp=2, layout="Et*2|t*2L", tp=2, sp=True, ep=2)
ORDERS = [
    (PIPELINE | dict(dp=2, etp=1, data_parallel_sharding="full"), "tp-cp-ep-pp-dp"),
    (PIPELINE | dict(dp=2, etp=1), "pp-dp-ep-cp-tp"),
    (PIPELINE | dict(cp=2), "cp-ep-tp-pp-dp"),
]


@pytest.mark.shows("parallel.order")
@pytest.mark.timeout(200)
def test_any_order_of_ranks_agrees_with_one_process():
    configs = [config_of("experts", **axes, order=order) for axes, order in ORDERS]
    assert {world_of(config) for config in configs} == {8}
    ranks = run_ranks(train_all, 8, [to_mapping(config) for config in configs], timeout=180)
    for number, (_, order) in enumerate(ORDERS):
        far = differences("experts", [rank[number] for rank in ranks])
        assert {what: value for what, value in far.items() if not value <= 1e-12} == {}, order
